//! Owns the queued requests: when one joins, whose turn it is, and when one has waited too long.
//!
//! A body is parsed once, when its request arrives: the result is kept, and another try costs the same however long the body is.

use std::rc::Rc;
use std::time::Duration;

use super::selection_request::Demand;
use super::{Explain, Facts, Plan, Refusal, Router};
use crate::admission::{Full, QueueKey, Waiter};
use crate::model_state::ModelKey;
use crate::request::{BufferedRequest, ParsedRequest, Request, RoutingOverrides};

/// A request that is to queue, without its body.
#[derive(Debug)]
pub struct QueueTicket {
    /// Its number in the queue.
    pub waiter: Waiter,
    parsed: ParsedRequest,
    terms: QueuedChoice,
}

/// A queued request, with its body and all that was parsed of it.
#[derive(Debug)]
pub struct QueuedRequest {
    /// Its number in the queue.
    pub waiter: Waiter,
    request: BufferedRequest,
    terms: QueuedChoice,
}

/// The inputs of a choice for a queued request.
#[derive(Debug)]
pub(super) struct QueuedChoice {
    pub(super) overrides: RoutingOverrides,
    pub(super) demand: Demand,
    /// The model, or the base model of the requested adapter; none: the API names no model.
    pub(super) model: Option<String>,
    /// Number of fleets adopted when the model was looked up.
    pub(super) adopted: u64,
}

impl QueueTicket {
    /// Adds the body; none if it differs from the one that was parsed.
    pub fn with_body(self, body: Vec<u8>) -> Option<QueuedRequest> {
        Some(QueuedRequest {
            waiter: self.waiter,
            request: self.parsed.with(body)?,
            terms: self.terms,
        })
    }
}

impl QueuedRequest {
    /// Takes the body out.
    pub fn into_body(self) -> Vec<u8> {
        self.request.into_body()
    }
}

impl Router {
    /// The requests to be tried now, in order, after a booking has ended or the fleet has changed.
    pub fn called(&self) -> Vec<Waiter> {
        match &self.pool.admission.queue {
            Some(queue) if self.waiting.count() > 0 => self.waiting.in_order(queue.policy),
            _ => Vec::new(),
        }
    }

    /// Removes the requests that have waited too long, and returns each with its refusal.
    pub fn late(&mut self, now: Duration) -> Vec<(Waiter, Refusal)> {
        let Some(queue) = &self.pool.admission.queue else {
            return Vec::new();
        };
        let deadline_ms = queue.deadline_ms;
        let late = self.waiting.late(now, queue);
        for waiter in &late {
            self.waiting.leave(*waiter);
        }
        let refused = |waiter| (waiter, Refusal::QueueDeadline { deadline_ms });
        late.into_iter().map(refused).collect()
    }

    /// Removes a request whose client has left.
    pub fn gives_up(&mut self, waiter: Waiter) {
        self.waiting.leave(waiter);
    }

    /// Number of queued requests.
    pub fn waiting(&self) -> usize {
        self.waiting.count()
    }

    /// Queues the request, if allowed.
    pub(super) fn wait(
        &mut self,
        key: &ModelKey,
        queue_key: QueueKey,
        request: &Request<'_>,
        terms: QueuedChoice,
        overloaded: Refusal,
    ) -> Result<Plan, Refusal> {
        let Some(queue) = &self.pool.admission.queue else {
            return Err(overloaded);
        };
        match self.waiting.join(key, queue_key, queue) {
            Ok(waiter) => Ok(Plan::Wait(Box::new(QueueTicket {
                waiter,
                parsed: request.parsed(),
                terms,
            }))),
            Err(Full { waiting, allowed }) => Err(Refusal::QueueFull { waiting, allowed }),
        }
    }

    /// Tries a queued request; none: the request stays queued.
    pub fn plan_queued(
        &mut self,
        queued: &mut QueuedRequest,
        now: Duration,
        explain: Explain,
    ) -> Option<Result<Plan, Refusal>> {
        self.advance(now);
        self.explain(explain);
        let outcome = self.plan_by_terms(queued, now);
        let has_queue = self.pool.admission.queue.is_some();
        if has_queue && matches!(outcome, Err(Refusal::Overloaded { .. })) {
            return None;
        }
        self.waiting.serve(queued.waiter);
        let subset = queued.terms.demand.subset.as_deref();
        Some(self.or_forward_anywhere(outcome, subset))
    }

    fn plan_by_terms(
        &mut self,
        queued: &mut QueuedRequest,
        now: Duration,
    ) -> Result<Plan, Refusal> {
        let QueuedRequest { request, terms, .. } = queued;
        let request = request.request();
        self.look_up_anew(&request, terms)?;
        let QueuedChoice {
            overrides,
            demand,
            model,
            ..
        } = &*terms;
        let subset = demand.subset.as_deref();
        let (key, decision) =
            self.choose_serving_of_model(&request, model.as_deref(), overrides, subset)?;
        let context = self.context(&key, overrides, demand);
        let mut outcome = self.plan_at(&context, decision, &request, now);
        if let Ok(Plan::Forward(_, assignment) | Plan::Prefill(_, assignment)) = &mut outcome {
            assignment.facts = Facts::of(&key, demand);
        }
        outcome
    }

    /// After a change of the fleet, the model may be another one or gone, and so may the workers that the caller names.
    fn look_up_anew(&self, request: &Request<'_>, terms: &mut QueuedChoice) -> Result<(), Refusal> {
        if terms.adopted != self.adopted {
            (terms.model, terms.demand.adapter) = self.look_up(&request.model)?;
            self.drop_stale_pins(&mut terms.overrides)?;
        }
        terms.adopted = self.adopted;
        Ok(())
    }
}

impl Facts {
    /// The facts of a request. The model is that of the model key, not the client's, so that its values are bounded.
    pub(super) fn of(key: &ModelKey, demand: &Demand) -> Self {
        Self {
            model: key.model.as_deref().map(Rc::from),
            prompt_tokens: demand.prompt_tokens,
        }
    }
}
