//! Owns the failures of hand-offs that either of two workers may have caused: which of them it was shows when one of them
//! works with somebody else.

use std::time::Duration;

use super::record::Row;
use crate::fleet::{Fleet, WorkerId};

/// By then either has been asked again; what is older decides nothing.
const REMEMBERED_FOR: Duration = Duration::from_secs(60);

/// Suspicions at most: the oldest gives way.
const MOST: usize = 256;

/// A hand-off that failed.
#[derive(Debug, Clone, Copy)]
struct Pair {
    prefill: WorkerId,
    decode: WorkerId,
    at: Duration,
}

/// The suspicions that are open, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    open: Vec<Pair>,
}

impl Pairs {
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// One of these two has failed a hand-off.
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

    /// These two have done a hand-off: where one of them was suspected beside another worker, that one it was. What a pair failed
    /// that works now was no lasting fault of either.
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

    /// Forgets workers that left, or are others now.
    pub(super) fn keep(&mut self, fleet: &Fleet) {
        self.open
            .retain(|pair| fleet.contains(pair.prefill) && fleet.contains(pair.decode));
    }
}
