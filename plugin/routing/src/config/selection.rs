//! Owns the configuration of selection: the policies, their weights, and the limits of the knowledge about caches.

use serde::Deserialize;

use crate::fleet::Role;
use crate::selection::{KvWeights, PolicyName};

/// Policies that pick workers, for each role.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Selection {
    /// Policy that picks among prefill workers.
    pub prefill: PolicyName,
    /// Policy that picks among decode workers, and among aggregated workers.
    pub decode: PolicyName,
    /// Weights of the policy `kv`.
    pub kv: KvWeights,
    /// Identification of sessions by the policy `session`.
    pub session: SessionAffinity,
}

impl Selection {
    /// Policy for the workers of a role. Aggregated workers have the policy of decode workers.
    pub fn of(&self, role: Role) -> PolicyName {
        match role {
            Role::Prefill => self.prefill,
            Role::Decode | Role::Aggregated => self.decode,
        }
    }
}

/// Identification of sessions by the policy `session`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct SessionAffinity {
    /// Headers that may name a session; the first one that a request has counts.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub headers: Vec<String>,
}

impl Default for SessionAffinity {
    /// The usual header, and Dynamo's.
    fn default() -> Self {
        Self {
            headers: vec!["x-session-id".to_owned(), "x-dynamo-session-id".to_owned()],
        }
    }
}

/// Limits of the knowledge about the workers' caches, in each worker thread.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PrefixKnowledge {
    /// Maximum remembered blocks, per worker thread; a block counts once for each worker that has it. The number is a hard
    /// bound on memory, at most 32 bytes a block. Further back in a long prompt a run of up to 256 blocks counts as one, for
    /// `block_tokens` below 128.
    #[cfg_attr(feature = "schema", schemars(range(max = super::check::MAX_REMEMBERED)))]
    pub max_blocks: usize,
    /// Milliseconds for which a block is remembered on a worker whose `kv_blocks` is not known.
    pub ttl_ms: u64,
}

impl Default for PrefixKnowledge {
    /// One million blocks, 32 MiB; two minutes, as in Dynamo.
    fn default() -> Self {
        Self {
            max_blocks: 1_048_576,
            ttl_ms: 120_000,
        }
    }
}
