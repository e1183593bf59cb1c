//! Owns which worker: who is eligible, and the policies that pick among them, one file each.

mod direct;
mod round_robin;

pub use direct::Direct;
pub use round_robin::RoundRobin;

use crate::config::PolicyName;
use crate::fleet::{Fleet, Target, TargetKey};

/// The random source, seeded by the caller.
pub type Random = fastrand::Rng;

/// A way to pick one of several targets, in two steps: looking changes nothing that a later choice depends on.
pub trait Policy {
    /// The index of the one that would be picked; none where there is nothing to pick from.
    fn peek(&mut self, candidates: &[Target], random: &mut Random) -> Option<usize>;

    /// The one that was looked at is taken: the cursor moves on.
    fn commit(&mut self, taken: TargetKey);

    /// Whether the caller must name the worker, since none is ever picked.
    fn needs_pin(&self) -> bool {
        false
    }

    /// Forgets workers that left.
    fn keep(&mut self, fleet: &Fleet);
}

/// The policy of that name, new.
pub fn policy(name: PolicyName) -> Box<dyn Policy> {
    match name {
        PolicyName::RoundRobin => Box::new(RoundRobin::default()),
        PolicyName::Direct => Box::new(Direct),
    }
}
