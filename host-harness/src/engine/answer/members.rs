//! Owns the members of vLLM's answers that other engines lack: present, and `null` unless requested.

use super::{NONE, Nulls};
use crate::engine::dialect::Dialect;
use crate::engine::request::Endpoint;

/// Members of one endpoint's answers beyond those of all engines.
#[derive(Debug)]
pub(super) struct AnswerMembers {
    /// In an unstreamed answer.
    pub whole: Nulls,
    /// In an unstreamed answer's choice.
    pub choice: Nulls,
    /// In an unstreamed answer's message.
    pub message: Nulls,
    /// In a chat stream's first chunk.
    pub opening: Nulls,
    /// In a choice of a stream.
    pub delta: Nulls,
    /// In the last choice of a chat stream.
    pub last_delta: Nulls,
    /// In an unstreamed answer's counts.
    pub usage: Nulls,
    /// In the counts' details of the prompt.
    pub prompt_tokens_details: Nulls,
    /// In those details, the tokens added to the cache.
    pub created_cache_tokens: Option<u64>,
    /// The engine's fingerprint.
    pub fingerprint: Option<&'static str>,
}

const FINGERPRINT: Option<&str> = Some("vllm-0.32.0-simulated");

const NO_MORE: AnswerMembers = AnswerMembers {
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

const CHAT: AnswerMembers = AnswerMembers {
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

const COMPLETIONS: AnswerMembers = AnswerMembers {
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

impl AnswerMembers {
    /// The members for this endpoint of this engine.
    pub fn of(dialect: Dialect, endpoint: Endpoint) -> &'static AnswerMembers {
        match endpoint {
            Endpoint::Chat if dialect.is_vllm() => &CHAT,
            Endpoint::Completions if dialect.is_vllm() => &COMPLETIONS,
            _ => &NO_MORE,
        }
    }
}
