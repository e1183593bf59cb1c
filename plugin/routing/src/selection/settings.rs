//! Owns the names of the policies, and the weights of the policy `kv`, in the configuration.

use serde::{Deserialize, Serialize};

/// Policies that pick a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// The least cost. Prefill: tokens of the prompt left to compute, and the work that waits before them. Decode: KV blocks in
    /// use that will not soon be free. Aggregated workers: both. Good for nearly everything.
    #[default]
    Kv,
    /// Each worker once per round, in an order drawn anew each round. For equal requests.
    RoundRobin,
    /// A worker drawn at random. A control for comparisons.
    Random,
    /// Of two workers drawn at random, the one with fewer requests under way. For eight or more gateways without
    /// `engine_metrics`.
    PowerOfTwo,
    /// The worker with the fewest requests under way. For prompts that share nothing.
    LeastLoaded,
    /// By consistent hashing of the prompt's first 2,048 tokens; no worker takes more than a quarter above its share. For
    /// several gateways that must agree without communication.
    PrefixHash,
    /// By the session that a header names; without such a header as `least_loaded`. For conversations whose clients name them.
    Session,
    /// No worker: the caller must name one. For an external picker.
    Direct,
}

/// Weights of the policy `kv`. The names and the defaults are Dynamo's.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct KvWeights {
    /// Worth of one cached block, in blocks that need not be computed.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub overlap_score_credit: f64,
    /// Rate at which `overlap_score_credit` falls for a worker with more prefill booked than the idlest worker; 0: no fall.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub overlap_score_credit_decay: f64,
    /// Weight of prefill, against KV blocks in use.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub prefill_load_scale: f64,
    /// Weight of one request being decoded, in blocks.
    #[cfg_attr(feature = "schema", schemars(range(min = 0), extend("x-unit" = "blocks")))]
    pub decode_active_request_weight: f64,
    /// Randomness of the choice. 0: always the least cost; above 0: workers of higher cost now and then, more often the higher
    /// the value.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub router_temperature: f64,
}

impl Default for KvWeights {
    fn default() -> Self {
        Self {
            overlap_score_credit: 1.0,
            overlap_score_credit_decay: 0.0,
            prefill_load_scale: 1.0,
            decode_active_request_weight: 0.0,
            router_temperature: 0.0,
        }
    }
}
