//! Owns the requests that wait for a worker: when one joins, whose turn it is, and when it has waited too long.

use std::time::Duration;

use super::{Plan, Refusal, Router};
use crate::admission::{Claim, Full, Waiter};
use crate::prefill_router::Place;

/// Whether a request has just come, or has waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Turn {
    /// It has just come.
    #[default]
    New,
    /// It waits, and it is its turn to be tried.
    Called(Waiter),
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

    /// It waits, or waits on.
    pub(super) fn wait(
        &mut self,
        place: &Place,
        claim: Claim,
        turn: Turn,
        overloaded: Refusal,
    ) -> Result<Plan, Refusal> {
        let Some(queue) = &self.pool.admission.queue else {
            return Err(overloaded);
        };
        if let Turn::Called(waiter) = turn {
            return Ok(Plan::Wait(waiter));
        }
        match self.waiting.join(place, claim, queue) {
            Ok(waiter) => Ok(Plan::Wait(waiter)),
            Err(Full { waiting, allowed }) => Err(Refusal::QueueFull { waiting, allowed }),
        }
    }

    /// What was decided of one that had waited.
    pub(super) fn decided(&mut self, turn: Turn) {
        if let Turn::Called(waiter) = turn {
            self.waiting.serve(waiter);
        }
    }
}
