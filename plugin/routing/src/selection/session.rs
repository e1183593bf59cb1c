//! Owns session affinity: a session's requests go to one worker, whichever proxy or thread they come through.
//!
//! Rendezvous hashing: every worker has a weight for the session, and the heaviest one gets it. No state is kept, so none
//! must be shared or expired; the sessions of a worker that leaves spread over all others, and a new worker takes its share.
//! A request without a session goes by load.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::least_loaded::LeastLoaded;
use super::{Candidate, Policy, Random, Task};
use crate::fleet::TargetKey;

/// Fixed, so that gateways agree without communication.
const SEED: u64 = 0x7064_5f73_6573_7369;

/// Picks the session's worker.
#[derive(Debug)]
pub struct SessionPolicy;

impl Policy for SessionPolicy {
    fn peek(
        &mut self,
        task: &Task<'_>,
        candidates: &[Candidate<'_>],
        random: &mut Random,
    ) -> Option<usize> {
        let Some(session) = task.session.filter(|session| !session.is_empty()) else {
            return LeastLoaded.peek(task, candidates, random);
        };
        let session = xxh3_64_with_seed(session, SEED);
        let weights = candidates.iter().map(|c| weight(session, c.target.key()));
        let heaviest = weights.enumerate().max_by_key(|(_, weight)| *weight);
        heaviest.map(|(index, _)| index)
    }
}

fn weight(session: u64, key: TargetKey) -> u64 {
    let mut name = [0; 12];
    let (worker, rank) = name.split_at_mut(8);
    worker.copy_from_slice(&key.worker.0.to_le_bytes());
    rank.copy_from_slice(&key.rank.to_le_bytes());
    xxh3_64_with_seed(&name, session)
}
