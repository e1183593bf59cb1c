//! Owns how long one answer may take, and how long it has taken.

use std::cell::Cell;
use std::time::Duration;

use routing::route::Patience;

use crate::stream::Response;

/// How long an answer may take, and how long it has taken. Chunks only leave a mark: the time is asked for at ticks.
#[derive(Default)]
pub struct Clock {
    patience: Cell<Patience>,
    /// When the leg was dispatched.
    started: Cell<Duration>,
    /// When something of the answer came last.
    since: Cell<Duration>,
    stirred: Cell<bool>,
}

impl Clock {
    /// A leg is dispatched.
    pub fn start(&self, patience: Patience, now: Duration) {
        self.patience.set(patience);
        self.started.set(now);
        self.since.set(now);
    }

    /// Whether there is any limit.
    pub fn runs(&self) -> bool {
        let patience = self.patience.get();
        patience.first.is_some() || patience.silence.is_some() || patience.total.is_some()
    }

    /// Whether something came after all that came by another one.
    pub fn moved_after(&self, other: &Self) -> bool {
        let has_moved = self.stirred.get() || self.since.get() > self.started.get();
        has_moved && (self.stirred.get() || self.since.get() > other.since.get())
    }

    /// A piece of the answer has come.
    pub fn stir(&self) {
        self.stirred.set(true);
    }

    /// Whether the answer has kept its reader waiting for longer than it may. To be asked at each tick.
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
            // What has come so far says nothing.
            Response::Awaited | Response::Held => passed(first, &self.started),
            Response::Flowing => passed(silence, &self.since) || passed(total, &self.started),
            Response::Complete | Response::EndHeld => false,
        }
    }
}
