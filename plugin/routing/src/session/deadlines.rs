//! Owns the deadlines of one answer: first token, silence and total.

use std::time::Duration;

use crate::route::Patience;

/// Deadlines of one answer, and the times they count from. A piece of the answer only sets a mark: the clock is read in
/// rounds.
#[derive(Debug, Default)]
pub struct Deadlines {
    patience: Patience,
    /// When the leg was dispatched.
    started: Duration,
    /// When a piece of the answer last came, as noticed in a round.
    since: Duration,
    /// Whether a piece has come since the last round.
    is_marked: bool,
}

impl Deadlines {
    /// The deadlines of a leg that is dispatched at `now`.
    pub fn start(patience: Patience, now: Duration) -> Self {
        Self {
            patience,
            started: now,
            since: now,
            is_marked: false,
        }
    }

    /// Whether there is any deadline.
    pub fn exist(&self) -> bool {
        let Patience {
            first,
            silence,
            total,
            ..
        } = self.patience;
        [first, silence, total].iter().any(Option::is_some)
    }

    /// Notes that a piece of the answer has come.
    pub fn mark_activity(&mut self) {
        self.is_marked = true;
    }

    /// Notes the time of a round.
    pub fn round(&mut self, now: Duration) {
        if std::mem::take(&mut self.is_marked) {
            self.since = now;
        }
    }

    /// Whether this answer has moved since the other one last did.
    pub fn moved_after(&self, other: &Self) -> bool {
        let has_moved = self.is_marked || self.since > self.started;
        has_moved && (self.is_marked || self.since > other.since)
    }

    /// Whether the first token is late.
    pub fn first_is_late(&self, now: Duration) -> bool {
        passed(self.patience.first, self.started, now)
    }

    /// Whether an answer that has begun is silent for too long, or late with its end.
    pub fn rest_is_late(&self, now: Duration) -> bool {
        passed(self.patience.silence, self.since, now)
            || passed(self.patience.total, self.started, now)
    }
}

fn passed(limit: Option<Duration>, from: Duration, now: Duration) -> bool {
    limit.is_some_and(|limit| now.saturating_sub(from) >= limit)
}
