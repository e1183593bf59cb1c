//! Owns a pool that is built in code: all defaults, and a fleet that its owner supplies.

use super::*;

impl Pool {
    /// A pool with the configuration's defaults. It has no source: its workers come by `Router::adopt`.
    pub fn new(name: &str, protocol: ProtocolName) -> Self {
        Self {
            name: name.to_owned(),
            protocol,
            discovery: Discovery::Static(StaticDiscovery {
                workers: Vec::new(),
            }),
            frontends: Vec::new(),
            clusters: Clusters::default(),
            destinations: Destinations::default(),
            engine_metrics: None,
            selection: Selection::default(),
            prefill: PrefillLeg::default(),
            decode: DecodeLeg::default(),
            block_tokens: default_block_tokens(),
            kv_blocks: None,
            max_model_len: None,
            prefixes: PrefixKnowledge::default(),
            admission: Admission::default(),
            conditional: None,
            booking_expiry_ms: default_booking_expiry(),
            trust_clients: false,
            paths: paths::default(),
            on_prefill_absent: OnPrefillAbsent::default(),
            on_stale_pin: None,
            on_prefill_failure: default_on_failure(),
            enforce_disagg: false,
            bootstrap: BootstrapSource::default(),
            responses: Responses::default(),
            cleanup: CleanUp::default(),
            handoff: HandOff::default(),
            report_cached_tokens: false,
            call_headers: Vec::new(),
            output: Output::default(),
            health: Health::default(),
            model_rewrites: Vec::new(),
            objectives: Objectives::default(),
            on_empty: OnEmpty::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_built_in_code_is_the_one_that_a_document_without_further_fields_gives() {
        let document =
            r#"{"pools":[{"name":"p","protocol":"nixl","discovery":{"static":{"workers":[]}}}]}"#;
        let parsed: Config = serde_json::from_str(document).unwrap();
        assert_eq!(parsed.pools, [Pool::new("p", ProtocolName::Nixl)]);
    }
}
