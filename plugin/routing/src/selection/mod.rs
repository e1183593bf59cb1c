//! Owns which worker: who is eligible, and the policies that pick among them, one file each.

mod round_robin;

pub use round_robin::RoundRobin;

use crate::config::PolicyName;
use crate::fleet::{Fleet, Role, Target, Worker};

/// The random source, seeded by the caller.
pub type Random = fastrand::Rng;

/// A way to pick one of several targets. Picking is final: the cursor has moved.
pub trait Policy {
    /// The index of the one picked; none where there is nothing to pick from.
    fn pick(&mut self, candidates: &[Target], random: &mut Random) -> Option<usize>;

    /// Forgets workers that left.
    fn keep(&mut self, fleet: &Fleet);
}

/// The policy of that name, new.
pub fn policy(name: PolicyName) -> Box<dyn Policy> {
    match name {
        PolicyName::RoundRobin => Box::new(RoundRobin::default()),
    }
}

/// Who of the fleet may be picked.
#[derive(Clone, Copy)]
pub struct Eligibility<'a> {
    /// What it must do.
    pub role: Role,
    /// The model it must serve; none: any.
    pub model: Option<&'a str>,
    /// Workers that have already failed this request.
    pub tried: &'a [crate::fleet::WorkerId],
}

impl Eligibility<'_> {
    /// The eligible ranks of workers for which `also` holds.
    pub fn targets(self, fleet: &Fleet, also: impl Fn(&Worker) -> bool) -> Vec<Target> {
        fleet
            .of_role(self.role)
            .filter(|worker| worker.serves(self.model))
            .filter(|worker| !self.tried.contains(&worker.id))
            .filter(|worker| also(worker))
            .flat_map(Worker::targets)
            .collect()
    }
}
