//! Owns worker selection: eligibility, cost, and the policies that pick among candidates, one file each.

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
mod settings;

use crate::fleet::{Fleet, Role, Target, TargetKey};
use crate::load::{LoadSnapshot, PrefillRate};
use crate::prefix::Blocks;
use cost::{DecodeCredit, Terms, Tracking};
pub use kv::cheapest;
pub(crate) use pick::weighted;
pub use settings::{KvWeights, PolicyName};

/// The random source, seeded by the caller.
pub type Random = fastrand::Rng;

/// The task that a worker is picked for.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// The role to take.
    pub role: Role,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens in one KV block.
    pub block_tokens: u32,
    /// The prompt's full blocks, as far as they are known.
    pub blocks: &'a Blocks,
    /// The session of the request, if it names one.
    pub session: Option<&'a [u8]>,
    /// The weights of the cost's terms.
    pub weights: KvWeights,
    /// Whether prefill counts.
    pub tracking: Tracking,
    /// Whether blocks cached on a decode worker lower its cost.
    pub decode_credit: DecodeCredit,
    /// The common prefill rate of the candidates; none if unknown.
    pub rate: Option<PrefillRate>,
}

/// A worker rank that could be picked, with the inputs of its price.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// The worker, and its rank.
    pub target: &'a Target,
    /// The load of the rank.
    pub snapshot: LoadSnapshot,
    /// Leading blocks of the prompt that the worker is estimated to hold.
    pub overlap: u32,
    /// Factor on the cost for the request's preferences; 1 without any.
    pub factor: f64,
}

impl Candidate<'_> {
    /// Requests under way that count in this role, from all sources.
    pub fn requests(&self, role: Role) -> u64 {
        let LoadSnapshot {
            prefills, decodes, ..
        } = self.snapshot;
        let booked = match role {
            Role::Prefill => u64::from(prefills),
            Role::Decode => u64::from(decodes),
            Role::Aggregated => u64::from(prefills).saturating_add(u64::from(decodes)),
        };
        booked.saturating_add(self.snapshot.external_requests.into())
    }
}

/// A way to pick one of several candidates, in two steps: a peek changes nothing that a later choice depends on.
pub trait Policy: Send {
    /// The index of the candidate that would be picked; none if there is nothing to pick from.
    fn peek(
        &mut self,
        task: &Task<'_>,
        candidates: &[Candidate<'_>],
        random: &mut Random,
    ) -> Option<usize>;

    /// Takes the peeked candidate: moves the cursor on, if there is one.
    fn commit(&mut self, _taken: TargetKey) {}

    /// Whether the caller must name the worker, since the policy never picks one.
    fn needs_pin(&self) -> bool {
        false
    }

    /// Whether the policy weighs costs, and with them the request's preferences; else only the most preferred workers are
    /// candidates.
    fn goes_by_cost(&self) -> bool {
        false
    }

    /// The data of the prompt that the policy needs.
    fn reads(&self) -> Reads {
        Reads::Nothing
    }

    /// The cost terms of the candidates, in their order, from a policy that goes by cost.
    fn terms(&self, _task: &Task<'_>, _candidates: &[Candidate<'_>]) -> Option<Vec<Terms>> {
        None
    }

    /// Forgets workers that left.
    fn keep(&mut self, _fleet: &Fleet) {}
}

/// The data of a prompt that a policy needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reads {
    /// Nothing.
    Nothing,
    /// The prompt's blocks.
    Blocks,
    /// The prompt's blocks, and their holders.
    Overlap,
}

/// A new policy of that name.
pub fn policy(name: PolicyName) -> Box<dyn Policy> {
    match name {
        PolicyName::Kv => Box::new(kv::Kv),
        PolicyName::RoundRobin => Box::new(round_robin::RoundRobin::default()),
        PolicyName::Random => Box::new(random::Uniform),
        PolicyName::PowerOfTwo => Box::new(power_of_two::PowerOfTwo),
        PolicyName::LeastLoaded => Box::new(least_loaded::LeastLoaded),
        PolicyName::PrefixHash => Box::new(prefix_hash::PrefixHash::default()),
        PolicyName::Session => Box::new(session::SessionPolicy),
        PolicyName::Direct => Box::new(direct::Direct),
    }
}

#[cfg(test)]
mod tests;
