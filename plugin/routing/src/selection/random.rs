//! Owns random selection: every candidate is equally likely.

use super::{Candidate, Policy, Random, Task};

/// Picks any candidate.
#[derive(Debug)]
pub struct Uniform;

impl Policy for Uniform {
    fn peek(
        &mut self,
        _task: &Task<'_>,
        candidates: &[Candidate<'_>],
        random: &mut Random,
    ) -> Option<usize> {
        (!candidates.is_empty()).then(|| random.usize(0..candidates.len()))
    }
}
