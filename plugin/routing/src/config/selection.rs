//! Owns the configuration of who is picked: the policies, what they weigh, and what is remembered for them.

use serde::Deserialize;

use crate::fleet::Role;
use crate::selection::{KvWeights, PolicyName};

/// Which policy picks, for each role.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Selection {
    /// Among prefill workers.
    pub prefill: PolicyName,
    /// Among decode workers, and among those that run whole requests.
    pub decode: PolicyName,
    /// What the policy `kv` weighs.
    pub kv: KvWeights,
    /// How the policy `session` knows a session.
    pub session: SessionAffinity,
}

impl Selection {
    /// The policy among those of a role; those that run whole requests are picked as those that decode.
    pub fn of(&self, role: Role) -> PolicyName {
        match role {
            Role::Prefill => self.prefill,
            Role::Decode | Role::Aggregated => self.decode,
        }
    }
}

/// How the policy `session` knows a session.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct SessionAffinity {
    /// The headers that may name a session; the first that a request has counts.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub headers: Vec<String>,
}

impl Default for SessionAffinity {
    /// The usual name, and Dynamo's.
    fn default() -> Self {
        Self {
            headers: vec!["x-session-id".to_owned(), "x-dynamo-session-id".to_owned()],
        }
    }
}

/// What is remembered of the workers' caches, in each worker thread.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PrefixKnowledge {
    /// Blocks remembered in all, each for each worker that has it, per worker thread: a hard bound on memory, at most
    /// 32 bytes each. Further back in a long prompt a run of up to 256 blocks counts as one.
    #[cfg_attr(feature = "schema", schemars(range(max = super::check::MAX_REMEMBERED)))]
    pub max_blocks: usize,
    /// Milliseconds that a block is remembered on a worker whose `kv_blocks` are not known.
    pub ttl_ms: u64,
}

impl Default for PrefixKnowledge {
    /// A million, 32 MiB; two minutes, as Dynamo has it.
    fn default() -> Self {
        Self {
            max_blocks: 1_048_576,
            ttl_ms: 120_000,
        }
    }
}
