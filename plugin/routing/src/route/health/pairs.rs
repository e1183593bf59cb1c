//! Owns the failures of hand-offs that either of two workers may have caused: the one at fault shows when one of them works
//! with another worker.

use std::time::Duration;

use super::record::Row;
use crate::fleet::{Fleet, WorkerId};

/// By then both have been called again; older suspicions decide nothing.
const REMEMBERED_FOR: Duration = Duration::from_secs(60);

/// Suspicions kept: beyond that the oldest is dropped.
const MOST: usize = 256;

/// A hand-off that failed.
#[derive(Debug, Clone, Copy)]
struct Pair {
    prefill: WorkerId,
    decode: WorkerId,
    at: Duration,
}

/// The open suspicions, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    open: Vec<Pair>,
}

impl Pairs {
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Records that one of these two has failed a hand-off.
    pub(super) fn suspect(&mut self, prefill: WorkerId, decode: WorkerId, now: Duration) {
        if self.open.len() >= MOST {
            self.open.remove(0);
        }
        let at = now;
        self.open.push(Pair {
            prefill,
            decode,
            at,
        });
    }

    /// These two have completed a hand-off: a suspicion shared by one of them and another worker falls on the other worker.
    /// An earlier failure of this very pair was no lasting fault of either.
    pub(super) fn worked(
        &mut self,
        prefill: WorkerId,
        decode: WorkerId,
        now: Duration,
    ) -> Vec<(WorkerId, Row)> {
        let mut found = Vec::new();
        self.open.retain(|pair| {
            if now.saturating_sub(pair.at) > REMEMBERED_FOR {
                return false;
            }
            match (pair.prefill == prefill, pair.decode == decode) {
                (false, false) => true,
                (true, true) => false,
                (true, false) => {
                    found.push((pair.decode, Row::Calls));
                    false
                }
                (false, true) => {
                    found.push((pair.prefill, Row::Handoffs));
                    false
                }
            }
        });
        found
    }

    /// Forgets workers that are not in the fleet.
    pub(super) fn keep(&mut self, fleet: &Fleet) {
        self.open
            .retain(|pair| fleet.contains(pair.prefill) && fleet.contains(pair.decode));
    }
}
