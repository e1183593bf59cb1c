//! Owns what one choice leaves to the next: the policies with their cursors, the random source, the numbers used once, the
//! turn of the frontends, and the explanations under way.

use super::Explain;
use super::explain::{self, Explained};
use super::model_workers::RankSlot;
use crate::config::Pool;
use crate::fleet::{Fleet, Role, TargetKey};
use crate::handoff::rooms::Rooms;
use crate::load::LoadSnapshots;
use crate::selection::cost::DecodeCredit;
use crate::selection::eligibility::Eligible;
use crate::selection::{
    Candidate, Policy, PolicyName, Random, Reads, Task, cheapest, policy as named,
};
use crate::topology::Constraints;

/// Picks workers for a pool.
pub(super) struct Chooser {
    prefill: Box<dyn Policy>,
    /// The policy for decode workers, and for those that run requests aggregated.
    decode: Box<dyn Policy>,
    random: Random,
    rooms: Rooms,
    next_frontend: usize,
    /// The explanations of the choices for the current request, if its caller wants them.
    explained: Option<Vec<Explained>>,
}

impl Chooser {
    /// The policies of a pool. Their choices follow from `seed`, the rooms from `owner`.
    pub(super) fn new(pool: &Pool, seed: u64, owner: u64) -> Self {
        Self {
            prefill: named(pool.selection.prefill),
            decode: named(pool.selection.decode),
            random: Random::with_seed(seed),
            rooms: Rooms::new(owner),
            next_frontend: 0,
            explained: None,
        }
    }

    /// Replaces the policies that have changed.
    pub(super) fn reconfigure(&mut self, before: &Pool, pool: &Pool) {
        if before.selection.prefill != pool.selection.prefill {
            self.prefill = named(pool.selection.prefill);
        }
        if before.selection.decode != pool.selection.decode {
            self.decode = named(pool.selection.decode);
        }
    }

    /// Forgets workers that left.
    pub(super) fn keep(&mut self, fleet: &Fleet) {
        self.prefill.keep(fleet);
        self.decode.keep(fleet);
    }

    pub(super) fn own_rooms(&mut self, owner: u64) {
        self.rooms = Rooms::new(owner);
    }

    pub(super) fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    pub(super) fn rooms(&mut self) -> &mut Rooms {
        &mut self.rooms
    }

    /// The index of the frontend whose turn it is, of count.
    pub(super) fn next_frontend(&mut self, count: usize) -> usize {
        let turn = self.next_frontend.checked_rem(count).unwrap_or_default();
        self.next_frontend = self.next_frontend.wrapping_add(1);
        turn
    }

    /// Starts to collect explanations, if wanted.
    pub(super) fn explain(&mut self, wanted: Explain, pool: &Pool) {
        let is_collected = match wanted {
            Explain::No => false,
            Explain::ForLog => true,
            Explain::ForCaller => pool.trust_clients,
        };
        self.explained = is_collected.then(Vec::new);
    }

    /// Takes the explanations as JSON; none if not wanted, or if no worker was chosen.
    pub(super) fn take_explanation(&mut self) -> Option<String> {
        let explained = self.explained.take()?;
        (!explained.is_empty()).then(|| explain::to_json(&explained))
    }

    /// The policy for a role.
    pub(super) fn policy(&self, role: Role) -> &dyn Policy {
        match role {
            Role::Prefill => self.prefill.as_ref(),
            Role::Decode | Role::Aggregated => self.decode.as_ref(),
        }
    }

    /// The data of a prompt that any policy reads.
    pub(super) fn reads(&self) -> Reads {
        self.prefill.reads().max(self.decode.reads())
    }

    /// Whether the blocks held by workers of a role matter to any choice.
    pub(super) fn remembers(&self, role: Role, decode_credit: DecodeCredit) -> bool {
        let counts = decode_credit == DecodeCredit::Counts;
        match role {
            Role::Prefill => self.prefill.reads() == Reads::Overlap,
            Role::Decode => counts,
            Role::Aggregated => self.decode.reads() == Reads::Overlap || counts,
        }
    }

    /// Moves the cursor of a role's policy on.
    pub(super) fn commit(&mut self, role: Role, taken: TargetKey) {
        match role {
            Role::Prefill => self.prefill.commit(taken),
            Role::Decode | Role::Aggregated => self.decode.commit(taken),
        }
    }

    /// The index of the policy's pick among the eligible ranks; `name`: the policy's. No cursor moves.
    pub(super) fn pick(
        &mut self,
        task: &Task<'_>,
        name: PolicyName,
        ranks: &Ranks<'_>,
        eligible: &Eligible,
    ) -> Option<usize> {
        let Self {
            prefill,
            decode,
            random,
            explained,
            ..
        } = self;
        let policy = match task.role {
            Role::Prefill => prefill.as_mut(),
            Role::Decode | Role::Aggregated => decode.as_mut(),
        };
        let picked = if policy.goes_by_cost() && explained.is_none() {
            match eligible {
                Eligible::All(_) => cheapest(task, ranks.all(), random),
                Eligible::Some(indexes) => cheapest(task, ranks.some(indexes), random),
            }
        } else {
            let indexes: Vec<usize> = eligible.indexes().collect();
            let candidates: Vec<Candidate<'_>> = ranks.some(&indexes).collect();
            let picked = policy.peek(task, &candidates, random);
            if let Some(explained) = explained {
                explained.push(Explained::new(policy, name, task, &candidates, picked));
            }
            picked
        };
        eligible.nth(picked?)
    }
}

/// The ranks of a role, with the inputs of their prices.
pub(super) struct Ranks<'r> {
    pub(super) members: &'r [RankSlot],
    /// Slowness of each rank against the common prefill rate.
    pub(super) slowness: &'r [f32],
    pub(super) snapshots: LoadSnapshots<'r>,
    /// Leading blocks of the prompt that each slot holds.
    pub(super) depths: &'r [u32],
    pub(super) wanted: &'r Constraints,
    /// Whether the request has any preference.
    pub(super) prefers: bool,
}

impl Ranks<'_> {
    fn all(&self) -> impl Iterator<Item = Candidate<'_>> + Clone {
        let all = self.members.iter().zip(self.slowness.iter());
        all.map(|(member, slowness)| self.candidate(member, *slowness))
    }

    fn some(&self, indexes: &[usize]) -> impl Iterator<Item = Candidate<'_>> + Clone {
        let of_index =
            |index: &usize| Some((self.members.get(*index)?, *self.slowness.get(*index)?));
        let some = indexes.iter().filter_map(of_index);
        some.map(|(member, slowness)| self.candidate(member, slowness))
    }

    /// Runs a thousand times a choice: inlined, so that only what the price needs remains.
    #[inline(always)]
    fn candidate<'m>(&self, member: &'m RankSlot, slowness: f32) -> Candidate<'m> {
        Candidate {
            target: &member.target,
            snapshot: self.snapshots.of(member.slot, f64::from(slowness)),
            overlap: self.depths.get(member.slot).copied().unwrap_or(0),
            factor: match self.prefers {
                true => self.wanted.cost_factor(&member.target.worker),
                false => 1.0,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn chooser(selection: &str) -> (Chooser, Pool) {
        let document = format!(
            r#"{{"pools":[{{"name":"p","protocol":"nixl","selection":{selection},"discovery":{{"static":{{"workers":[]}}}}}}]}}"#
        );
        let pool = Config::parse(document.as_bytes()).unwrap().pools.remove(0);
        (Chooser::new(&pool, 1, 1), pool)
    }

    #[test]
    fn frontends_take_turns_and_none_has_none() {
        let (mut chooser, _) = chooser("{}");
        let turns = [3, 3, 3, 3, 2].map(|count| chooser.next_frontend(count));
        assert_eq!(turns, [0, 1, 2, 0, 0]);
        assert_eq!(chooser.next_frontend(0), 0);
    }

    #[test]
    fn held_blocks_matter_where_a_policy_reads_them_or_a_decode_worker_may_keep_the_prompt() {
        let by_cost = chooser(r#"{"prefill":"kv","decode":"least_loaded"}"#).0;
        let none = DecodeCredit::Nothing;
        assert!(by_cost.remembers(Role::Prefill, none));
        assert!(!by_cost.remembers(Role::Decode, none));
        assert!(!by_cost.remembers(Role::Aggregated, none));
        assert!(by_cost.remembers(Role::Decode, DecodeCredit::Counts));
        assert!(by_cost.remembers(Role::Aggregated, DecodeCredit::Counts));
        assert_eq!(by_cost.reads(), Reads::Overlap);
    }

    #[test]
    fn an_explanation_is_collected_for_a_trusted_caller_alone_and_is_none_without_a_choice() {
        let (mut chooser, mut pool) = chooser("{}");
        for (wanted, trust_clients, is_collected) in [
            (Explain::No, true, false),
            (Explain::ForLog, false, true),
            (Explain::ForCaller, false, false),
            (Explain::ForCaller, true, true),
        ] {
            pool.trust_clients = trust_clients;
            chooser.explain(wanted, &pool);
            assert_eq!(chooser.explained.is_some(), is_collected, "{wanted:?}");
            assert_eq!(chooser.take_explanation(), None);
        }
    }
}
