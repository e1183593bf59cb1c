//! Owns the requests that wait for a worker: when one joins, whose turn it is, and when it has waited too long.
//!
//! A body is read once, when its request comes: what was read is kept, and to try the request again costs the same however long
//! its body is.

use std::rc::Rc;
use std::time::Duration;

use super::ask::Demand;
use super::{Explain, Facts, Plan, Refusal, Router};
use crate::admission::{Full, QueueKey, Waiter};
use crate::prefill_router::ModelKey;
use crate::request::{BufferedRequest, ParsedRequest, Request, Steering};

/// A request that is to wait, without its body.
#[derive(Debug)]
pub struct QueueTicket {
    /// Its number.
    pub waiter: Waiter,
    parsed: ParsedRequest,
    terms: Terms,
}

/// A request that waits, with its body and all that was read of it.
#[derive(Debug)]
pub struct QueuedRequest {
    /// Its number.
    pub waiter: Waiter,
    request: BufferedRequest,
    terms: Terms,
}

/// What a choice for it goes by.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) steering: Steering,
    pub(super) asked: Demand,
    /// The model, or that which the adapter asked for is one of; none: the interface names none.
    pub(super) model: Option<String>,
    /// The fleets that had been adopted when the model was looked up.
    pub(super) adopted: u64,
}

impl QueueTicket {
    /// Together with its body; none where that is another one than was read.
    pub fn with_body(self, body: Vec<u8>) -> Option<QueuedRequest> {
        Some(QueuedRequest {
            waiter: self.waiter,
            request: self.parsed.with(body)?,
            terms: self.terms,
        })
    }
}

impl QueuedRequest {
    /// Its body, which is kept no longer.
    pub fn into_body(self) -> Vec<u8> {
        self.request.into_body()
    }
}

impl Router {
    /// Who is to be tried now, in order, after a booking has ended or the fleet has changed.
    pub fn called(&self) -> Vec<Waiter> {
        match &self.pool.admission.queue {
            Some(queue) if self.waiting.count() > 0 => self.waiting.in_order(queue.policy),
            _ => Vec::new(),
        }
    }

    /// Those who have waited too long, who wait no more, and what they are told.
    pub fn late(&mut self, now: Duration) -> Vec<(Waiter, Refusal)> {
        let Some(queue) = &self.pool.admission.queue else {
            return Vec::new();
        };
        let deadline_ms = queue.deadline_ms;
        let late = self.waiting.late(now, queue);
        for waiter in &late {
            self.waiting.leave(*waiter);
        }
        let told = |waiter| (waiter, Refusal::QueueDeadline { deadline_ms });
        late.into_iter().map(told).collect()
    }

    /// Its client has left.
    pub fn gives_up(&mut self, waiter: Waiter) {
        self.waiting.leave(waiter);
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.waiting.count()
    }

    /// It waits, if it may.
    pub(super) fn wait(
        &mut self,
        place: &ModelKey,
        claim: QueueKey,
        request: &Request<'_>,
        terms: Terms,
        overloaded: Refusal,
    ) -> Result<Plan, Refusal> {
        let Some(queue) = &self.pool.admission.queue else {
            return Err(overloaded);
        };
        match self.waiting.join(place, claim, queue) {
            Ok(waiter) => Ok(Plan::Wait(Box::new(QueueTicket {
                waiter,
                parsed: request.parsed(),
                terms,
            }))),
            Err(Full { waiting, allowed }) => Err(Refusal::QueueFull { waiting, allowed }),
        }
    }

    /// Tries a request that waits; none: it waits on.
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
        let subset = queued.terms.asked.subset.as_deref();
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
        let Terms {
            steering,
            asked,
            model,
            ..
        } = &*terms;
        let subset = asked.subset.as_deref();
        let (place, verdict) = self.placed_at(&request, model.as_deref(), steering, subset)?;
        let case = self.case(&place, steering, asked);
        let mut outcome = self.plan_at(&case, verdict, &request, now);
        if let Ok(Plan::Forward(_, seat) | Plan::Prefill(_, seat)) = &mut outcome {
            seat.facts = Facts::of(&place, asked);
        }
        outcome
    }

    /// Where the fleet is another one now, the model may be so, too, or be gone, and so may those whom the caller names.
    fn look_up_anew(&self, request: &Request<'_>, terms: &mut Terms) -> Result<(), Refusal> {
        if terms.adopted != self.adopted {
            (terms.model, terms.asked.adapter) = self.look_up(&request.model)?;
            self.drop_stale_pins(&mut terms.steering)?;
        }
        terms.adopted = self.adopted;
        Ok(())
    }
}

impl Facts {
    /// Of a request at its place. The model is the place's, not the client's: of those there are only so many.
    pub(super) fn of(place: &ModelKey, asked: &Demand) -> Self {
        Self {
            model: place.model.as_deref().map(Rc::from),
            prompt_tokens: asked.prompt_tokens,
        }
    }
}
