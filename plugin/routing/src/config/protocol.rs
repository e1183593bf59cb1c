//! Owns the engines' protocols that this version speaks, and in which order each runs its legs.

use serde::Deserialize;

/// How the prefill worker's KV cache gets to the decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// vLLM's `NixlConnector`: prefill first, its `kv_transfer_params` spliced into the decode request.
    Nixl,
    /// vLLM's `MooncakeConnector`: both legs name one transfer.
    Mooncake,
    /// SGLang's bootstrap: both legs at once, with the same room.
    Sglang,
    /// TensorRT-LLM: the context first, its `disaggregated_params` spliced into the generation request.
    Trtllm,
    /// llm-d: the decode worker's sidecar runs the legs; the prefill worker is told by a header.
    Llmd,
    /// NVIDIA Dynamo frontends in `--router-mode direct`: the choice is told by headers.
    Direct,
    /// No hand-off: every worker runs whole requests.
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
