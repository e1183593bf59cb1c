//! Owns what a pool demands of the hand-offs that prefill workers answer.

use std::time::Duration;

use serde::Deserialize;

use super::Network;

/// What a pool demands of a hand-off.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct HandOff {
    /// The networks in one of which the host must lie that a hand-off names for decode to fetch from (`nixl`: `remote_host`; `trtllm`:
    /// `ctx_info_endpoint`); a host name lies in none. A hand-off that names another has failed, and the next prefill worker is asked.
    /// Empty: any host will do, and one that is not the worker's own address is told of in the log, once for each worker.
    #[cfg_attr(feature = "schema", schemars(extend("default" = [])))]
    pub networks: Vec<Network>,
    /// Milliseconds for which prefill workers keep what they have computed, from their answer on: no decode leg begins with a hand-off
    /// after that, nor after the time that the hand-off itself names. 0: as long as it takes. vLLM frees it after
    /// `kv_lease_duration` (30 s), and what is read later may be another request's.
    pub lease_ms: u32,
}

impl Default for HandOff {
    /// vLLM's lease.
    fn default() -> Self {
        Self {
            networks: Vec::new(),
            lease_ms: 30_000,
        }
    }
}

impl HandOff {
    /// For how long a hand-off is good; none: as long as it takes.
    pub fn lease(&self) -> Option<Duration> {
        let ms = u64::from(self.lease_ms);
        (ms > 0).then(|| Duration::from_millis(ms))
    }
}
