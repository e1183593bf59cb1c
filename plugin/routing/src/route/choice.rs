//! Owns the choice of workers for a model key: a pair, or one that runs the request aggregated.

use std::rc::Rc;

use super::eligible::{
    Narrowed, admitted, allowed, constraints, hands_over, is_restricted, most_preferred, on_rank,
};
use super::explain::Explained;
use super::model_workers::RankSlot;
use super::pinned::Pinned;
use super::selection_request::{Admit, SelectionContext, task};
use super::{Refusal, Router};
use crate::fleet::{Role, Target, TargetKey, Worker};
use crate::load::LoadSnapshots;
use crate::rendezvous::NotServed;
use crate::request::Pin;
use crate::request::overrides::header_for;
use crate::selection::cost::DecodeCredit;
use crate::selection::eligibility::{Eligible, Filter};
use crate::selection::{Candidate, Reads, cheapest};
use crate::topology::Constraints;

/// A picked worker rank, and how many leading blocks of the prompt it is estimated to hold.
#[derive(Debug, Clone)]
pub struct Chosen {
    pub(super) target: Target,
    pub(super) slot: usize,
    pub(super) overlap: u32,
    /// The most leading blocks that any eligible rank is estimated to hold.
    pub(super) possible: u32,
}

impl Chosen {
    pub(super) fn key(&self) -> TargetKey {
        self.target.key()
    }
}

/// A prefill and a decode worker that may exchange KV, and the alternatives for decode.
#[derive(Debug)]
pub struct Pair {
    pub(super) prefill: Chosen,
    pub(super) decode: Chosen,
    pub(super) others: Vec<Target>,
}

/// A worker that runs a request aggregated, and the alternatives.
#[derive(Debug)]
pub struct Whole {
    pub(super) decode: Chosen,
    pub(super) others: Vec<Target>,
}

/// Whether a choice moves the policies' cursors on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The choice is only looked at.
    Peek,
    /// The choice is taken.
    Commit,
}

impl Router {
    /// Picks a pair, unless too many prompt tokens wait already: never a reason to fall back to one worker.
    pub(super) fn admitted_pair(
        &mut self,
        context: &SelectionContext<'_>,
    ) -> Result<Pair, Refusal> {
        match self.backpressure(context) {
            Some(refusal) => Err(refusal),
            None => self.pick_pair(context),
        }
    }

    /// Whether too many prompt tokens wait on the eligible prefill workers. A request that names its worker is exempt, and
    /// so is one that was admitted already.
    fn backpressure(&self, context: &SelectionContext<'_>) -> Option<Refusal> {
        let allowed_tokens = self.pool.prefill.max_queued_tokens?;
        let pin = context.overrides.prefill_pin();
        if pin.worker.is_some() || context.admit == Admit::Anyone {
            return None;
        }
        let members = context.model_workers.of_role(Role::Prefill);
        let decode = self.named_decode(context);
        // If no worker is left, the choice itself gives the reason.
        let eligible = self.prefill_candidates(context, decode.as_ref(), Step::Commit);
        let eligible = eligible.and_then(|left| allowed(context, Role::Prefill, left));
        let eligible = eligible.and_then(|left| on_rank(members, Role::Prefill, pin, left));
        let eligible = eligible.ok()?;
        let candidates = eligible.indexes().filter_map(|index| members.get(index));
        let queued_tokens: u64 = candidates
            .map(|member| self.ledger.load_in_all(member.target.key()).prefill_tokens)
            .sum();
        let after = queued_tokens.saturating_add(context.demand.prompt_tokens);
        (after > allowed_tokens && queued_tokens > 0).then_some(Refusal::Backpressure {
            queued_tokens,
            allowed_tokens,
        })
    }

    /// Picks a pair and takes it.
    pub(super) fn pick_pair(&mut self, context: &SelectionContext<'_>) -> Result<Pair, Refusal> {
        self.choose_pair(context, Step::Commit)
    }

    /// The pair that would be picked; no cursor moves.
    pub(super) fn look_at_pair(
        &mut self,
        context: &SelectionContext<'_>,
    ) -> Result<(Target, Target), Refusal> {
        let pair = self.choose_pair(context, Step::Peek)?;
        Ok((pair.prefill.target, pair.decode.target))
    }

    fn choose_pair(&mut self, context: &SelectionContext<'_>, step: Step) -> Result<Pair, Refusal> {
        let decode = self.named_decode(context);
        let prefill = self.choose_prefill(context, decode.as_ref(), step)?;
        let constraints = constraints(context, &prefill.target.worker)?;
        let (decode, others) = self.choose_decode(context, &constraints)?;
        // A worker in back-off is the last choice: all others are full as well, and the prefilled KV would not be fetched.
        let is_named = context.overrides.decode_pin().worker.is_some();
        if !is_named && self.is_in_back_off(decode.target.worker.id) {
            return Err(Refusal::Overloaded { role: Role::Decode });
        }
        // Only now: a request that is refused for lack of the other worker uses up no turn.
        if step == Step::Commit {
            self.take(
                Role::Prefill,
                context,
                context.overrides.prefill_pin(),
                &prefill,
            );
            self.take(
                Role::Decode,
                context,
                context.overrides.decode_pin(),
                &decode,
            );
        }
        Ok(Pair {
            prefill,
            decode,
            others,
        })
    }

    /// The prefill worker that would be picked; no cursor moves.
    pub(super) fn look_at_prefill(
        &mut self,
        context: &SelectionContext<'_>,
    ) -> Result<Chosen, Refusal> {
        let decode = self.named_decode(context);
        self.choose_prefill(context, decode.as_ref(), Step::Commit)
    }

    /// The decode worker that would be picked, for any prefill worker; no cursor moves.
    pub(super) fn look_at_decode(
        &mut self,
        context: &SelectionContext<'_>,
    ) -> Result<(Chosen, Vec<Target>), Refusal> {
        self.choose_decode(context, &context.overrides.constraints)
    }

    /// The decode worker named by the caller, if it is one: only a prefill worker that may hand over to it is eligible.
    fn named_decode(&self, context: &SelectionContext<'_>) -> Option<Rc<Worker>> {
        let worker = self.fleet.get(context.overrides.decode_pin().worker?)?;
        (worker.role == Role::Decode && context.key.holds(worker)).then(|| Rc::clone(worker))
    }

    /// Takes a choice: moves the cursor on, and begins the trial of an ejected worker, unless the caller named the worker,
    /// which uses up no turn. The blocks that the worker will hold are recorded in both cases.
    pub(super) fn take(
        &mut self,
        role: Role,
        context: &SelectionContext<'_>,
        pin: Pin,
        chosen: &Chosen,
    ) {
        if pin.worker.is_none() {
            self.health
                .picked(chosen.target.worker.id, self.ledger.now());
            match role {
                Role::Prefill => self.prefill_policy.commit(chosen.key()),
                Role::Decode | Role::Aggregated => self.decode_policy.commit(chosen.key()),
            }
        }
        self.count(role, context, chosen);
        if self.remembers(role) {
            self.remember(chosen, &context.demand.blocks);
        }
    }

    /// Whether the blocks held by workers of a role matter to any choice.
    fn remembers(&self, role: Role) -> bool {
        match role {
            Role::Prefill => self.prefill_policy.reads() == Reads::Overlap,
            Role::Decode => self.decode_credit() == DecodeCredit::Counts,
            Role::Aggregated => {
                self.decode_policy.reads() == Reads::Overlap
                    || self.decode_credit() == DecodeCredit::Counts
            }
        }
    }

    /// Whether the blocks held by a decode worker lower its cost.
    pub(super) fn decode_credit(&self) -> DecodeCredit {
        match self.pool.conditional {
            Some(_) => DecodeCredit::Counts,
            None => DecodeCredit::Nothing,
        }
    }

    /// Another prefill worker, for a decode worker that has been picked already.
    pub(super) fn choose_next_prefill(
        &mut self,
        context: &SelectionContext<'_>,
        decode: &Rc<Worker>,
    ) -> Option<Chosen> {
        let next = self
            .choose_prefill(context, Some(decode), Step::Commit)
            .ok()?;
        self.take(
            Role::Prefill,
            context,
            context.overrides.prefill_pin(),
            &next,
        );
        Some(next)
    }

    /// A prefill worker: bound (not required for a query if none is bound), not tried yet, and with a decode worker to hand
    /// over to; if decode has been picked already, exactly that one.
    fn choose_prefill(
        &mut self,
        context: &SelectionContext<'_>,
        decode: Option<&Rc<Worker>>,
        step: Step,
    ) -> Result<Chosen, Refusal> {
        let pin = context.overrides.prefill_pin();
        let eligible = self.prefill_candidates(context, decode, step)?;
        let pinned = Pinned::new(
            Role::Prefill,
            "prefill_worker_id",
            context.overrides.prefill,
            pin,
        );
        let chosen = self.choose(context, eligible, pinned, &Constraints::default())?;
        chosen
            .map(|(chosen, _)| chosen)
            .ok_or(Refusal::NotServed(NotServed::NotActivated))
    }

    /// The prefill workers that may be picked, before the limits of the gateway and the caller.
    fn prefill_candidates(
        &self,
        context: &SelectionContext<'_>,
        decode: Option<&Rc<Worker>>,
        step: Step,
    ) -> Result<Eligible, Refusal> {
        let pin = context.overrides.prefill_pin();
        let members = context.model_workers.of_role(Role::Prefill);
        let worker = |index: usize| members.get(index).map(|member| &member.target.worker);
        let mut unreachable = None;
        let eligible = Eligible::all(members.len())
            .and_then(|all| self.narrow_to_bound(all, members, pin, step))
            .and_then(|bound| Self::not_excluded(context, members, bound))
            .and_then(|left| match is_restricted(context) {
                false => Ok(left),
                true => left.narrow(Filter::Taints, |index| {
                    worker(index).is_some_and(|worker| {
                        hands_over(worker, context, decode)
                            .map_err(|problem| unreachable.get_or_insert(problem).clone())
                            .is_ok()
                    })
                }),
            });
        eligible.map_err(|filter| match (filter, unreachable.take()) {
            (Filter::Taints, Some(problem)) if context.model_workers.has_topology => {
                Refusal::Topology { problem }
            }
            (Filter::Taints, Some(_)) => Refusal::NoneEligible {
                role: Role::Decode,
                filter: Filter::Taints,
            },
            (Filter::Role | Filter::Failed, _) => Refusal::NotServed(NotServed::NotActivated),
            (Filter::Binding, _) => Refusal::NotServed(NotServed::Pending),
            (filter, _) => Refusal::NoneEligible {
                role: Role::Prefill,
                filter,
            },
        })
    }

    fn choose_decode(
        &mut self,
        context: &SelectionContext<'_>,
        constraints: &Constraints,
    ) -> Result<(Chosen, Vec<Target>), Refusal> {
        let members = context.model_workers.of_role(Role::Decode);
        let (eligible, pinned) = Self::decoders(context, constraints)?;
        let (decode, eligible) = self
            .choose(context, eligible, pinned, constraints)?
            .ok_or(Refusal::NotServed(NotServed::NoDecode))?;
        let others = self.others(members, &eligible, &decode, pinned.pin, constraints);
        Ok((decode, others))
    }

    /// Another decode worker, after the picked one has left before its leg was dispatched.
    pub(super) fn replace_decode(
        &mut self,
        context: &SelectionContext<'_>,
        prefill: &Rc<Worker>,
    ) -> Result<(Chosen, Vec<Target>), Refusal> {
        let constraints = constraints(context, prefill)?;
        let (decode, others) = self.choose_decode(context, &constraints)?;
        self.take(
            Role::Decode,
            context,
            context.overrides.decode_pin(),
            &decode,
        );
        Ok((decode, others))
    }

    /// Picks and takes a worker that runs the request aggregated.
    pub(super) fn pick_whole(&mut self, context: &SelectionContext<'_>) -> Result<Whole, Refusal> {
        let constraints = &context.overrides.constraints;
        let members = context.model_workers.of_role(Role::Aggregated);
        let pin = context.overrides.decode_pin();
        let eligible = admitted(members, constraints)
            .and_then(|admitted| Self::not_excluded(context, members, admitted))
            .map_err(|filter| match filter {
                Filter::Role | Filter::Failed => Refusal::NotServed(NotServed::NotActivated),
                filter => Refusal::NoneEligible {
                    role: Role::Aggregated,
                    filter,
                },
            })?;
        let pinned = Pinned::new(
            Role::Aggregated,
            "decode_worker_id",
            context.overrides.decode,
            pin,
        );
        let (decode, eligible) = self
            .choose(context, eligible, pinned, constraints)?
            .ok_or(Refusal::NotServed(NotServed::NotActivated))?;
        if !context.overrides.query {
            self.take(Role::Aggregated, context, pin, &decode);
        }
        let others = self.others(members, &eligible, &decode, pin, constraints);
        Ok(Whole { decode, others })
    }

    /// The pinned worker, or the one that the role's policy picks, and all that were eligible; none without any. No cursor moves.
    fn choose(
        &mut self,
        context: &SelectionContext<'_>,
        eligible: Eligible,
        pinned: Pinned,
        wanted: &Constraints,
    ) -> Result<Option<(Chosen, Eligible)>, Refusal> {
        let members = context.model_workers.of_role(pinned.role);
        let Narrowed { eligible, free } = self.narrowed(context, eligible, pinned)?;
        if pinned.role == Role::Prefill {
            self.somebody_decodes(context)?;
        }
        let reads_overlap =
            self.remembers(pinned.role) && !context.demand.blocks.sequence.is_empty();
        if reads_overlap {
            self.prefixes
                .depths(&context.demand.blocks, self.ledger.now(), &mut self.depths);
        } else {
            self.depths.clear();
        }
        let index = match pinned.pin.worker {
            Some(_) => pinned.least_busy(members, &free, &self.ledger),
            None => self.pick(context, members, free, pinned.role, wanted)?,
        };
        let Some(member) = index.and_then(|index| members.get(index)) else {
            return Ok(None);
        };
        let depth = |member: &RankSlot| self.depths.get(member.slot).copied().unwrap_or(0);
        let possible = match self.depths.is_empty() {
            true => 0,
            false => {
                let could = eligible.indexes().filter_map(|index| members.get(index));
                could.map(depth).max().unwrap_or(0)
            }
        };
        let overlap = depth(member);
        let chosen = Chosen {
            target: member.target.clone(),
            slot: member.slot,
            overlap,
            possible: possible.max(overlap),
        };
        Ok(Some((chosen, eligible)))
    }

    /// The index of the policy's pick among these, which are not too busy.
    fn pick(
        &mut self,
        context: &SelectionContext<'_>,
        members: &[RankSlot],
        mut eligible: Eligible,
        role: Role,
        wanted: &Constraints,
    ) -> Result<Option<usize>, Refusal> {
        let decode_credit = self.decode_credit();
        let policy = match role {
            Role::Prefill => self.prefill_policy.as_mut(),
            Role::Decode | Role::Aggregated => self.decode_policy.as_mut(),
        };
        if policy.needs_pin() {
            return Err(Refusal::WorkerIdRequired {
                role,
                header: header_for(role),
            });
        }
        if !policy.goes_by_cost() && !wanted.preferred_taints.is_empty() {
            eligible = most_preferred(members, eligible, wanted);
        }
        let (rate, slowness) = context.model_workers.rate(role, &self.ledger);
        let builder = CandidateBuilder {
            snapshots: self.ledger.snapshots(rate),
            depths: &self.depths,
            wanted,
            prefers: !wanted.preferred_taints.is_empty(),
        };
        let of_index = |index: &usize| Some((members.get(*index)?, slowness.get(*index)?));
        let task = task(context, role, rate, decode_credit, self.pool.block_tokens);
        if policy.goes_by_cost() && self.explained.is_none() {
            let picked = match &eligible {
                Eligible::All(_) => {
                    let all = members.iter().zip(slowness.iter());
                    let all = all.map(|(member, slowness)| builder.at(member, *slowness));
                    cheapest(&task, all, &mut self.random)
                }
                Eligible::Some(indexes) => {
                    let some = indexes.iter().filter_map(of_index);
                    let some = some.map(|(member, slowness)| builder.at(member, *slowness));
                    cheapest(&task, some, &mut self.random)
                }
            };
            return Ok(picked.and_then(|picked| eligible.nth(picked)));
        }
        let indexes: Vec<usize> = eligible.indexes().collect();
        let listed = indexes.iter().filter_map(of_index);
        let candidates: Vec<Candidate<'_>> = listed
            .map(|(member, slowness)| builder.at(member, *slowness))
            .collect();
        let picked = policy.peek(&task, &candidates, &mut self.random);
        if let Some(explained) = &mut self.explained {
            let name = self.pool.selection.of(role);
            explained.push(Explained::new(policy, name, &task, &candidates, picked));
        }
        Ok(picked.and_then(|picked| eligible.nth(picked)))
    }

    /// Alternatives for the same bytes: as many as the proxy may try, of the same rank, in random order, preferred ones
    /// first. A worker named by the caller has no alternatives.
    fn others(
        &mut self,
        members: &[RankSlot],
        eligible: &Eligible,
        chosen: &Chosen,
        pin: Pin,
        constraints: &Constraints,
    ) -> Vec<Target> {
        let wanted = self.decode_attempts().saturating_sub(1);
        if pin.worker.is_some() || wanted == 0 {
            return Vec::new();
        }
        let fitting = |index: usize| {
            let target = &members.get(index)?.target;
            let fits =
                target.rank == chosen.target.rank && target.worker.id != chosen.target.worker.id;
            fits.then_some(target)
        };
        if constraints.preferred_taints.is_empty()
            && let Some(drawn) = self.draw(eligible, wanted, fitting)
        {
            return drawn;
        }
        let mut all: Vec<&Target> = eligible.indexes().filter_map(fitting).collect();
        self.random.shuffle(&mut all);
        let preference = |target: &Target| constraints.preference(&target.worker);
        all.sort_by(|a, b| preference(b).total_cmp(&preference(a)));
        all.into_iter().take(wanted).cloned().collect()
    }

    /// Draws a few of many without a scan of all; none if that does not find enough.
    fn draw<'m>(
        &mut self,
        eligible: &Eligible,
        wanted: usize,
        fitting: impl Fn(usize) -> Option<&'m Target>,
    ) -> Option<Vec<Target>> {
        const TRIES: usize = 8;
        let count = eligible.count();
        let tries = wanted.saturating_mul(TRIES);
        if count <= tries {
            return None;
        }
        let mut drawn: Vec<Target> = Vec::with_capacity(wanted);
        for _ in 0..tries {
            let found = eligible.nth(self.random.usize(0..count)).and_then(&fitting);
            if let Some(target) = found.filter(|target| !drawn.contains(target)) {
                drawn.push(target.clone());
            }
            if drawn.len() == wanted {
                return Some(drawn);
            }
        }
        None
    }
}

/// Builds candidates from rank slots.
struct CandidateBuilder<'l> {
    snapshots: LoadSnapshots<'l>,
    depths: &'l [u32],
    wanted: &'l Constraints,
    /// Whether the request has any preference.
    prefers: bool,
}

impl CandidateBuilder<'_> {
    /// Runs a thousand times a choice: inlined, so that only what the price needs remains.
    #[inline(always)]
    fn at<'m>(&self, member: &'m RankSlot, slowness: f32) -> Candidate<'m> {
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
