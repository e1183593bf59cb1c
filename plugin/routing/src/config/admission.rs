//! Owns the configuration of what is let in, and of what is not disaggregated.

use serde::Deserialize;

/// Back-pressure: how busy is too busy, and who may wait. Off unless thresholds are set.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PrefillBusy {
    /// Too busy with more prompt tokens booked on it than this; absent: never.
    pub tokens: Option<u64>,
    /// Too busy with more prompt tokens booked on it than this many times its `batched_tokens`; never where those are
    /// not known.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub fraction: Option<f64>,
}

/// When a decode worker rank is too busy.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct DecodeBusy {
    /// Too busy with more KV blocks in use by answers under way than this; absent: never.
    pub blocks: Option<u64>,
    /// Too busy with more KV blocks in use by answers under way than this share of its `kv_blocks`; never where those
    /// are not known.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1)))]
    pub fraction: Option<f64>,
}

/// The requests that wait, on each worker thread.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Queue {
    /// Requests that may wait at once, on each worker thread; beyond it a request gets 429.
    #[cfg_attr(feature = "schema", schemars(range(min = 1), extend("x-unit" = "requests")))]
    pub max_requests: u32,
    /// Whose turn it is.
    pub policy: QueuePolicy,
    /// Milliseconds that a request may wait; then it gets 429.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Conditional {
    /// What decides.
    pub policy: ConditionalPolicy,
    /// `isl_bounding`: a prompt stays if fewer tokens than this are left to compute, and they are a smaller share of it
    /// than `uncached_share`.
    pub uncached_tokens: u64,
    /// `isl_bounding`: the share of a prompt that must not be reached by what is left to compute of it. So a prompt of
    /// which nothing is cached never stays by this rule.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1)))]
    pub uncached_share: f64,
    /// Prompts with fewer tokens left to compute than this stay whatever their share; 0: none. Dynamo has no such rule.
    pub short_tokens: u64,
    /// `prefill_load`: prefill is busy, and a prompt stays, when the prefill worker that would be picked has more
    /// prompt tokens booked than this.
    pub prefill_busy_tokens: Option<u64>,
    /// `prefill_load`: prefill is busy as well when that worker has more prompt tokens booked than this many times its
    /// `batched_tokens`.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub prefill_busy_fraction: Option<f64>,
    /// A decode worker that would then use more than this share of its `kv_blocks` keeps no prompt; nor does one whose
    /// `kv_blocks` are not known.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1)))]
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
#[serde(rename_all = "snake_case")]
pub enum ConditionalPolicy {
    /// How much of the prompt is left to compute there.
    #[default]
    IslBounding,
    /// How busy prefill is.
    PrefillLoad,
    /// Either.
    IslOrLoad,
}
