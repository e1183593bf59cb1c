//! Owns what a pool demands of the hand-offs that prefill workers answer.

use serde::Deserialize;

use super::Network;

/// What a pool demands of a hand-off.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct HandOff {
    /// The networks in one of which the host must lie that a hand-off names for decode to fetch from (`nixl`: `remote_host`; `trtllm`:
    /// `ctx_info_endpoint`); a host name lies in none. A hand-off that names another has failed, and the next prefill worker is asked.
    /// Empty: any host will do, and one that is not the worker's own address is told of in the log, once for each worker.
    #[cfg_attr(feature = "schema", schemars(extend("default" = [])))]
    pub networks: Vec<Network>,
}
