//! Owns the names of the policies, and the weights of the policy `kv`, as configuration has them.

use serde::{Deserialize, Serialize};

/// The policies there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// The least cost: what must be computed of the prompt and what waits before it (prefill), KV blocks in use that will not
    /// soon be free (decode), both (workers that run requests whole). Good for nearly everything.
    #[default]
    Kv,
    /// Everyone once per turn, in an order drawn anew each turn. For equal requests.
    RoundRobin,
    /// Anyone. A control.
    Random,
    /// Of two drawn at random the one with fewer requests under way. For eight gateways and more that do not hear the engines'
    /// figures.
    PowerOfTwo,
    /// The one with the fewest requests under way. For prompts that share nothing.
    LeastLoaded,
    /// By the prompt's first 2,048 tokens, by consistent hashing; no worker takes more than a quarter above its share. For several
    /// gateways that must agree without talking.
    PrefixHash,
    /// By the session that a header names; without one as `least_loaded`. For conversations whose clients say what belongs
    /// together.
    Session,
    /// Nobody: the caller must name the worker. For an external picker.
    Direct,
}

/// What the policy `kv` weighs. The names and the defaults are Dynamo's.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct KvWeights {
    /// What a cached block is worth, in blocks that need not be computed.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub overlap_score_credit: f64,
    /// How quickly that falls for a worker with more prefill booked than the idlest one; 0: not at all.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub overlap_score_credit_decay: f64,
    /// What prefill counts for, against KV blocks in use.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub prefill_load_scale: f64,
    /// What a request being decoded counts for, in blocks.
    #[cfg_attr(feature = "schema", schemars(range(min = 0), extend("x-unit" = "blocks")))]
    pub decode_active_request_weight: f64,
    /// 0: the least cost always; above: the dearer ones now and then, the more often the higher.
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
