//! Owns the demands of a pool on the hand-offs that prefill workers answer.

use std::time::Duration;

use serde::Deserialize;

use super::Network;

/// Demands of a pool on a hand-off.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct HandOff {
    /// Networks of the hosts that a hand-off may name for decode to fetch from (`nixl`: `remote_host`; `trtllm`:
    /// `ctx_info_endpoint`). A hand-off with a host outside of these networks, or with a host name, has failed, and the next
    /// prefill worker is called. Empty: any host is accepted, and a host other than the worker's own address is logged once for
    /// each worker.
    #[cfg_attr(feature = "schema", schemars(extend("default" = [])))]
    pub networks: Vec<Network>,
    /// Milliseconds, from the prefill worker's answer on, for which the worker keeps the computed KV; 0: no limit. No decode
    /// leg begins with a hand-off after that time, nor after the time that the hand-off itself names. vLLM frees the KV after
    /// `kv_lease_duration` (30 s), and a later read may fetch the KV of another request.
    pub lease_ms: u32,
}

impl Default for HandOff {
    /// The lease is vLLM's.
    fn default() -> Self {
        Self {
            networks: Vec::new(),
            lease_ms: 30_000,
        }
    }
}

impl HandOff {
    /// Time for which a hand-off is good; none: no limit.
    pub fn lease(&self) -> Option<Duration> {
        let ms = u64::from(self.lease_ms);
        (ms > 0).then(|| Duration::from_millis(ms))
    }
}
