//! Owns the names of the engines' protocols in the configuration.

use serde::Deserialize;

use crate::handoff::aggregated::Aggregated;
use crate::handoff::direct::DirectMode;
use crate::handoff::llmd::Llmd;
use crate::handoff::mooncake::Mooncake;
use crate::handoff::nixl::Nixl;
use crate::handoff::sglang::Sglang;
use crate::handoff::trtllm::Trtllm;
use crate::handoff::{Protocol, ProtocolRules};

/// Protocol by which the prefill worker's KV cache gets to the decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(
    feature = "schema",
    derive(schemars::JsonSchema),
    schemars(rename = "Protocol")
)]
#[serde(rename_all = "snake_case")]
pub enum ProtocolName {
    /// vLLM with `NixlConnector` (or LMCache over it): prefill first, then decode. The decode request gets the
    /// `kv_transfer_params` of the prefill answer.
    Nixl,
    /// vLLM with `MooncakeConnector`: prefill first, then decode. The `kv_transfer_params` of both requests name one transfer
    /// by its number. The filter polls the bootstrap servers for the engines' ids, twice a second.
    Mooncake,
    /// SGLang: both legs at once. Both requests get `bootstrap_host`, `bootstrap_port` and `bootstrap_room` (lists for batches and
    /// `n` > 1), and ranks.
    Sglang,
    /// TensorRT-LLM (`trtllm-serve`): the context first, then generation. The generation request gets `disaggregated_params`
    /// and the prompt's token ids.
    Trtllm,
    /// llm-d's routing sidecar on decode pods: the sidecar runs the legs, and the header `x-prefiller-host-port` names the
    /// prefill worker.
    Llmd,
    /// NVIDIA Dynamo frontends in `--router-mode direct`: Dynamo runs the legs, and headers name both workers.
    Direct,
    /// Any engine that runs requests aggregated: there is no hand-off, and nothing is written into requests.
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

    /// The rules of the protocol of this name.
    pub fn rules(self) -> &'static ProtocolRules {
        self.engine().rules()
    }
}
