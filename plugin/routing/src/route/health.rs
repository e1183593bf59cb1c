//! Owns what workers have shown of themselves lately: marks that expire by themselves.
//!
//! A worker that refused a connection, or did not answer, is passed over for a few seconds, if there is another one; what
//! it had cached is thought to be lost. One that said it is overloaded is passed over for one.

use std::time::Duration;

use hashbrown::HashMap;

use crate::fleet::{Fleet, WorkerId};

/// Dynamo's reconcile interval: by then a discovery source would have said that the worker is gone.
const UNREACHABLE_FOR: Duration = Duration::from_secs(5);

/// Long enough for a queue to move, short enough to be wrong about.
const OVERLOADED_FOR: Duration = Duration::from_secs(1);

/// What a worker is passed over for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mark {
    /// It took no connection, or gave no answer.
    Unreachable,
    /// It said that it has too much to do.
    Overloaded,
}

/// The marks, each with the time when it expires.
#[derive(Debug, Default)]
pub(super) struct Health {
    until: HashMap<(WorkerId, Mark), Duration>,
}

impl Health {
    /// Whether nothing is marked, so that nobody need be looked up.
    pub(super) fn is_clear(&self) -> bool {
        self.until.is_empty()
    }

    pub(super) fn mark(&mut self, worker: WorkerId, mark: Mark, now: Duration) {
        let lasts = match mark {
            Mark::Unreachable => UNREACHABLE_FOR,
            Mark::Overloaded => OVERLOADED_FOR,
        };
        self.until.insert((worker, mark), now.saturating_add(lasts));
    }

    pub(super) fn has(&self, worker: WorkerId, mark: Mark, now: Duration) -> bool {
        self.until
            .get(&(worker, mark))
            .is_some_and(|until| *until > now)
    }

    /// It answered: nothing is held against it.
    pub(super) fn clear(&mut self, worker: WorkerId) {
        if !self.is_clear() {
            self.until.retain(|(marked, _), _| *marked != worker);
        }
    }

    /// Forgets what has expired, and workers that left.
    pub(super) fn keep(&mut self, fleet: &Fleet, now: Duration) {
        self.until
            .retain(|(worker, _), until| *until > now && fleet.contains(*worker));
    }

    /// Forgets what has expired.
    pub(super) fn expire(&mut self, now: Duration) {
        if !self.is_clear() {
            self.until.retain(|_, until| *until > now);
        }
    }
}
