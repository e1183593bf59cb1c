//! The protocols by which pd-router works, and the engines that each is tried with.

use serde_json::{Value, json};

use crate::engines::Role;

/// How the KV cache gets from prefill to decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// vLLM's NixlConnector.
    Nixl,
    /// vLLM's MooncakeConnector.
    Mooncake,
    /// SGLang's bootstrap.
    Sglang,
    /// TensorRT-LLM's context first.
    Trtllm,
    /// llm-d's sidecar on the decode pod.
    Llmd,
    /// Dynamo's frontends.
    Direct,
    /// Workers that do both.
    Aggregated,
}

impl Protocol {
    /// As configuration spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Protocol::Nixl => "nixl",
            Protocol::Mooncake => "mooncake",
            Protocol::Sglang => "sglang",
            Protocol::Trtllm => "trtllm",
            Protocol::Llmd => "llmd",
            Protocol::Direct => "direct",
            Protocol::Aggregated => "aggregated",
        }
    }

    /// The dialect of its engines. What plays a sidecar or a frontend takes requests whole, in vLLM's.
    pub fn dialect(self) -> &'static str {
        match self {
            Protocol::Mooncake => "mooncake",
            Protocol::Sglang => "sglang",
            Protocol::Trtllm => "trtllm",
            Protocol::Nixl | Protocol::Llmd | Protocol::Direct | Protocol::Aggregated => "vllm",
        }
    }

    /// Whether pd-router itself sends the prefill leg.
    pub fn has_prefill_leg(self) -> bool {
        !matches!(
            self,
            Protocol::Llmd | Protocol::Direct | Protocol::Aggregated
        )
    }

    /// Whether the decode leg waits for prefill's answer.
    pub fn is_sequential(self) -> bool {
        matches!(self, Protocol::Nixl | Protocol::Mooncake | Protocol::Trtllm)
    }

    /// Whether prefill engines have a bootstrap server.
    pub fn has_bootstrap(self) -> bool {
        matches!(self, Protocol::Mooncake | Protocol::Sglang)
    }

    /// What the engines that get the decode leg are.
    pub fn decode_role(self) -> Role {
        match self.has_prefill_leg() {
            true => Role::Decode,
            false => Role::Aggregated,
        }
    }

    /// What they are listed as.
    pub fn decode_listed_as(self) -> Role {
        match self {
            Protocol::Aggregated => Role::Aggregated,
            _ => Role::Decode,
        }
    }

    /// Its fields of a pool.
    pub fn pool(self) -> Value {
        json!({"protocol": self.as_str()})
    }
}
