//! Owns llm-d's routing sidecar: a header names the prefill worker, and the sidecar beside the decode worker runs the legs.
//!
//! The body stays unchanged, and the request's destination is the decode worker. Source: llm-d's picker contract.

use std::net::SocketAddr;

use super::HeaderValue;
use super::protocol::{LegOrder, Protocol, ProtocolRules};
use super::unserved;
use crate::fleet::Target;
use crate::request::Generation;

/// llm-d's routing sidecar on decode pods.
#[derive(Debug)]
pub struct Llmd;

impl Protocol for Llmd {
    fn rules(&self) -> &'static ProtocolRules {
        &ProtocolRules {
            name: "llmd",
            order: LegOrder::Backend,
            reaches_workers: true,
            // The sidecar decides: the body is not touched.
            split: &Generation::ALL,
            split_if_configured: &[],
            has_generate_api: false,
            unserved: &[
                &unserved::PROMPT_LOGPROBS,
                &unserved::ECHOED_LOGPROBS,
                &unserved::BEAM_SEARCH,
            ],
            refuses_too_long: true,
        }
    }

    fn pair_headers(&self, prefill: &Target, _decode: &Target) -> Vec<HeaderValue> {
        let address = prefill.worker.address;
        address.map(prefiller).into_iter().collect()
    }
}

/// Header from which the sidecar reads the prefill worker.
pub const PREFILLER: &str = "x-prefiller-host-port";

/// The header that names the prefill worker: `ip:port`, IPv6 in brackets.
pub fn prefiller(prefill: SocketAddr) -> HeaderValue {
    (PREFILLER, prefill.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefill_worker_is_named_by_address_and_port() {
        let header = |address: &str| prefiller(address.parse().unwrap());
        assert_eq!(
            header("10.0.0.1:8000"),
            ("x-prefiller-host-port", "10.0.0.1:8000".to_owned())
        );
        assert_eq!(header("[fd00::1]:8000").1, "[fd00::1]:8000");
    }
}
