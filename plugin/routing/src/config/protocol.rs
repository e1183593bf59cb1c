//! Owns the engines' protocols that this version speaks, and in which order each runs its legs.

use serde::Deserialize;

/// How the prefill worker's KV cache gets to the decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
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

/// Who runs the legs of a hand-off, and in which order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Legs {
    /// The filter calls prefill, and forwards decode when it has answered.
    Sequential,
    /// The filter calls prefill, and forwards decode at once.
    Concurrent,
    /// Somebody behind the filter, who is told of the choice by headers.
    Elsewhere,
}

impl Protocol {
    /// Its name in configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
            Self::Sglang => "sglang",
            Self::Trtllm => "trtllm",
            Self::Llmd => "llmd",
            Self::Direct => "direct",
            Self::Aggregated => "aggregated",
        }
    }

    /// Who runs its legs.
    pub fn legs(self) -> Legs {
        match self {
            Self::Nixl | Self::Mooncake | Self::Trtllm => Legs::Sequential,
            Self::Sglang => Legs::Concurrent,
            Self::Llmd | Self::Direct | Self::Aggregated => Legs::Elsewhere,
        }
    }

    /// Whether a prefill worker's bootstrap server must be known before it can be handed a request.
    pub fn needs_binding(self) -> bool {
        matches!(self, Self::Sglang | Self::Mooncake)
    }

    /// Whether requests go to the workers themselves, by their addresses.
    pub fn reaches_workers(self) -> bool {
        self != Self::Direct
    }
}
