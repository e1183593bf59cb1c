//! Owns direct selection: the caller names the worker, nothing is picked.

use super::{Candidate, Policy, Random, Task};

/// Picks no worker.
#[derive(Debug, Default)]
pub struct Direct;

impl Policy for Direct {
    fn peek(
        &mut self,
        _task: &Task<'_>,
        _candidates: &[Candidate<'_>],
        _random: &mut Random,
    ) -> Option<usize> {
        None
    }

    fn needs_pin(&self) -> bool {
        true
    }
}
