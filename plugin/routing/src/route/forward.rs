//! Owns requests that are forwarded at once: to one worker that runs them aggregated, or to a pair whose prefill leg the
//! backend calls.

use std::rc::Rc;

use super::choice::{Pair, Whole};
use super::recovery::{Recovery, RetryBudget, Way};
use super::retry::RetrySnapshot;
use super::selection_request::{Demand, SelectionContext};
use super::{Assignment, Dispatch, Fallback, Plan, Refusal, Router};
use crate::fleet::TargetKey;
use crate::json::Edits;
use crate::model_state::{ModelKey, ModelState};
use crate::rendezvous::OnPrefillAbsent;
use crate::rendezvous::{Mode, ServingDecision};
use crate::request::{Generation, Request, RoutingOverrides};
use crate::selection::eligibility::Subset;

impl Router {
    /// Forwards a request by load alone: to a worker that runs it aggregated, else to a pair that needs no hand-off in the
    /// body. The refusal is `otherwise`, unless a worker has a nearer reason.
    pub(super) fn plan_by_load(
        &mut self,
        mut otherwise: Refusal,
        subset: Option<&Subset>,
    ) -> Result<Plan, Refusal> {
        let nothing = RoutingOverrides::default();
        let absent = self.absent_policy();
        let keys: Vec<(ModelKey, ModelState)> = self
            .model_states
            .of_model(None)
            .into_iter()
            .map(|(key, state)| (key.clone(), *state))
            .collect();
        let demand = Demand {
            subset: subset.cloned().map(Rc::new),
            ..Demand::nothing(self.pool.selection.kv)
        };
        // A pool with the policy "fail" runs no request aggregated.
        let may_run_whole = absent == OnPrefillAbsent::Aggregate;
        for (key, _) in keys.iter().filter(|_| may_run_whole) {
            let context = self.context(key, &nothing, &demand);
            match self.pick_whole(&context) {
                Ok(whole) => return Ok(self.forward_whole(whole, &context, None, None)),
                Err(why @ (Refusal::Overloaded { .. } | Refusal::NoneEligible { .. })) => {
                    otherwise = why;
                }
                Err(_) => {}
            }
        }
        if self.pool.rules().reaches_workers {
            return Err(otherwise);
        }
        let served = keys
            .iter()
            .find(|(_, state)| state.decision(Mode::Normal, absent) == ServingDecision::Pair);
        let (key, _) = served.ok_or(otherwise)?;
        let context = self.context(key, &nothing, &demand);
        let pair = self.pick_pair(&context)?;
        Ok(self.forward_pair(pair, &context, None))
    }

    pub(super) fn forward_pair(
        &mut self,
        pair: Pair,
        context: &SelectionContext<'_>,
        request: Option<&Request<'_>>,
    ) -> Plan {
        let (prefill, decode) = (&pair.prefill.target, &pair.decode.target);
        let headers = self.pool.engine().pair_headers(prefill, decode);
        let mut dispatch = self.dispatch_through(decode, &pair.others, headers);
        dispatch.edits = self.unheard(request);
        let prefill_key = pair.prefill.key();
        let assignment = self.assign_pair(pair, context.demand);
        self.forward(
            dispatch,
            assignment,
            context,
            request,
            Way::Pair,
            prefill_key,
        )
    }

    pub(super) fn forward_whole(
        &mut self,
        whole: Whole,
        context: &SelectionContext<'_>,
        fallback: Option<Fallback>,
        request: Option<&Request<'_>>,
    ) -> Plan {
        let worker = &whole.decode.target;
        let headers = self.pool.engine().worker_headers(worker);
        let mut dispatch = self.dispatch_through(worker, &whole.others, headers);
        dispatch.edits = self.unheard(request);
        let key = whole.decode.key();
        let assignment = Assignment {
            fallback,
            ..self.assign_whole(whole, context.demand)
        };
        self.forward(dispatch, assignment, context, request, Way::Whole, key)
    }

    /// Forwards a leg whose prompt the worker with this `key` is yet to read, out of the filter's sight.
    fn forward(
        &self,
        mut dispatch: Dispatch,
        mut assignment: Assignment,
        context: &SelectionContext<'_>,
        request: Option<&Request<'_>>,
        way: Way,
        key: TargetKey,
    ) -> Plan {
        // A request on an unknown path has no deadline, and must not be run twice.
        if let Some(request) = request.filter(|known| known.generation != Generation::Other) {
            let snapshot = Rc::new(RetrySnapshot::of(context, request));
            let answers = assignment
                .decode
                .as_ref()
                .map_or(key.worker, |worker| worker.id);
            dispatch.patience = snapshot.patience(self, answers, self.reading(key));
            let budget = RetryBudget::of(&self.pool.decode);
            assignment.trail = Some(Rc::clone(&snapshot.trail));
            assignment.recovery = Some(Recovery::new(snapshot, way, budget));
        }
        Plan::Forward(dispatch, assignment)
    }

    /// Edits that hide an untrusted caller's routing overrides from the backend.
    fn unheard(&self, request: Option<&Request<'_>>) -> Option<Edits> {
        match self.pool.trust_clients {
            true => None,
            false => self.pool.engine().without_overrides(request?),
        }
    }
}
