//! Owns direct selection: the caller names the worker, nothing is picked.

use super::{Policy, Random};
use crate::fleet::{Fleet, Target, TargetKey};

/// Picks nobody.
#[derive(Debug, Default)]
pub struct Direct;

impl Policy for Direct {
    fn peek(&mut self, _candidates: &[Target], _random: &mut Random) -> Option<usize> {
        None
    }

    fn commit(&mut self, _taken: TargetKey) {}

    fn needs_pin(&self) -> bool {
        true
    }

    fn keep(&mut self, _fleet: &Fleet) {}
}
