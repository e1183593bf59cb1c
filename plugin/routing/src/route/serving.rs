//! Owns the choice of a request's model key: one model in one namespace, drawn among those that would serve it.

use std::rc::Rc;

use super::{PinProblem, Refusal, Router, runs_whole};
use crate::fleet::{Role, Worker};
use crate::model_state::{ModelKey, ModelState};
use crate::rendezvous::{NotServed, ServingDecision};
use crate::request::{Request, RoutingOverrides};
use crate::selection::Random;
use crate::selection::eligibility::Subset;

/// The model key of a request, and its serving decision.
pub(super) struct ServingChoice {
    pub(super) key: ModelKey,
    pub(super) decision: ServingDecision,
    /// The model, or the base model of the requested adapter; none: the API names no model.
    pub(super) model: Option<String>,
    /// The requested adapter.
    pub(super) adapter: Option<Rc<str>>,
}

impl Router {
    /// The model key of a parsed request. Errors of the request itself matter unless it runs aggregated.
    pub(super) fn choose_serving(
        &mut self,
        request: &Request<'_>,
        overrides: &mut RoutingOverrides,
        subset: Option<&Subset>,
    ) -> Result<ServingChoice, Refusal> {
        let outcome = self.look_up(&request.model).and_then(|(model, adapter)| {
            self.drop_stale_pins(overrides)?;
            let (key, decision) = self.choose_model_key(model.as_deref(), overrides, subset)?;
            Ok(ServingChoice {
                key,
                decision,
                model,
                adapter,
            })
        });
        checked(request, outcome, |choice| choice.decision)
    }

    /// The same for a model that has been looked up already.
    pub(super) fn choose_serving_of_model(
        &mut self,
        request: &Request<'_>,
        model: Option<&str>,
        overrides: &RoutingOverrides,
        subset: Option<&Subset>,
    ) -> Result<(ModelKey, ServingDecision), Refusal> {
        let outcome = self.choose_model_key(model, overrides, subset);
        checked(request, outcome, |(_, decision)| *decision)
    }

    /// The model that a name stands for, and the adapter if the name is one's; none for an empty name.
    pub(super) fn look_up(&self, name: &str) -> Result<(Option<String>, Option<Rc<str>>), Refusal> {
        match name {
            "" => Ok((None, None)),
            name => {
                let (model, adapter) = self.model_of(name)?;
                Ok((Some(model), adapter))
            }
        }
    }

    /// The model key that a request goes to, and its serving decision there. Of several that would serve it, one is drawn,
    /// weighted by the number of their workers.
    pub(super) fn choose_model_key(
        &mut self,
        model: Option<&str>,
        overrides: &RoutingOverrides,
        subset: Option<&Subset>,
    ) -> Result<(ModelKey, ServingDecision), Refusal> {
        let mode = overrides.mode();
        let absent = self.absent_policy();
        let mut keys: Vec<(ModelKey, ModelState)> = self
            .model_states
            .of_model(model)
            .into_iter()
            .map(|(key, state)| (key.clone(), *state))
            .collect();
        // In the map's order, the draw would differ for the same seed.
        keys.sort_by(|a, b| a.0.cmp(&b.0));
        if !keys.iter().any(|(_, state)| state.is_inhabited()) {
            // A caller's pins are judged only if there are workers: a remembered model key without workers answers like an
            // unknown one.
            return Err(Refusal::NotServed(NotServed::Vacant));
        }
        self.keep_pinned(&mut keys, overrides)?;

        let decision = |state: &ModelState| state.decision(mode, absent);
        let mut served: Vec<&(ModelKey, ModelState)> = keys
            .iter()
            .filter(|(_, state)| !matches!(decision(state), ServingDecision::Refused(_)))
            .collect();
        if (subset.is_some() || overrides.allowed.is_some()) && served.len() > 1 {
            let is_allowed = |worker: &Worker| {
                subset.is_none_or(|subset| subset.holds(worker.address))
                    && overrides.allows(worker.id)
            };
            self.keep_allowed(&mut served, is_allowed, decision);
        }
        if let [only] = served.as_slice() {
            return Ok((only.0.clone(), decision(&only.1)));
        }
        let weights: Vec<u64> = served
            .iter()
            .map(|(key, _)| self.count_workers(key))
            .collect();
        if let Some(index) = weighted(&weights, &mut self.random)
            && let Some((key, state)) = served.get(index)
        {
            return Ok((key.clone(), decision(state)));
        }
        let reasons = keys.iter().filter_map(|(_, state)| match decision(state) {
            ServingDecision::Refused(reason) => Some(reason),
            ServingDecision::Pair | ServingDecision::Whole => None,
        });
        Err(Refusal::NotServed(
            reasons.min().unwrap_or(NotServed::Vacant),
        ))
    }

    /// A named worker must exist; then only its model keys are kept.
    fn keep_pinned(
        &self,
        keys: &mut Vec<(ModelKey, ModelState)>,
        overrides: &RoutingOverrides,
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
            let worker = self
                .fleet
                .get(id)
                .ok_or_else(|| problem(PinProblem::Unknown))?;
            keys.retain(|(key, _)| key.holds(worker));
            if keys.is_empty() {
                return Err(problem(PinProblem::Elsewhere));
            }
        }
        Ok(())
    }

    /// Keeps the model keys where a worker of every needed role may be picked, if there are any.
    fn keep_allowed(
        &self,
        keys: &mut Vec<&(ModelKey, ModelState)>,
        may_be_picked: impl Fn(&Worker) -> bool,
        decision: impl Fn(&ModelState) -> ServingDecision,
    ) {
        let has = |key: &ModelKey, is_wanted: &dyn Fn(&Worker) -> bool| {
            let here = self.fleet.open().filter(|worker| key.holds(worker));
            let mut allowed = here.filter(|worker| may_be_picked(worker));
            allowed.any(|worker| is_wanted(worker))
        };
        let is_allowed = |key: &ModelKey, state: &ModelState| match decision(state) {
            ServingDecision::Pair => {
                has(key, &|worker| worker.role == Role::Prefill)
                    && has(key, &|worker| worker.role == Role::Decode)
            }
            ServingDecision::Whole => has(key, &|worker| runs_whole(&self.pool, worker)),
            ServingDecision::Refused(_) => false,
        };
        if keys.iter().any(|(key, state)| is_allowed(key, state)) {
            keys.retain(|(key, state)| is_allowed(key, state));
        }
    }

    fn count_workers(&self, key: &ModelKey) -> u64 {
        self.fleet.open().filter(|worker| key.holds(worker)).count() as u64
    }
}

/// An aggregated worker parses a request itself, and accepts more than this router understands; otherwise the request's own
/// errors come first.
fn checked<T>(
    request: &Request<'_>,
    outcome: Result<T, Refusal>,
    decision: impl Fn(&T) -> ServingDecision,
) -> Result<T, Refusal> {
    match &outcome {
        Ok(choice) if decision(choice) == ServingDecision::Whole => {}
        _ => request.check()?,
    }
    outcome
}

/// An index drawn by weight; none if all weights are 0.
fn weighted(weights: &[u64], random: &mut Random) -> Option<usize> {
    let total: u64 = weights.iter().sum();
    if total == 0 {
        return None;
    }
    let mut drawn = random.u64(0..total);
    weights.iter().position(|weight| match drawn < *weight {
        true => true,
        false => {
            drawn -= *weight;
            false
        }
    })
}
