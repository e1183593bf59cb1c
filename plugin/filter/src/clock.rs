//! Owns the deadlines of one answer: first token, silence and total.

use std::cell::Cell;
use std::time::Duration;

use routing::route::Patience;

use crate::stream::Response;

/// Deadlines of one answer, and the times they count from. A chunk only sets a mark: the clock is read in rounds.
#[derive(Default)]
pub struct AnswerClock {
    patience: Cell<Patience>,
    /// When the leg was dispatched.
    started: Cell<Duration>,
    /// When a piece of the answer last came, as noticed in a round.
    since: Cell<Duration>,
    stirred: Cell<bool>,
}

impl AnswerClock {
    /// Starts the deadlines of a dispatched leg.
    pub fn start(&self, patience: Patience, now: Duration) {
        self.patience.set(patience);
        self.started.set(now);
        self.since.set(now);
    }

    /// Whether there is any deadline.
    pub fn runs(&self) -> bool {
        let patience = self.patience.get();
        patience.first.is_some() || patience.silence.is_some() || patience.total.is_some()
    }

    /// Whether this answer has moved since the other one last did.
    pub fn moved_after(&self, other: &Self) -> bool {
        let has_moved = self.stirred.get() || self.since.get() > self.started.get();
        has_moved && (self.stirred.get() || self.since.get() > other.since.get())
    }

    /// Notes that a piece of the answer has come.
    pub fn mark_activity(&self) {
        self.stirred.set(true);
    }

    /// Whether the answer has passed a deadline. Called in each round.
    pub fn has_run_out(&self, response: Response, now: Duration) -> bool {
        if self.stirred.take() {
            self.since.set(now);
        }
        let Patience {
            first,
            silence,
            total,
            ..
        } = self.patience.get();
        let passed = |limit: Option<Duration>, from: &Cell<Duration>| {
            limit.is_some_and(|limit| now.saturating_sub(from.get()) >= limit)
        };
        match response {
            // Nothing received so far is content.
            Response::Awaited | Response::Held => passed(first, &self.started),
            Response::Flowing => passed(silence, &self.since) || passed(total, &self.started),
            Response::Complete | Response::EndHeld => false,
        }
    }
}
