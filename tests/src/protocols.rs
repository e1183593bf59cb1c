//! Owns the list of pd-router's protocols, and the engines with which each is tested.

use serde_json::{Value, json};

use crate::engines::Role;

/// How the KV cache moves from prefill to decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// vLLM's NixlConnector.
    Nixl,
    /// vLLM's MooncakeConnector.
    Mooncake,
    /// SGLang's bootstrap.
    Sglang,
    /// TensorRT-LLM's context-first mode.
    Trtllm,
    /// llm-d's sidecar on the decode pod.
    Llmd,
    /// Dynamo's frontends.
    Direct,
    /// Aggregated workers.
    Aggregated,
}

impl Protocol {
    /// Name in the configuration.
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

    /// Dialect of the engines. A sidecar or a frontend is played by an engine that takes aggregated requests, in vLLM's.
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

    /// Role of the engines that receive the decode leg.
    pub fn decode_role(self) -> Role {
        match self.has_prefill_leg() {
            true => Role::Decode,
            false => Role::Aggregated,
        }
    }

    /// Role under which they are listed.
    pub fn decode_listed_as(self) -> Role {
        match self {
            Protocol::Aggregated => Role::Aggregated,
            _ => Role::Decode,
        }
    }

    /// The protocol's fields of a pool.
    pub fn pool(self) -> Value {
        json!({"protocol": self.as_str()})
    }
}
