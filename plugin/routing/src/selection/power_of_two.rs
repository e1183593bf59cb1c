//! Owns the power of two choices: two drawn at random, and of them the one with fewer requests.
//!
//! Nearly as even as comparing all, and steadier where several routers see the same loads late.

use super::{Candidate, Policy, Random, Task};

/// Picks the less busy of two.
#[derive(Debug)]
pub struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn peek(
        &mut self,
        task: &Task<'_>,
        candidates: &[Candidate<'_>],
        random: &mut Random,
    ) -> Option<usize> {
        let others = candidates.len().checked_sub(1)?;
        let first = random.usize(0..candidates.len());
        if others == 0 {
            return Some(first);
        }
        // Drawn among the others, so that the two are never the same.
        let drawn = random.usize(0..others);
        let second = if drawn >= first {
            drawn.saturating_add(1)
        } else {
            drawn
        };
        let requests = |index: usize| candidates.get(index).map(|c| c.requests(task.role));
        Some(match requests(second) < requests(first) {
            true => second,
            false => first,
        })
    }
}
