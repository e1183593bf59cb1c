//! Owns requests that are forwarded at once: to one worker that runs them aggregated, or to a pair whose prefill leg the
//! backend calls.

use std::sync::Arc;
use std::time::Duration;

use super::choice::{Pair, Step, Whole, choose_decode, choose_pair, pick_whole, take};
use super::prefill::reading;
use super::recovery::{Recovery, RetryBudget, Way};
use super::retry::RetrySnapshot;
use super::selection_request::{Demand, SelectionContext, context};
use super::{Assignment, Dispatch, Fallback, Plan, Refusal, Router};
use crate::fleet::{Role, Target, TargetKey};
use crate::handoff::HeaderValue;
use crate::model_state::{ModelKey, ModelState};
use crate::rendezvous::{Mode, OnPrefillAbsent, ServingDecision};
use crate::request::{Generation, Request, RoutingOverrides};
use crate::selection::eligibility::Subset;

/// Forwards a request by load alone: to a worker that runs it aggregated, else to a pair that needs no hand-off in the
/// body. The refusal is `otherwise`, unless a worker has a nearer reason.
pub(super) fn forward_by_load(
    router: &mut Router,
    mut otherwise: Refusal,
    subset: Option<&Subset>,
) -> Result<Plan, Refusal> {
    let nothing = RoutingOverrides::default();
    let absent = router.pool.prefill_absent();
    let states = router.workers.states().of_model(None).into_iter();
    let keys: Vec<(ModelKey, ModelState)> =
        states.map(|(key, state)| (key.clone(), *state)).collect();
    let demand = Demand {
        subset: subset.cloned().map(Arc::new),
        ..Demand::nothing(router.pool.selection.kv)
    };
    // A pool with the policy "fail" runs no request aggregated.
    let may_run_whole = absent == OnPrefillAbsent::Aggregate;
    for (key, _) in keys.iter().filter(|_| may_run_whole) {
        let context = context(router, key, &nothing, &demand);
        match pick_whole(router, &context) {
            Ok(whole) => return Ok(forward_whole(router, whole, &context, None, None)),
            Err(why @ (Refusal::Overloaded { .. } | Refusal::NoneEligible { .. })) => {
                otherwise = why;
            }
            Err(_) => {}
        }
    }
    if router.pool.rules().reaches_workers {
        return Err(otherwise);
    }
    let is_pairs =
        |state: &ModelState| state.decision(Mode::Normal, absent) == ServingDecision::Pair;
    let served = keys.iter().find(|(_, state)| is_pairs(state));
    let (key, _) = served.ok_or(otherwise)?;
    let context = context(router, key, &nothing, &demand);
    let pair = choose_pair(router, &context, Step::Commit)?;
    Ok(forward_pair(router, pair, &context, None))
}

/// Forwards a request whose prompt a trusted caller has had prefilled already: to a decode worker, unchanged.
pub(super) fn forward_decode(
    router: &mut Router,
    context: &SelectionContext<'_>,
    request: &Request<'_>,
) -> Result<Plan, Refusal> {
    let constraints = &context.overrides.constraints;
    let (decode, others) = choose_decode(router, context, constraints)?;
    take(router, Role::Decode, context, &decode);
    let pool = &router.pool;
    let snapshot = Arc::new(RetrySnapshot::of(context, request));
    let dispatch = Dispatch {
        patience: snapshot.patience(router, decode.target.worker.id, Duration::ZERO),
        ..Dispatch::to(&decode.target, &others, pool)
    };
    let assignment = Assignment {
        trail: Some(snapshot.trail.clone()),
        decode_charge: Some(decode.charge_decode(context.demand, pool, &mut router.ledger)),
        // A hand-off can be used only once.
        recovery: Some(Recovery::new(snapshot, Way::Whole, RetryBudget::default())),
        decode: Some(decode.target.worker),
        ..Assignment::default()
    };
    Ok(Plan::Forward(dispatch, assignment))
}

/// Forwards a request to a pair whose prefill leg the backend calls.
pub(super) fn forward_pair(
    router: &mut Router,
    pair: Pair,
    context: &SelectionContext<'_>,
    request: Option<&Request<'_>>,
) -> Plan {
    let (prefill, decode) = (&pair.prefill.target, &pair.decode.target);
    let headers = router.pool.engine().pair_headers(prefill, decode);
    let dispatch = dispatch(router, decode, &pair.others, headers, request);
    let reads = pair.prefill.key();
    let assignment = pair.assign(context.demand, &router.pool, &mut router.ledger);
    let forwarded = (dispatch, assignment);
    forward(router, forwarded, context, request, Way::Pair, reads)
}

/// Forwards a request to a worker that runs it aggregated.
pub(super) fn forward_whole(
    router: &mut Router,
    whole: Whole,
    context: &SelectionContext<'_>,
    fallback: Option<Fallback>,
    request: Option<&Request<'_>>,
) -> Plan {
    let worker = &whole.decode.target;
    let headers = router.pool.engine().worker_headers(worker);
    let dispatch = dispatch(router, worker, &whole.others, headers, request);
    let reads = whole.decode.key();
    let assignment = Assignment {
        fallback,
        ..whole.assign(context.demand, &router.pool, &mut router.ledger)
    };
    let forwarded = (dispatch, assignment);
    forward(router, forwarded, context, request, Way::Whole, reads)
}

/// A leg with these headers that a worker answers: to the worker itself, or to a frontend. It carries no untrusted caller's
/// routing overrides.
fn dispatch(
    router: &mut Router,
    worker: &Target,
    others: &[Target],
    headers: Vec<HeaderValue>,
    request: Option<&Request<'_>>,
) -> Dispatch {
    let Router { pool, chooser, .. } = router;
    let mut dispatch = match pool.rules().reaches_workers {
        true => Dispatch::to(worker, others, pool),
        false => Dispatch::to_frontends(pool, chooser),
    };
    dispatch.headers.extend(headers);
    if !pool.trust_clients {
        dispatch.edits = request.and_then(|request| pool.engine().without_overrides(request));
    }
    dispatch
}

/// Forwards a leg whose prompt the rank `reads` is yet to read, out of the filter's sight.
fn forward(
    router: &Router,
    (mut dispatch, mut assignment): (Dispatch, Assignment),
    context: &SelectionContext<'_>,
    request: Option<&Request<'_>>,
    way: Way,
    reads: TargetKey,
) -> Plan {
    // A request on an unknown path has no deadline, and must not be run twice.
    if let Some(request) = request.filter(|known| known.generation != Generation::Other) {
        let snapshot = Arc::new(RetrySnapshot::of(context, request));
        let decode = assignment.decode.as_ref();
        let answers = decode.map_or(reads.worker, |worker| worker.id);
        dispatch.patience = snapshot.patience(router, answers, reading(router, reads));
        let budget = RetryBudget::of(&router.pool.decode);
        assignment.trail = Some(snapshot.trail.clone());
        assignment.recovery = Some(Recovery::new(snapshot, way, budget));
    }
    Plan::Forward(dispatch, assignment)
}
