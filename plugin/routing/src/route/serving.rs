//! Owns the choice of a request's model key: one model in one namespace, drawn among those that would serve it.

use std::sync::Arc;

use super::model_workers::runs_whole;
use super::pinned::drop_stale;
use super::{PinProblem, Refusal, Router};
use crate::config::Pool;
use crate::fleet::{Fleet, Role, Worker};
use crate::model_state::{ModelKey, ModelState};
use crate::rendezvous::{NotServed, ServingDecision};
use crate::request::{Request, RoutingOverrides};
use crate::selection::eligibility::Subset;
use crate::selection::weighted;

/// The model that a name stands for, and the adapter if the name is one's; none for an empty name. Drops stale pins.
pub(super) fn look_up(
    router: &Router,
    name: &str,
    overrides: &mut RoutingOverrides,
) -> Result<(Option<String>, Option<Arc<str>>), Refusal> {
    let (workers, pool) = (&router.workers, &router.pool);
    let found = match name {
        "" => (None, None),
        name => {
            let (model, adapter) = workers.model_of(name, pool)?;
            (Some(model), adapter)
        }
    };
    drop_stale(overrides, workers.fleet(), pool, &router.chooser)?;
    Ok(found)
}

/// The model key of a parsed request, whose own errors come first: an aggregated worker alone parses a request itself, and
/// accepts more than this router understands.
pub(super) fn choose_serving(
    router: &mut Router,
    request: &Request<'_>,
    model: Option<&str>,
    overrides: &RoutingOverrides,
    subset: Option<&Subset>,
) -> Result<(ModelKey, ServingDecision), Refusal> {
    let outcome = choose_model_key(router, model, overrides, subset);
    if !matches!(outcome, Ok((_, ServingDecision::Whole))) {
        request.check()?;
    }
    outcome
}

/// The model key that a request goes to, and its serving decision there. Of several that would serve it, one is drawn,
/// weighted by the number of their workers.
pub(super) fn choose_model_key(
    router: &mut Router,
    model: Option<&str>,
    overrides: &RoutingOverrides,
    subset: Option<&Subset>,
) -> Result<(ModelKey, ServingDecision), Refusal> {
    let (fleet, pool) = (router.workers.fleet(), &router.pool);
    let mut keys = router.workers.states().of_model(model);
    // In the map's order, the draw would differ for the same seed.
    keys.sort_by(|a, b| a.0.cmp(b.0));
    if !keys.iter().any(|(_, state)| state.is_inhabited()) {
        // A caller's pins are judged only if there are workers: a remembered model key without workers answers like an
        // unknown one.
        return Err(Refusal::NotServed(NotServed::Vacant));
    }
    keep_pinned(&mut keys, overrides, fleet)?;

    let (mode, absent) = (overrides.mode(), pool.prefill_absent());
    let decision = |state: &ModelState| state.decision(mode, absent);
    let is_refused = |state: &ModelState| matches!(decision(state), ServingDecision::Refused(_));
    let mut served = keys.clone();
    served.retain(|(_, state)| !is_refused(state));
    if (subset.is_some() || overrides.allowed.is_some()) && served.len() > 1 {
        let is_allowed = |worker: &Worker| {
            subset.is_none_or(|subset| subset.holds(worker.address)) && overrides.allows(worker.id)
        };
        keep_allowed(&mut served, is_allowed, decision, fleet, pool);
    }
    if let [(key, state)] = served.as_slice() {
        return Ok(((*key).clone(), decision(state)));
    }
    let count = |key: &ModelKey| fleet.open().filter(|worker| key.holds(worker)).count() as u64;
    let weights: Vec<u64> = served.iter().map(|(key, _)| count(key)).collect();
    if let Some(index) = weighted(&weights, router.chooser.random())
        && let Some((key, state)) = served.get(index)
    {
        return Ok(((*key).clone(), decision(state)));
    }
    let reasons = keys.iter().filter_map(|(_, state)| match decision(state) {
        ServingDecision::Refused(reason) => Some(reason),
        ServingDecision::Pair | ServingDecision::Whole => None,
    });
    let nearest = reasons.min().unwrap_or(NotServed::Vacant);
    Err(Refusal::NotServed(nearest))
}

/// A named worker must exist; then only its model keys are kept.
fn keep_pinned(
    keys: &mut Vec<(&ModelKey, &ModelState)>,
    overrides: &RoutingOverrides,
    fleet: &Fleet,
) -> Result<(), Refusal> {
    for (field, id) in [
        ("prefill_worker_id", overrides.prefill.worker),
        ("decode_worker_id", overrides.decode.worker),
        ("backend_instance_id", overrides.backend),
    ] {
        let Some(id) = id else {
            continue;
        };
        let problem = |problem| Refusal::Pin { field, id, problem };
        let worker = fleet.get(id).ok_or_else(|| problem(PinProblem::Unknown))?;
        keys.retain(|(key, _)| key.holds(worker));
        if keys.is_empty() {
            return Err(problem(PinProblem::Elsewhere));
        }
    }
    Ok(())
}

/// Keeps the model keys where a worker of every needed role may be picked, if there are any.
fn keep_allowed(
    keys: &mut Vec<(&ModelKey, &ModelState)>,
    may_be_picked: impl Fn(&Worker) -> bool,
    decision: impl Fn(&ModelState) -> ServingDecision,
    fleet: &Fleet,
    pool: &Pool,
) {
    let has = |key: &ModelKey, is_wanted: &dyn Fn(&Worker) -> bool| {
        let here = fleet.open().filter(|worker| key.holds(worker));
        let mut allowed = here.filter(|worker| may_be_picked(worker));
        allowed.any(|worker| is_wanted(worker))
    };
    let is_allowed = |key: &ModelKey, state: &ModelState| match decision(state) {
        ServingDecision::Pair => {
            has(key, &|worker| worker.role == Role::Prefill)
                && has(key, &|worker| worker.role == Role::Decode)
        }
        ServingDecision::Whole => has(key, &|worker| runs_whole(pool, worker)),
        ServingDecision::Refused(_) => false,
    };
    if keys.iter().any(|(key, state)| is_allowed(key, state)) {
        keys.retain(|(key, state)| is_allowed(key, state));
    }
}
