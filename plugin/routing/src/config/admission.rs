//! Owns the configuration of what is let in, and of what is not disaggregated.

use serde::Deserialize;

/// Back-pressure: how busy is too busy, and who may wait. Off unless thresholds are set.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Admission {
    /// When a prefill worker is too busy.
    pub prefill: PrefillBusy,
    /// When a decode worker is too busy.
    pub decode: DecodeBusy,
    /// Requests may wait here while all are too busy; absent: they are refused with 429.
    pub queue: Option<Queue>,
}

/// When a prefill worker rank is too busy.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrefillBusy {
    /// With more prompt tokens booked on it than this.
    pub tokens: Option<u64>,
    /// With more of them than this many times its `batched_tokens`.
    pub fraction: Option<f64>,
}

/// When a decode worker rank is too busy.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DecodeBusy {
    /// With more KV blocks in use by answers under way than this.
    pub blocks: Option<u64>,
    /// With more of them than this share of its `kv_blocks`; from 0 to 1.
    pub fraction: Option<f64>,
}

/// The requests that wait, on each worker thread.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Queue {
    /// Requests that may wait at once; beyond it a request gets 429.
    pub max_requests: u32,
    /// Whose turn it is.
    pub policy: QueuePolicy,
    /// Milliseconds that a request may wait; then it gets 429.
    pub deadline_ms: u64,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            max_requests: 256,
            policy: QueuePolicy::Fcfs,
            deadline_ms: 10_000,
        }
    }
}

/// Whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueuePolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Last come, first served.
    Lcfs,
    /// The shortest prompt first, weighted by priority.
    Wspt,
}

/// Prompts that stay on a decode worker, which runs them whole: a hand-off would cost more than it saves.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Conditional {
    /// What decides.
    pub policy: ConditionalPolicy,
    /// `isl_bounding`: fewer tokens than this must be left to compute, *and* …
    pub uncached_tokens: u64,
    /// … they must be a smaller share of the prompt than this; from 0 to 1.
    pub uncached_share: f64,
    /// Prompts with fewer tokens left to compute than this stay whatever their share; 0: none. Dynamo has no such rule.
    pub short_tokens: u64,
    /// `prefill_load`: the prefill worker that would be picked has more prompt tokens booked than this, or …
    pub prefill_busy_tokens: Option<u64>,
    /// … more than this many times its `batched_tokens`.
    pub prefill_busy_fraction: Option<f64>,
    /// A decode worker that would then use more than this share of its `kv_blocks` keeps no prompt; nor does one whose
    /// `kv_blocks` are not known.
    pub decode_busy_fraction: Option<f64>,
}

impl Default for Conditional {
    /// Dynamo's.
    fn default() -> Self {
        Self {
            policy: ConditionalPolicy::IslBounding,
            uncached_tokens: 2048,
            uncached_share: 0.7,
            short_tokens: 0,
            prefill_busy_tokens: None,
            prefill_busy_fraction: None,
            decode_busy_fraction: None,
        }
    }
}

/// What decides whether a prompt stays on a decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConditionalPolicy {
    /// How much of it is left to compute there.
    #[default]
    IslBounding,
    /// How busy prefill is.
    PrefillLoad,
    /// Either.
    IslOrLoad,
}
