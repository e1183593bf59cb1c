//! Owns the choice of workers for a model key: a pair, or one that runs the request aggregated.

use std::sync::Arc;

use super::chooser::Ranks;
use super::eligible::{
    Narrowed, allowed, check_decode_is_free, constraints, decoders, hands_over, is_restricted,
    most_preferred, narrow_to_bound, narrowed, not_excluded, on_rank, suited,
};
use super::model_workers::RankSlot;
use super::pinned::Pinned;
use super::selection_request::{Admit, Demand, SelectionContext, task};
use super::{Assignment, Refusal, Router, dispatch};
use crate::config::Pool;
use crate::fleet::{Role, Target, TargetKey, Worker};
use crate::load::{DecodeCharge, Ledger, ObservedRates, PrefillCharge};
use crate::rendezvous::NotServed;
use crate::request::overrides::header_for;
use crate::selection::Random;
use crate::selection::cost::DecodeCredit;
use crate::selection::eligibility::{Eligible, Filter};
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

    /// Prompt tokens that the worker must compute: all but those it has cached.
    pub(super) fn uncached_tokens(&self, demand: &Demand, pool: &Pool) -> u64 {
        let cached = u64::from(self.overlap).saturating_mul(u64::from(pool.block_tokens));
        demand.prompt_tokens.saturating_sub(cached)
    }

    /// Books the prompt tokens that must be computed, at least one.
    pub(super) fn charge_prefill(
        &self,
        demand: &Demand,
        pool: &Pool,
        ledger: &mut Ledger,
    ) -> PrefillCharge {
        let tokens = self.uncached_tokens(demand, pool).max(1);
        ledger.charge_prefill(self.key(), tokens)
    }

    /// Books the answer.
    pub(super) fn charge_decode(
        &self,
        demand: &Demand,
        pool: &Pool,
        ledger: &mut Ledger,
    ) -> DecodeCharge {
        ledger.charge_decode(self.key(), demand.answer(pool.block_tokens))
    }
}

/// A prefill and a decode worker that may exchange KV, and the alternatives for decode.
#[derive(Debug)]
pub struct Pair {
    pub(super) prefill: Chosen,
    pub(super) decode: Chosen,
    pub(super) others: Vec<Target>,
}

impl Pair {
    /// Books the pair.
    pub(super) fn assign(self, demand: &Demand, pool: &Pool, ledger: &mut Ledger) -> Assignment {
        Assignment {
            prefill_charge: Some(self.prefill.charge_prefill(demand, pool, ledger)),
            decode_charge: Some(self.decode.charge_decode(demand, pool, ledger)),
            prefill: Some(self.prefill.target.worker),
            decode: Some(self.decode.target.worker),
            ..Assignment::default()
        }
    }
}

/// A worker that runs a request aggregated, and the alternatives.
#[derive(Debug)]
pub struct Whole {
    pub(super) decode: Chosen,
    pub(super) others: Vec<Target>,
}

impl Whole {
    /// Books the worker, which has the prompt to read too.
    pub(super) fn assign(self, demand: &Demand, pool: &Pool, ledger: &mut Ledger) -> Assignment {
        Assignment {
            prefill_charge: Some(self.decode.charge_prefill(demand, pool, ledger)),
            decode_charge: Some(self.decode.charge_decode(demand, pool, ledger)),
            decode: Some(self.decode.target.worker),
            ..Assignment::default()
        }
    }
}

/// Whether a choice moves the policies' cursors on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The choice is only looked at.
    Peek,
    /// The choice is taken.
    Commit,
}

/// Picks a pair, unless too many prompt tokens wait already: never a reason to fall back to one worker.
pub(super) fn admitted_pair(
    router: &mut Router,
    context: &SelectionContext<'_>,
) -> Result<Pair, Refusal> {
    match backpressure(router, context) {
        Some(refusal) => Err(refusal),
        None => choose_pair(router, context, Step::Commit),
    }
}

/// Whether too many prompt tokens wait on the eligible prefill workers. A request that names its worker is exempt, and so
/// is one that was admitted already.
fn backpressure(router: &Router, context: &SelectionContext<'_>) -> Option<Refusal> {
    let allowed_tokens = router.pool.prefill.max_queued_tokens?;
    let pin = context.overrides.prefill;
    if pin.worker.is_some() || context.admit == Admit::Anyone {
        return None;
    }
    let members = context.model_workers.of_role(Role::Prefill);
    let decode = named_decode(router, context);
    // If no worker is left, the choice itself gives the reason.
    let eligible = prefill_candidates(router, context, decode.as_ref(), Step::Commit);
    let eligible = eligible.and_then(|left| allowed(context, Role::Prefill, left));
    let eligible = eligible.and_then(|left| on_rank(members, Role::Prefill, pin, left));
    let eligible = eligible.ok()?;
    let candidates = eligible.indexes().filter_map(|index| members.get(index));
    let load = |member: &RankSlot| router.ledger.load_in_all(member.target.key());
    let queued_tokens: u64 = candidates.map(|member| load(member).prefill_tokens).sum();
    let after = queued_tokens.saturating_add(context.demand.prompt_tokens);
    (after > allowed_tokens && queued_tokens > 0).then_some(Refusal::Backpressure {
        queued_tokens,
        allowed_tokens,
    })
}

/// Picks a pair and, at the step that commits, takes it.
pub(super) fn choose_pair(
    router: &mut Router,
    context: &SelectionContext<'_>,
    step: Step,
) -> Result<Pair, Refusal> {
    let decode = named_decode(router, context);
    let prefill = choose_prefill(router, context, decode.as_ref(), step)?;
    let constraints = constraints(context, &prefill.target.worker)?;
    let (decode, others) = choose_decode(router, context, &constraints)?;
    // A worker in back-off is the last choice: all others are full as well, and the prefilled KV would not be fetched.
    let is_named = context.overrides.decode_pin().worker.is_some();
    let (health, now) = (&router.health, router.ledger.now());
    if !is_named && health.held(decode.target.worker.id, now).is_overloaded() {
        return Err(Refusal::Overloaded { role: Role::Decode });
    }
    // Only now: a request that is refused for lack of the other worker uses up no turn.
    if step == Step::Commit {
        take(router, Role::Prefill, context, &prefill);
        take(router, Role::Decode, context, &decode);
    }
    Ok(Pair {
        prefill,
        decode,
        others,
    })
}

/// The decode worker named by the caller, if it is one: only a prefill worker that may hand over to it is eligible.
pub(super) fn named_decode(router: &Router, context: &SelectionContext<'_>) -> Option<Arc<Worker>> {
    let named = context.overrides.decode_pin().worker?;
    let worker = router.workers.fleet().get(named)?;
    (worker.role == Role::Decode && context.key.holds(worker)).then(|| Arc::clone(worker))
}

/// Takes a choice: moves the cursor on, and begins the trial of an ejected worker, unless the caller named the worker,
/// which uses up no turn. The blocks that the worker will hold are recorded in both cases.
pub(super) fn take(
    router: &mut Router,
    role: Role,
    context: &SelectionContext<'_>,
    chosen: &Chosen,
) {
    let now = router.ledger.now();
    if context.overrides.pin(role).worker.is_none() {
        router.health.picked(chosen.target.worker.id, now);
        router.chooser.commit(role, chosen.key());
    }
    let blocks = &context.demand.blocks;
    router.notes.count(role, blocks, chosen);
    if router.chooser.remembers(role, decode_credit(&router.pool)) {
        router.prefixes.remember(chosen, blocks, now);
    }
}

/// Whether the blocks held by a decode worker lower its cost.
fn decode_credit(pool: &Pool) -> DecodeCredit {
    match pool.conditional {
        Some(_) => DecodeCredit::Counts,
        None => DecodeCredit::Nothing,
    }
}

/// A prefill worker: bound (not required for a query if none is bound), not tried yet, and with a decode worker to hand
/// over to; if decode has been picked already, exactly that one. No cursor moves.
pub(super) fn choose_prefill(
    router: &mut Router,
    context: &SelectionContext<'_>,
    decode: Option<&Arc<Worker>>,
    step: Step,
) -> Result<Chosen, Refusal> {
    let eligible = prefill_candidates(router, context, decode, step)?;
    let pinned = Pinned::of(Role::Prefill, context.overrides);
    let chosen = choose(router, context, eligible, pinned, &Constraints::default())?;
    let chosen = chosen.map(|(chosen, _)| chosen);
    chosen.ok_or(Refusal::NotServed(NotServed::NotActivated))
}

/// The prefill workers that may be picked, before the limits of the gateway and the caller.
fn prefill_candidates(
    router: &Router,
    context: &SelectionContext<'_>,
    decode: Option<&Arc<Worker>>,
    step: Step,
) -> Result<Eligible, Refusal> {
    let pin = context.overrides.prefill;
    let members = context.model_workers.of_role(Role::Prefill);
    let worker = |index: usize| members.get(index).map(|member| &member.target.worker);
    let mut unreachable = None;
    let eligible = Eligible::all(members.len())
        .and_then(|all| narrow_to_bound(&router.workers, &router.pool, all, members, pin, step))
        .and_then(|bound| not_excluded(context, members, bound))
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

/// A decode worker within these constraints, and its alternatives. No cursor moves.
pub(super) fn choose_decode(
    router: &mut Router,
    context: &SelectionContext<'_>,
    constraints: &Constraints,
) -> Result<(Chosen, Vec<Target>), Refusal> {
    let (eligible, pinned) = decoders(context, constraints)?;
    let (decode, eligible) = choose(router, context, eligible, pinned, constraints)?
        .ok_or(Refusal::NotServed(NotServed::NoDecode))?;
    let others = others(router, context, &eligible, &decode, pinned, constraints);
    Ok((decode, others))
}

/// Another decode worker, after the picked one has left before its leg was dispatched.
pub(super) fn replace_decode(
    router: &mut Router,
    context: &SelectionContext<'_>,
    prefill: &Arc<Worker>,
) -> Result<(Chosen, Vec<Target>), Refusal> {
    let constraints = constraints(context, prefill)?;
    let (decode, others) = choose_decode(router, context, &constraints)?;
    take(router, Role::Decode, context, &decode);
    Ok((decode, others))
}

/// Picks and takes a worker that runs the request aggregated.
pub(super) fn pick_whole(
    router: &mut Router,
    context: &SelectionContext<'_>,
) -> Result<Whole, Refusal> {
    let role = Role::Aggregated;
    let constraints = &context.overrides.constraints;
    let eligible = suited(context, role, constraints).map_err(|filter| match filter {
        Filter::Role | Filter::Failed => Refusal::NotServed(NotServed::NotActivated),
        filter => Refusal::NoneEligible { role, filter },
    })?;
    let pinned = Pinned::of(role, context.overrides);
    let (decode, eligible) = choose(router, context, eligible, pinned, constraints)?
        .ok_or(Refusal::NotServed(NotServed::NotActivated))?;
    if !context.overrides.query {
        take(router, role, context, &decode);
    }
    let others = others(router, context, &eligible, &decode, pinned, constraints);
    Ok(Whole { decode, others })
}

/// The pinned worker, or the one that the role's policy picks, and all that were eligible; none without any. No cursor moves.
fn choose(
    router: &mut Router,
    context: &SelectionContext<'_>,
    eligible: Eligible,
    pinned: Pinned,
    wanted: &Constraints,
) -> Result<Option<(Chosen, Eligible)>, Refusal> {
    let members = context.model_workers.of_role(pinned.role);
    let Narrowed { eligible, free } = narrowed(router, context, eligible, pinned)?;
    if pinned.role == Role::Prefill {
        check_decode_is_free(router, context)?;
    }
    let decode_credit = decode_credit(&router.pool);
    let blocks = &*context.demand.blocks;
    let reads_overlap =
        router.chooser.remembers(pinned.role, decode_credit) && !blocks.sequence.is_empty();
    let looked_up = reads_overlap.then_some(blocks);
    router.prefixes.look_up(looked_up, router.ledger.now());
    let index = match pinned.pin.worker {
        Some(_) => pinned.least_busy(members, &free, &router.ledger),
        None => pick(router, context, free, pinned.role, wanted)?,
    };
    let Some(member) = index.and_then(|index| members.get(index)) else {
        return Ok(None);
    };
    let slots = eligible.indexes().filter_map(|index| members.get(index));
    let possible = router.prefixes.deepest(slots.map(|member| member.slot));
    let overlap = router.prefixes.depth(member.slot);
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
    router: &mut Router,
    context: &SelectionContext<'_>,
    mut eligible: Eligible,
    role: Role,
    wanted: &Constraints,
) -> Result<Option<usize>, Refusal> {
    let Router {
        pool,
        chooser,
        ledger,
        prefixes,
        ..
    } = router;
    let policy = chooser.policy(role);
    if policy.needs_pin() {
        let header = header_for(role);
        return Err(Refusal::WorkerIdRequired { role, header });
    }
    let members = context.model_workers.of_role(role);
    let prefers = !wanted.preferred_taints.is_empty();
    if prefers && !policy.goes_by_cost() {
        eligible = most_preferred(members, eligible, wanted);
    }
    let ObservedRates {
        common: rate,
        slowness,
    } = context.model_workers.rates(role, ledger);
    let ranks = Ranks {
        members,
        slowness: &slowness,
        snapshots: ledger.snapshots(rate),
        depths: prefixes.depths(),
        wanted,
        prefers,
    };
    let task = task(context, role, rate, decode_credit(pool), pool.block_tokens);
    Ok(chooser.pick(&task, pool.selection.of(role), &ranks, &eligible))
}

/// Alternatives for the same bytes: as many as the proxy may try, of the same rank, in random order, preferred ones first.
/// A worker named by the caller has no alternatives.
fn others(
    router: &mut Router,
    context: &SelectionContext<'_>,
    eligible: &Eligible,
    chosen: &Chosen,
    pinned: Pinned,
    constraints: &Constraints,
) -> Vec<Target> {
    let wanted = dispatch::attempts(&router.pool).saturating_sub(1);
    if pinned.pin.worker.is_some() || wanted == 0 {
        return Vec::new();
    }
    let members = context.model_workers.of_role(pinned.role);
    let fitting = |index: usize| {
        let target = &members.get(index)?.target;
        let fits = target.rank == chosen.target.rank && target.worker.id != chosen.target.worker.id;
        fits.then_some(target)
    };
    let random = router.chooser.random();
    if constraints.preferred_taints.is_empty()
        && let Some(drawn) = draw(random, eligible, wanted, fitting)
    {
        return drawn;
    }
    let mut all: Vec<&Target> = eligible.indexes().filter_map(fitting).collect();
    random.shuffle(&mut all);
    let preference = |target: &Target| constraints.preference(&target.worker);
    all.sort_by(|a, b| preference(b).total_cmp(&preference(a)));
    all.into_iter().take(wanted).cloned().collect()
}

/// Draws a few of many without a scan of all; none if that does not find enough.
fn draw<'m>(
    random: &mut Random,
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
        let found = eligible.nth(random.usize(0..count)).and_then(&fitting);
        if let Some(target) = found.filter(|target| !drawn.contains(target)) {
            drawn.push(target.clone());
        }
        if drawn.len() == wanted {
            return Some(drawn);
        }
    }
    None
}
