//! Members of vLLM's answers that other engines' lack: `null` unless asked for, but there.

use super::{NONE, Nulls};
use crate::engine::dialect::Dialect;
use crate::engine::request::Endpoint;

/// What the answers of one endpoint have beside what all engines write.
#[derive(Debug)]
pub(super) struct Members {
    /// Of a whole answer.
    pub whole: Nulls,
    /// Of a whole answer's choice.
    pub choice: Nulls,
    /// Of a whole answer's message.
    pub message: Nulls,
    /// Of a chat stream's first chunk.
    pub opening: Nulls,
    /// Of a choice in a stream.
    pub delta: Nulls,
    /// Of a choice in a chat stream that ends with it.
    pub last_delta: Nulls,
    /// Of a whole answer's counts.
    pub usage: Nulls,
    /// Of what they say of the prompt.
    pub prompt_tokens_details: Nulls,
    /// What they say was added to the cache.
    pub created_cache_tokens: Option<u64>,
    /// The engine's make.
    pub fingerprint: Option<&'static str>,
}

const FINGERPRINT: Option<&str> = Some("vllm-0.32.0-simulated");

const NO_MORE: Members = Members {
    whole: NONE,
    choice: NONE,
    message: NONE,
    opening: NONE,
    delta: NONE,
    last_delta: NONE,
    usage: NONE,
    prompt_tokens_details: NONE,
    created_cache_tokens: None,
    fingerprint: None,
};

const CHAT: Members = Members {
    whole: Nulls(&[
        "service_tier",
        "prompt_logprobs",
        "prompt_token_ids",
        "prompt_text",
        "ec_transfer_params",
        "metrics",
    ]),
    choice: Nulls(&["stop_reason", "token_ids", "routed_experts"]),
    message: Nulls(&[
        "refusal",
        "annotations",
        "audio",
        "function_call",
        "reasoning",
    ]),
    opening: Nulls(&["prompt_token_ids", "prompt_text"]),
    delta: Nulls(&["token_ids"]),
    last_delta: Nulls(&["stop_reason", "token_ids"]),
    usage: Nulls(&["completion_tokens_details"]),
    prompt_tokens_details: Nulls(&["multimodal_tokens"]),
    created_cache_tokens: Some(0),
    fingerprint: FINGERPRINT,
};

const COMPLETIONS: Members = Members {
    whole: Nulls(&["service_tier", "ec_transfer_params", "metrics"]),
    choice: Nulls(&[
        "stop_reason",
        "token_ids",
        "prompt_logprobs",
        "prompt_token_ids",
        "routed_experts",
    ]),
    delta: Nulls(&["stop_reason", "prompt_token_ids", "token_ids"]),
    usage: Nulls(&["completion_tokens_details"]),
    prompt_tokens_details: Nulls(&["created_cache_tokens", "multimodal_tokens"]),
    fingerprint: FINGERPRINT,
    ..NO_MORE
};

impl Members {
    /// Those of this endpoint of this engine.
    pub fn of(dialect: Dialect, endpoint: Endpoint) -> &'static Members {
        match endpoint {
            Endpoint::Chat if dialect.is_vllm() => &CHAT,
            Endpoint::Completions if dialect.is_vllm() => &COMPLETIONS,
            _ => &NO_MORE,
        }
    }
}
