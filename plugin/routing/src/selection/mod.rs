//! Owns which worker: who is eligible, what each would cost, and the policies that pick among them, one file each.

pub mod cost;
pub mod eligibility;

mod direct;
mod kv;
mod least_loaded;
mod pick;
mod power_of_two;
mod prefix_hash;
mod random;
mod round_robin;
mod session;

use crate::config::{KvWeights, PolicyName};
use crate::fleet::{Fleet, Role, Target, TargetKey};
use crate::load::{LoadSnapshot, PrefillRate};
use crate::prefix::Blocks;
use cost::{DecodeCredit, Terms, Tracking};
pub use kv::cheapest;

/// The random source, seeded by the caller.
pub type Random = fastrand::Rng;

/// What a worker is wanted for.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// The part it would take.
    pub role: Role,
    /// The prompt's length.
    pub prompt_tokens: u64,
    /// Tokens in one KV block.
    pub block_tokens: u32,
    /// The prompt's full blocks, as far as they are known.
    pub blocks: &'a Blocks,
    /// The session that the request belongs to, where it names one.
    pub session: Option<&'a [u8]>,
    /// What the cost is made of.
    pub weights: KvWeights,
    /// Whether prefill counts.
    pub tracking: Tracking,
    /// Whether blocks cached on a decode worker count for it.
    pub decode_credit: DecodeCredit,
    /// How quickly the candidates read prompts all in all; none where that is not known.
    pub pace: Option<PrefillRate>,
}

/// One who could be picked.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// The worker, and its rank.
    pub target: &'a Target,
    /// What is booked on it.
    pub standing: LoadSnapshot,
    /// Leading blocks of the prompt that it is thought to hold.
    pub overlap: u32,
    /// The factor on its cost by what the request prefers; 1 where nothing is preferred.
    pub factor: f64,
}

impl Candidate<'_> {
    /// Requests under way that count in this role, whoever sent them.
    pub fn requests(&self, role: Role) -> u64 {
        let LoadSnapshot {
            prefills, decodes, ..
        } = self.standing;
        let booked = match role {
            Role::Prefill => u64::from(prefills),
            Role::Decode => u64::from(decodes),
            Role::Aggregated => u64::from(prefills).saturating_add(u64::from(decodes)),
        };
        booked.saturating_add(self.standing.foreign_requests.into())
    }
}

/// A way to pick one of several candidates, in two steps: looking changes nothing that a later choice depends on.
pub trait Policy {
    /// The index of the one that would be picked; none where there is nothing to pick from.
    fn peek(
        &mut self,
        task: &Task<'_>,
        candidates: &[Candidate<'_>],
        random: &mut Random,
    ) -> Option<usize>;

    /// The one that was looked at is taken: the cursor moves on, where there is one.
    fn commit(&mut self, _taken: TargetKey) {}

    /// Whether the caller must name the worker, since none is ever picked.
    fn needs_pin(&self) -> bool {
        false
    }

    /// Whether it weighs costs, and with them what the request prefers; else only those who are preferred most are candidates.
    fn goes_by_cost(&self) -> bool {
        false
    }

    /// What of the prompt it must know.
    fn reads(&self) -> Reads {
        Reads::Nothing
    }

    /// What the candidates cost, where it goes by cost, in their order.
    fn terms(&self, _task: &Task<'_>, _candidates: &[Candidate<'_>]) -> Option<Vec<Terms>> {
        None
    }

    /// Forgets workers that left.
    fn keep(&mut self, _fleet: &Fleet) {}
}

/// What a policy must know of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reads {
    /// Nothing.
    Nothing,
    /// Its blocks.
    Blocks,
    /// Its blocks, and who holds them.
    Overlap,
}

/// The policy of that name, new.
pub fn policy(name: PolicyName) -> Box<dyn Policy> {
    match name {
        PolicyName::Kv => Box::new(kv::Kv),
        PolicyName::RoundRobin => Box::new(round_robin::RoundRobin::default()),
        PolicyName::Random => Box::new(random::Uniform),
        PolicyName::PowerOfTwo => Box::new(power_of_two::PowerOfTwo),
        PolicyName::LeastLoaded => Box::new(least_loaded::LeastLoaded),
        PolicyName::PrefixHash => Box::new(prefix_hash::PrefixHash::default()),
        PolicyName::Session => Box::new(session::Session),
        PolicyName::Direct => Box::new(direct::Direct),
    }
}

#[cfg(test)]
mod tests;
