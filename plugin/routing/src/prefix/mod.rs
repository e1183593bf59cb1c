//! Owns who holds which prefix: how blocks are told apart, and what is known of each worker's cache.
//!
//! Knowledge comes from the router's own decisions alone. Engines publish what they really cache as events over ZMQ or
//! NATS, which are out of a proxy filter's reach.

pub mod hash;
pub mod index;

use crate::fleet::TargetKey;

/// Blocks by which other VMs are told of a prompt; those behind them a VM keeps for itself.
pub const MOST_BLOCKS_TOLD: usize = 8192;

/// A prompt that a worker rank was given, as other VMs are told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The rank.
    pub key: TargetKey,
    /// What the index tells the prompt's leading blocks apart by, from the first on; some of them are new to that rank.
    pub path: Vec<u32>,
}

/// A prompt's full blocks, each named together with all that goes before it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Blocks {
    /// Keeps apart what must not share: models, and prompts known by their text from those known by their tokens.
    pub scope: u64,
    /// One sequence hash for each full block; a partial block at the end has none.
    pub sequence: Vec<u64>,
}

impl Blocks {
    /// How many full blocks there are.
    pub fn count(&self) -> u32 {
        u32::try_from(self.sequence.len()).unwrap_or(u32::MAX)
    }
}
