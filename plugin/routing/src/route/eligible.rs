//! Owns eligibility for a request, filter by filter: the demands of the model key, of the request and of the workers' own state.

use std::sync::Arc;

use super::choice::Step;
use super::model_workers::{ModelWorkers, RankSlot};
use super::pinned::Pinned;
use super::selection_request::{Admit, SelectionContext};
use super::workers::Workers;
use super::{Refusal, Router};
use crate::config::Pool;
use crate::fleet::{Condition, Role, Worker};
use crate::rendezvous::NotServed;
use crate::request::Pin;
use crate::selection::eligibility::{Eligible, Filter};
use crate::topology::{self, Constraints};

/// The workers left of one role.
pub(super) struct Narrowed {
    /// Those that may be picked.
    pub(super) eligible: Eligible,
    /// Those of them that are not too busy; of a worker named by the caller, its ranks.
    pub(super) free: Eligible,
}

/// Keeps bound workers, where the protocol needs a binding. A peek needs none for a named worker, or if no worker is bound.
pub(super) fn narrow_to_bound(
    workers: &Workers,
    pool: &Pool,
    all: Eligible,
    members: &[RankSlot],
    pin: Pin,
    step: Step,
) -> Result<Eligible, Filter> {
    if pool.engine().binder().is_none() {
        return Ok(all);
    }
    let is_bound = |member: &RankSlot| workers.bindings().get(member.target.worker.id).is_some();
    let named = |member: &&RankSlot| pin.worker == Some(member.target.worker.id);
    let is_needed = match step {
        Step::Commit if members.iter().any(|m| named(&m) && !is_bound(m)) => {
            return Err(Filter::Binding);
        }
        Step::Commit => true,
        Step::Peek => pin.worker.is_none() && members.iter().any(is_bound),
    };
    match is_needed {
        true => keep(all, Filter::Binding, members, is_bound),
        false => Ok(all),
    }
}

/// Keeps the ranks that pass.
fn keep(
    eligible: Eligible,
    filter: Filter,
    members: &[RankSlot],
    passes: impl Fn(&RankSlot) -> bool,
) -> Result<Eligible, Filter> {
    eligible.narrow(filter, |index| members.get(index).is_some_and(&passes))
}

/// The ranks of a role with all required taints, whose workers have not failed this request already.
pub(super) fn suited(
    context: &SelectionContext<'_>,
    role: Role,
    constraints: &Constraints,
) -> Result<Eligible, Filter> {
    let members = context.model_workers.of_role(role);
    let mut left = Eligible::all(members.len())?;
    if !constraints.required_taints.is_empty() {
        let admits = |member: &RankSlot| constraints.admit(&member.target.worker);
        left = keep(left, Filter::Taints, members, admits)?;
    }
    not_excluded(context, members, left)
}

/// Keeps workers that have not failed this request already.
pub(super) fn not_excluded(
    context: &SelectionContext<'_>,
    members: &[RankSlot],
    eligible: Eligible,
) -> Result<Eligible, Filter> {
    if context.excluded.is_empty() {
        return Ok(eligible);
    }
    let is_left = |member: &RankSlot| !context.excluded.contains(&member.target.worker.id);
    keep(eligible, Filter::Failed, members, is_left)
}

/// The filters that are the same for all roles and do not apply to a worker that the caller names.
fn narrow_further(
    router: &Router,
    context: &SelectionContext<'_>,
    eligible: Eligible,
    pinned: Pinned,
) -> Result<Eligible, Refusal> {
    let members = context.model_workers.of_role(pinned.role);
    let worker = |index: usize| members.get(index).map(|member| &member.target.worker);
    let mut left = on_rank(members, pinned.role, pinned.pin, eligible)?;
    if context.model_workers.has_unhealthy {
        left = left.prefer(|index| worker(index).is_some_and(|w| w.condition == Condition::Ready));
    }
    let now = router.ledger.now();
    if !router.health.is_clear(now) {
        let held = |index| worker(index).map(|worker| router.health.held(worker.id, now));
        // All of them may have penalties: then those with the least are left.
        let least = left.indexes().filter_map(held).min();
        left = left.prefer(|index| held(index) == least);
    }
    if let Some(adapter) = &context.demand.adapter
        && context.model_workers.has_adapters
    {
        // Any worker can load the adapter, at a cost.
        let has = |worker: &Arc<Worker>| worker.adapters.iter().any(|own| **own == **adapter);
        left = left.prefer(|index| worker(index).is_some_and(has));
    }
    Ok(left)
}

/// The decode workers that could be picked, and the caller's pin.
pub(super) fn decoders(
    context: &SelectionContext<'_>,
    constraints: &Constraints,
) -> Result<(Eligible, Pinned), Refusal> {
    let role = Role::Decode;
    let eligible = suited(context, role, constraints).map_err(|filter| match filter {
        Filter::Role | Filter::Taints | Filter::Failed => Refusal::NotServed(NotServed::NoDecode),
        filter => Refusal::NoneEligible { role, filter },
    })?;
    Ok((eligible, Pinned::of(role, context.overrides)))
}

/// Fails if all decode workers that could be picked are too busy: a request that waits for one of them is not compared
/// with the blocks of the prefill workers, which takes longer for a longer prompt. Other problems are reported later.
pub(super) fn check_decode_is_free(
    router: &Router,
    context: &SelectionContext<'_>,
) -> Result<(), Refusal> {
    let has_threshold = router.pool.admission.has_threshold(Role::Decode);
    if !has_threshold || context.admit == Admit::Anyone {
        return Ok(());
    }
    let decoders = decoders(context, &context.overrides.constraints);
    match decoders.and_then(|(eligible, pinned)| narrowed(router, context, eligible, pinned)) {
        Err(overloaded @ Refusal::Overloaded { .. }) => Err(overloaded),
        _ => Ok(()),
    }
}

/// The workers of one role left by the filters that do not depend on the prompt.
pub(super) fn narrowed(
    router: &Router,
    context: &SelectionContext<'_>,
    eligible: Eligible,
    pinned: Pinned,
) -> Result<Narrowed, Refusal> {
    let members = context.model_workers.of_role(pinned.role);
    let eligible = allowed(context, pinned.role, eligible)?;
    if let Some(id) = pinned.pin.worker {
        let ranks = pinned.ranks(id, members, &eligible, router.workers.fleet())?;
        let free = not_busy(router, context, ranks, pinned.role)?;
        return Ok(Narrowed { eligible, free });
    }
    let eligible = narrow_further(router, context, eligible, pinned)?;
    let free = not_busy(router, context, eligible.clone(), pinned.role)?;
    Ok(Narrowed { eligible, free })
}

/// Keeps workers that are not busier than the role's threshold.
fn not_busy(
    router: &Router,
    context: &SelectionContext<'_>,
    eligible: Eligible,
    role: Role,
) -> Result<Eligible, Refusal> {
    let admission = &router.pool.admission;
    if !admission.has_threshold(role) || context.admit == Admit::Anyone {
        return Ok(eligible);
    }
    let members = context.model_workers.of_role(role);
    let snapshots = router.ledger.snapshots(None);
    let is_free = |member: &RankSlot| {
        !admission.is_busy(role, &snapshots.of(member.slot, 1.0), member.capacity)
    };
    keep(eligible, Filter::Overload, members, is_free).map_err(|_| Refusal::Overloaded { role })
}

/// Whether any constraint applies to a pair.
pub(super) fn is_restricted(context: &SelectionContext<'_>) -> bool {
    context.model_workers.has_topology || !context.overrides.constraints.required_taints.is_empty()
}

/// The constraints on the decode worker from the transfer from `prefill`, and from the request itself.
pub(super) fn constraints(
    context: &SelectionContext<'_>,
    prefill: &Worker,
) -> Result<Constraints, Refusal> {
    if !context.model_workers.has_topology {
        return Ok(context.overrides.constraints.clone());
    }
    let here = context.model_workers.workers.iter().map(|worker| &**worker);
    match topology::constraints(prefill, here) {
        Ok(derived) => Ok(context.overrides.constraints.clone().merged(derived)),
        Err(error) => Err(Refusal::Topology {
            problem: error.to_string(),
        }),
    }
}

/// Keeps workers that the gateway and the caller allow: a worker named by the caller must be among them too.
pub(super) fn allowed(
    context: &SelectionContext<'_>,
    role: Role,
    eligible: Eligible,
) -> Result<Eligible, Refusal> {
    let members = context.model_workers.of_role(role);
    let refused = |filter| Refusal::NoneEligible { role, filter };
    let mut left = eligible;
    if let Some(subset) = &context.demand.subset {
        let holds = |member: &RankSlot| subset.holds(member.target.worker.address);
        left = keep(left, Filter::Subset, members, holds).map_err(refused)?;
    }
    if let Some(ids) = &context.overrides.allowed {
        let holds = |member: &RankSlot| ids.contains(&member.target.worker.id);
        left = keep(left, Filter::Allowed, members, holds).map_err(refused)?;
    }
    Ok(left)
}

/// Keeps the entries on the requested rank.
pub(super) fn on_rank(
    members: &[RankSlot],
    role: Role,
    pin: Pin,
    eligible: Eligible,
) -> Result<Eligible, Refusal> {
    let Some(rank) = pin.rank else {
        return Ok(eligible);
    };
    let has_it = |member: &RankSlot| member.target.rank.unwrap_or(0) == rank;
    keep(eligible, Filter::Rank, members, has_it)
        .map_err(|_| Refusal::RankOutOfRange { role, rank })
}

/// Whether a prefill worker may hand over to the picked decode worker, or without one to any of this model key; the error
/// gives the reason.
pub(super) fn hands_over(
    prefill: &Arc<Worker>,
    context: &SelectionContext<'_>,
    decode: Option<&Arc<Worker>>,
) -> Result<(), String> {
    let ModelWorkers { workers, .. } = &*context.model_workers;
    let derived = topology::constraints(prefill, workers.iter().map(|worker| &**worker))
        .map_err(|error| error.to_string())?;
    let demanded = context.overrides.constraints.clone().merged(derived);
    let is_allowed = |worker: &Worker| {
        let subset = context.demand.subset.as_ref();
        subset.is_none_or(|subset| subset.holds(worker.address))
            && context.overrides.allows(worker.id)
    };
    let found = match decode {
        Some(decode) => demanded.admit(decode),
        None => workers.iter().any(|worker| {
            worker.role == Role::Decode && demanded.admit(worker) && is_allowed(worker)
        }),
    };
    let name = &prefill.name;
    let refused = || format!("no decode worker is where worker {name} may transfer to");
    found.then_some(()).ok_or_else(refused)
}

pub(super) fn most_preferred(
    members: &[RankSlot],
    eligible: Eligible,
    wanted: &Constraints,
) -> Eligible {
    let preference = |index: usize| {
        let member = members.get(index);
        member.map_or(f64::NEG_INFINITY, |m| wanted.preference(&m.target.worker))
    };
    let all = eligible.indexes().map(preference);
    let most = all.fold(f64::NEG_INFINITY, f64::max);
    eligible.prefer(|index| preference(index) >= most)
}
