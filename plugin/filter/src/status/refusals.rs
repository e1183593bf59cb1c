//! Owns the requests that were refused lately, those of all threads: each adds its own to a list that they share.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::Duration;

use routing::excerpt::excerpt;
use routing::route::Refusal;
use serde::{Deserialize, Serialize};

use super::milliseconds;
use crate::host::{self, Written};

/// Refusals that are remembered.
const MOST: usize = 20;
/// So many bytes of a message, in which a client's words may stand, are kept.
const LONGEST_MESSAGE: usize = 300;
/// Attempts at adding to the list while other threads do too. What finds no place the next round tries again.
const TRIES: usize = 3;
const KEY: &str = "pd_router.refusals";

/// Those of this VM that the others have not been told of.
#[derive(Default)]
pub struct Refusals(RefCell<VecDeque<Refused>>);

/// A request that was refused.
#[derive(Clone, Serialize, Deserialize)]
pub struct Refused {
    /// In milliseconds since 1970.
    at_ms: u64,
    pool: String,
    /// The client's, as far as it is told, and our own.
    request_id: String,
    status: u32,
    code: String,
    message: String,
}

impl Refusals {
    /// One more.
    pub fn add(&self, now: Duration, pool: &str, ids: &str, refusal: &Refusal) {
        let mut all = self.0.borrow_mut();
        all.truncate(MOST.saturating_sub(1));
        all.push_front(Refused {
            at_ms: milliseconds(now),
            pool: pool.to_owned(),
            request_id: ids.to_owned(),
            status: refusal.status(),
            code: refusal.code().to_owned(),
            message: excerpt(refusal, LONGEST_MESSAGE),
        });
    }

    /// Those of all threads, the latest first.
    pub fn of_all(&self) -> Vec<Refused> {
        self.with_those_of(&host::shared(KEY).unwrap_or_default().0)
    }

    /// Tells the other threads of those that are new here. To be called at each round.
    pub fn publish(&self) {
        if self.0.borrow().is_empty() {
            return;
        }
        for _ in 0..TRIES {
            let (known, version) = host::shared(KEY).unzip();
            let all = self.with_those_of(&known.unwrap_or_default());
            let bytes = serde_json::to_vec(&all).unwrap_or_default();
            match host::set_shared(KEY, &bytes, version) {
                Ok(Written::Yes) => {
                    self.0.borrow_mut().clear();
                    return;
                }
                Ok(Written::Stale) => {}
                Err(error) => {
                    log::error!("refusals: {error}");
                    return;
                }
            }
        }
    }

    fn with_those_of(&self, others: &[u8]) -> Vec<Refused> {
        let others: Vec<Refused> = serde_json::from_slice(others).unwrap_or_default();
        let mut all: Vec<Refused> = self.0.borrow().iter().cloned().chain(others).collect();
        all.sort_by_key(|refused| std::cmp::Reverse(refused.at_ms));
        all.truncate(MOST);
        all
    }
}
