//! Owns the recently refused requests of all threads, in a list that each thread adds to.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::Duration;

use routing::excerpt::excerpt;
use routing::route::Refusal;
use serde::{Deserialize, Serialize};

use crate::host::{self, WriteOutcome};

/// Refusals that the list keeps.
const MOST: usize = 20;
/// Bytes of a message that are kept; a message may quote a client.
const LONGEST_MESSAGE: usize = 300;
/// Attempts at adding to the list while other threads do too. The next round tries the rest again.
const TRIES: usize = 3;
const KEY: &str = "pd_router.refusals";

/// Refusals of this VM that are not published yet.
#[derive(Default)]
pub struct Refusals(RefCell<VecDeque<Refused>>);

/// A request that was refused.
#[derive(Clone, Serialize, Deserialize)]
pub struct Refused {
    /// Time, in milliseconds since 1970.
    at_ms: u64,
    pool: String,
    /// The client's id, as far as it is shown, and our own.
    request_id: String,
    status: u32,
    code: String,
    message: String,
}

impl Refusals {
    /// Adds a refusal.
    pub fn add(&self, now: Duration, pool: &str, ids: &str, refusal: &Refusal) {
        let mut all = self.0.borrow_mut();
        all.truncate(MOST.saturating_sub(1));
        all.push_front(Refused {
            at_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            pool: pool.to_owned(),
            request_id: ids.to_owned(),
            status: refusal.status(),
            code: refusal.code().to_owned(),
            message: excerpt(refusal, LONGEST_MESSAGE),
        });
    }

    /// Refusals of all threads, the latest first.
    pub fn of_all(&self) -> Vec<Refused> {
        self.with_those_of(&host::shared(KEY).unwrap_or_default().0)
    }

    /// Publishes new refusals to the other threads. Called in each round.
    pub fn publish(&self) {
        if self.0.borrow().is_empty() {
            return;
        }
        for _ in 0..TRIES {
            let (known, version) = host::shared(KEY).unzip();
            let all = self.with_those_of(&known.unwrap_or_default());
            let bytes = serde_json::to_vec(&all).unwrap_or_default();
            match host::set_shared(KEY, &bytes, version) {
                Ok(WriteOutcome::Yes) => {
                    self.0.borrow_mut().clear();
                    return;
                }
                Ok(WriteOutcome::Stale) => {}
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
