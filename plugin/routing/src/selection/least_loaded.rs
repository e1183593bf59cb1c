//! Owns selection by load: the fewest requests under way, from all sources.

use super::{Candidate, Policy, Random, Task, pick};

/// Picks the candidate with the fewest requests; among equals, any.
#[derive(Debug)]
pub struct LeastLoaded;

impl Policy for LeastLoaded {
    fn peek(
        &mut self,
        task: &Task<'_>,
        candidates: &[Candidate<'_>],
        random: &mut Random,
    ) -> Option<usize> {
        pick::least(candidates.iter().map(|c| c.requests(task.role)), random)
    }
}
