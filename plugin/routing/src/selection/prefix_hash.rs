//! Owns selection by the prompt's beginning: consistent hashing with bounded load.
//!
//! Each worker has 256 points on a hash ring. A prompt goes to the first worker after its own point that has no more than a
//! quarter above its share of the requests under way. The seed is fixed, so that gateways agree without communication; only
//! the load bound is local to each. A prompt of less than a block has no beginning to hash, and goes by load.

use hashbrown::{HashMap, HashSet};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::least_loaded::LeastLoaded;
use super::{Candidate, Policy, Random, Reads, Task};
use crate::fleet::{Fleet, TargetKey};

/// Points of one worker on the ring: enough for shares that differ by a few per cent.
const VIRTUAL_NODES: u32 = 256;

const SEED: u64 = 0x7064_5f72_696e_6721;

/// Tokens that count as a prompt's beginning: more than a system prompt common to all requests, and less than a
/// conversation's second turn.
const BEGINNING_TOKENS: u32 = 2048;

/// A worker takes up to this many quarters of its even share.
const BOUND_QUARTERS: u64 = 5;

/// The ring of the workers seen so far.
#[derive(Debug, Default)]
pub struct PrefixHash {
    ring: Vec<(u64, TargetKey)>,
    known: HashSet<TargetKey>,
}

impl Policy for PrefixHash {
    fn peek(
        &mut self,
        task: &Task<'_>,
        candidates: &[Candidate<'_>],
        random: &mut Random,
    ) -> Option<usize> {
        let Some(place) = place(task) else {
            return LeastLoaded.peek(task, candidates, random);
        };
        self.learn(candidates);
        let total: u64 = candidates.iter().map(|c| c.requests(task.role)).sum();
        let workers = candidates.len() as u64;
        let has_room = |candidate: &Candidate<'_>| {
            let after = candidate.requests(task.role).saturating_add(1);
            let bound = BOUND_QUARTERS.saturating_mul(total.saturating_add(1));
            after.saturating_mul(4).saturating_mul(workers) <= bound.max(workers.saturating_mul(4))
        };
        let index: HashMap<TargetKey, usize> = candidates
            .iter()
            .enumerate()
            .map(|(index, candidate)| (candidate.target.key(), index))
            .collect();
        let start = self.ring.partition_point(|(at, _)| *at < place);
        let (before, after) = self.ring.split_at_checked(start)?;
        let in_order = after.iter().chain(before);
        let standing = in_order.filter_map(|(_, key)| index.get(key).copied());
        let with_room = standing
            .into_iter()
            .find(|index| candidates.get(*index).is_some_and(has_room));
        with_room.or_else(|| LeastLoaded.peek(task, candidates, random))
    }

    fn reads(&self) -> Reads {
        Reads::Blocks
    }

    fn keep(&mut self, fleet: &Fleet) {
        self.ring.retain(|(_, key)| fleet.contains(key.worker));
        self.known.retain(|key| fleet.contains(key.worker));
    }
}

impl PrefixHash {
    /// Adds candidates that are not on the ring yet.
    fn learn(&mut self, candidates: &[Candidate<'_>]) {
        let before = self.ring.len();
        for key in candidates.iter().map(|candidate| candidate.target.key()) {
            if self.known.insert(key) {
                let nodes = (0..VIRTUAL_NODES).map(|node| (node_place(key, node), key));
                self.ring.extend(nodes);
            }
        }
        if self.ring.len() > before {
            self.ring.sort_unstable();
        }
    }
}

/// A prompt's point on the ring; none without a full block.
fn place(task: &Task<'_>) -> Option<u64> {
    let most = (BEGINNING_TOKENS / task.block_tokens.max(1)).max(1);
    let count = most.min(task.blocks.count());
    // For a shorter prompt, the largest power of two, so that a growing conversation seldom moves.
    let power = count.checked_ilog2()?;
    let beginning = task.blocks.beginning(1 << power)?;
    Some(xxh3_64_with_seed(
        &beginning.to_le_bytes(),
        SEED ^ task.blocks.scope,
    ))
}

fn node_place(key: TargetKey, node: u32) -> u64 {
    let mut name = [0; 16];
    let (worker, rest) = name.split_at_mut(8);
    let (rank, at) = rest.split_at_mut(4);
    worker.copy_from_slice(&key.worker.0.to_le_bytes());
    rank.copy_from_slice(&key.rank.to_le_bytes());
    at.copy_from_slice(&node.to_le_bytes());
    xxh3_64_with_seed(&name, SEED)
}
