//! Owns the names of the engines' protocols in configuration.

use serde::Deserialize;

use crate::handoff::aggregated::Aggregated;
use crate::handoff::direct::DirectMode;
use crate::handoff::llmd::Llmd;
use crate::handoff::mooncake::Mooncake;
use crate::handoff::nixl::Nixl;
use crate::handoff::sglang::Sglang;
use crate::handoff::trtllm::Trtllm;
use crate::handoff::{Protocol, ProtocolRules};

/// How the prefill worker's KV cache gets to the decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(
    feature = "schema",
    derive(schemars::JsonSchema),
    schemars(rename = "Protocol")
)]
#[serde(rename_all = "snake_case")]
pub enum ProtocolName {
    /// vLLM with `NixlConnector` (or LMCache over it): prefill first, then decode, whose request gets the `kv_transfer_params` of
    /// prefill's answer.
    Nixl,
    /// vLLM with `MooncakeConnector`: prefill first, then decode; the `kv_transfer_params` of both name one transfer by its number.
    /// The engines' ids are asked of the bootstrap servers, twice a second.
    Mooncake,
    /// SGLang: both legs at once. Both requests get `bootstrap_host`, `bootstrap_port` and `bootstrap_room` (lists for batches and
    /// `n` > 1), and ranks.
    Sglang,
    /// TensorRT-LLM (`trtllm-serve`): the context first, then generation, whose request gets `disaggregated_params` and the
    /// prompt's token ids.
    Trtllm,
    /// llm-d's routing sidecar on decode pods: it runs the legs, and is told of the prefill worker by the header
    /// `x-prefiller-host-port`.
    Llmd,
    /// NVIDIA Dynamo frontends in `--router-mode direct`: Dynamo runs the legs, and is told of both workers by headers.
    Direct,
    /// Any engine that runs whole requests: there is no hand-off, and nothing is written.
    Aggregated,
}

impl ProtocolName {
    /// The protocol of this name. A new engine is registered here.
    pub fn engine(self) -> &'static dyn Protocol {
        match self {
            Self::Nixl => &Nixl,
            Self::Mooncake => &Mooncake,
            Self::Sglang => &Sglang,
            Self::Trtllm => &Trtllm,
            Self::Llmd => &Llmd,
            Self::Direct => &DirectMode,
            Self::Aggregated => &Aggregated,
        }
    }

    /// The rules of that protocol.
    pub fn rules(self) -> &'static ProtocolRules {
        self.engine().rules()
    }
}
