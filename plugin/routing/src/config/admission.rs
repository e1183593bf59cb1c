//! Owns the configuration of admission, and of the requests that are not disaggregated.

use serde::Deserialize;

/// Back-pressure: the busy thresholds of workers, and the queue. Off unless a threshold is set.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Admission {
    /// Busy thresholds of prefill workers, and of aggregated ones.
    pub prefill: PrefillBusy,
    /// Busy thresholds of decode workers, and of aggregated ones.
    pub decode: DecodeBusy,
    /// Queue of the requests that wait while all workers are too busy; absent: these requests are refused with 429.
    pub queue: Option<Queue>,
}

/// Thresholds above which a rank of a prefill worker is too busy.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PrefillBusy {
    /// Number of booked prompt tokens above which a rank is too busy; absent: no such threshold.
    pub tokens: Option<u64>,
    /// A rank is too busy with more booked prompt tokens than this many times its `batched_tokens`. Absent, or where
    /// `batched_tokens` is not known: no such threshold.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub fraction: Option<f64>,
}

/// Thresholds above which a rank of a decode worker is too busy.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct DecodeBusy {
    /// Number of KV blocks in use by answers under way above which a rank is too busy; absent: no such threshold.
    pub blocks: Option<u64>,
    /// A rank is too busy when answers under way use more than this share of its `kv_blocks`, from 0 to 1. Absent, or where
    /// `kv_blocks` is not known: no such threshold.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1)))]
    pub fraction: Option<f64>,
}

/// Queue of waiting requests, one on each worker thread.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Queue {
    /// Requests that may wait at once, on each worker thread; a further request gets 429.
    #[cfg_attr(feature = "schema", schemars(range(min = 1), extend("x-unit" = "requests")))]
    pub max_requests: u32,
    /// Order in which the waiting requests are served.
    pub policy: QueuePolicy,
    /// Milliseconds that a request may wait; then the request gets 429.
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

/// Order in which the waiting requests are served.
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

/// Conditional disaggregation: prompts that stay on a decode worker, which runs the request aggregated because a hand-off would
/// cost more than it saves.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Conditional {
    /// Rule by which a prompt stays.
    pub policy: ConditionalPolicy,
    /// `isl_bounding` and `isl_or_load`: a prompt stays if fewer tokens than this are left to compute, and these are a smaller
    /// share of the prompt than `uncached_share`.
    pub uncached_tokens: u64,
    /// `isl_bounding` and `isl_or_load`: share of a prompt, from 0 to 1, that the tokens left to compute must not reach. A
    /// prompt of which nothing is cached therefore never stays by this rule.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1)))]
    pub uncached_share: f64,
    /// `isl_bounding` and `isl_or_load`: a prompt with fewer tokens than this left to compute stays, whatever their share; 0:
    /// no such rule. Dynamo has none.
    pub short_tokens: u64,
    /// `prefill_load` and `isl_or_load`: prefill is busy, and a prompt stays, when the prefill worker that would be picked has
    /// more prompt tokens booked than this, or when `admission` holds all of them for too busy; absent: no such threshold.
    pub prefill_busy_tokens: Option<u64>,
    /// `prefill_load` and `isl_or_load`: prefill is busy as well when the prefill worker that would be picked has more prompt
    /// tokens booked than this many times its `batched_tokens`; absent: no such threshold.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub prefill_busy_fraction: Option<f64>,
    /// Share of a decode worker's `kv_blocks`, from 0 to 1. A decode worker that would use a larger share with the prompt keeps
    /// no prompt, nor does a decode worker whose `kv_blocks` is not known; absent: no such limit.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1)))]
    pub decode_busy_fraction: Option<f64>,
}

impl Default for Conditional {
    /// The defaults are Dynamo's.
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

/// Rule by which a prompt stays on a decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
#[serde(rename_all = "snake_case")]
pub enum ConditionalPolicy {
    /// By the part of the prompt that is left to compute on the decode worker.
    #[default]
    IslBounding,
    /// By the load of prefill.
    PrefillLoad,
    /// By either of the two rules.
    IslOrLoad,
}
