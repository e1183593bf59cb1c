//! Owns worker health, as shown by recent answers: which workers are avoided, and which are ejected.
//!
//! A penalty is a preference only: if all workers have it, none is avoided. A worker that keeps failing while another one of
//! its kind works is ejected for a time that grows, and readmitted by one request, its trial. A failure of the whole cluster
//! ejects no worker, since none works then.

mod pairs;
mod record;

use std::sync::Arc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};

use self::pairs::Pairs;
use self::record::{ActivePenalties, FailureVerdict, Record, Row, are_peers};
use super::trail::{SharedTrail, Suspect};
use crate::config;
use crate::fleet::{Fleet, Incarnation, Worker, WorkerId};
use crate::outcome::{Blame, Came, Leg};

/// What the end of a call says about the worker that was called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The worker answered. An error caused by the client is an answer too.
    Good,
    /// The worker reported overload.
    Overloaded,
    /// The worker took no connection: its cache is assumed to be lost.
    Unreachable,
    /// The worker gave an error of its own, or nothing in time, or broke off, or ended without a token.
    Failed,
    /// The call could not be made, for no known fault of the worker.
    PassedOver,
    /// The call says nothing about the worker: the request or the gateway was at fault.
    Nothing,
}

/// An ejection of a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Ejection {
    /// The worker.
    pub worker: Arc<Worker>,
    /// Time until its trial.
    pub lasts: Duration,
}

/// A call whose outcome is recorded.
#[derive(Debug, Clone, Copy)]
pub(super) struct EndedCall {
    pub(super) leg: Leg,
    /// The called worker, by incarnation.
    pub(super) worker: Incarnation,
    /// The other worker of the pair.
    pub(super) partner: Option<Incarnation>,
    pub(super) came: Came,
}

/// What decides whether a record still counts: the workers that exist, and the time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Present<'f> {
    pub(super) fleet: &'f Fleet,
    pub(super) now: Duration,
}

/// The records of workers with any failure or penalty.
#[derive(Debug)]
pub(super) struct HealthRecords {
    rules: config::Health,
    records: HashMap<WorkerId, Record>,
    /// Failures that either of two workers may have caused.
    pairs: Pairs,
    /// Workers that have answered a call, or exceeded its deadline.
    warm: HashSet<WorkerId>,
    ejections: Vec<Ejection>,
}

impl HealthRecords {
    pub(super) fn new(rules: config::Health) -> Self {
        Self {
            rules,
            records: HashMap::new(),
            pairs: Pairs::default(),
            warm: HashSet::new(),
            ejections: Vec::new(),
        }
    }

    /// Records the outcome of a call, once for each call. The outcome of an incarnation that has ended is ignored, even if
    /// its id lives on.
    pub(super) fn record_outcome(&mut self, life: &Incarnation, outcome: Outcome, at: Present<'_>) {
        let is_word = !matches!(outcome, Outcome::Good | Outcome::Nothing);
        if !is_word && self.has_no_records() {
            return;
        }
        let Some(worker) = at.fleet.alive(life) else {
            return;
        };
        match outcome {
            Outcome::Good => self.answered(worker, at.now),
            Outcome::Nothing => self.said_nothing(worker.id),
            Outcome::PassedOver => self.record(worker).passed_over(at.now),
            Outcome::Overloaded => self.record(worker).overloaded(at.now),
            Outcome::Unreachable => {
                self.record(worker).unreachable(at.now);
                self.failed(worker, Row::Calls, at);
            }
            Outcome::Failed => {
                self.record(worker).broken(at.now);
                self.failed(worker, Row::Calls, at);
            }
        }
    }

    /// The least time granted for an answer while the worker may still have to compile what it runs.
    pub(super) fn grace(&self, worker: WorkerId) -> Duration {
        match self.warm.contains(&worker) {
            true => Duration::ZERO,
            false => Duration::from_millis(u64::from(self.rules.cold_timeout_ms)),
        }
    }

    /// Records an outcome against a worker, in its favour, or against the pair. A suspicion waits in the request's trail.
    pub(super) fn blame(
        &mut self,
        blame: Blame,
        call: &EndedCall,
        trail: &SharedTrail,
        at: Present<'_>,
    ) {
        let EndedCall {
            leg,
            worker,
            partner,
            came,
        } = *call;
        if matches!(came, Came::Good | Came::TimedOut) && at.fleet.lives(&worker) {
            self.warm.insert(worker.id);
        }
        let outcome = match blame {
            Blame::Nothing => Outcome::Nothing,
            Blame::Credit => Outcome::Good,
            Blame::PassedOver => Outcome::PassedOver,
            Blame::Unreachable => Outcome::Unreachable,
            Blame::BackPressure => Outcome::Overloaded,
            Blame::Worker => return trail.get().suspect(leg, worker, None, came),
            Blame::Pair => return trail.get().suspect(leg, worker, partner, came),
        };
        self.record_outcome(&worker, outcome, at);
        // Behind a sidecar, either of the two may be the full one.
        if let (Blame::BackPressure, Leg::Sidecar, Some(partner)) = (blame, leg, partner) {
            self.record_outcome(&partner, outcome, at);
        }
    }

    /// A leg of a request has succeeded: its earlier failures are charged to the workers that failed it.
    pub(super) fn leg_succeeded(&mut self, trail: &SharedTrail, leg: Leg, at: Present<'_>) {
        let suspects = trail.get().succeeded(leg);
        for suspect in suspects {
            if let (None, Some(worker)) = (suspect.partner, at.fleet.alive(&suspect.worker)) {
                self.failed_what_was_served(worker, Row::Calls, at);
            } else {
                self.charge(suspect, at);
            }
        }
    }

    /// A request has ended, and no worker has served what others failed: its suspicions are charged.
    pub(super) fn settle_trail(&mut self, trail: &SharedTrail, at: Present<'_>) {
        let suspects = trail.get().settle();
        for suspect in suspects {
            self.charge(suspect, at);
        }
    }

    /// Charges a failure to the worker or, if either of two may have caused it, to the pair: one of them is cleared when it
    /// works with another.
    fn charge(&mut self, suspect: Suspect, at: Present<'_>) {
        let Some(partner) = suspect.partner else {
            self.record_outcome(&suspect.worker, Outcome::Failed, at);
            return;
        };
        let pair = (at.fleet.alive(&partner), at.fleet.alive(&suspect.worker));
        let (Some(prefill), Some(decode)) = pair else {
            // Either may have failed because the other one, or itself, was about to end.
            return;
        };
        self.record(prefill).broken(at.now);
        self.record(decode).suspected(at.now);
        self.pairs.suspect(prefill.id, decode.id, at.now);
    }

    /// A prefill and a decode worker have completed a hand-off together: each is cleared of suspicions shared with another
    /// worker, and the other worker is not.
    pub(super) fn pair_worked(&mut self, prefill: &Worker, decode: &Worker, at: Present<'_>) {
        if self.has_no_records() && self.pairs.is_empty() {
            return;
        }
        let lives = |worker: &Worker| at.fleet.lives(&worker.incarnation());
        if !lives(prefill) || !lives(decode) {
            return;
        }
        for (id, row) in self.pairs.worked(prefill.id, decode.id, at.now) {
            if let Some(worker) = at.fleet.get(id) {
                self.failed_what_was_served(worker, row, at);
            }
        }
        self.handed_off(prefill, at.now);
    }

    pub(super) fn take_ejections(&mut self) -> Vec<Ejection> {
        std::mem::take(&mut self.ejections)
    }

    pub(super) fn ejected(&self) -> usize {
        let records = self.records.values();
        records.filter(|record| record.is_ejected()).count()
    }

    /// Replaces the rules.
    pub(super) fn follow(&mut self, rules: config::Health) {
        self.rules = rules;
    }

    /// Whether no worker has a penalty, so that no look-up is needed.
    pub(super) fn is_clear(&self, now: Duration) -> bool {
        let mut records = self.records.values();
        records.all(|record| record.held(now) == ActivePenalties::default())
    }

    fn has_no_records(&self) -> bool {
        self.records.is_empty()
    }

    /// The penalties of a worker now.
    pub(super) fn held(&self, worker: WorkerId, now: Duration) -> ActivePenalties {
        let record = self.records.get(&worker);
        record.map(|record| record.held(now)).unwrap_or_default()
    }

    pub(super) fn is_ejected(&self, worker: WorkerId) -> bool {
        self.records.get(&worker).is_some_and(Record::is_ejected)
    }

    /// A worker was picked, not named by the caller: if it is ejected, this is its trial.
    pub(super) fn picked(&mut self, worker: WorkerId, now: Duration) {
        if self.has_no_records() {
            return;
        }
        if let Some(record) = self.records.get_mut(&worker) {
            record.picked(now);
        }
    }

    fn record(&mut self, worker: &Arc<Worker>) -> &mut Record {
        let record = self.records.entry(worker.id);
        record.or_insert_with(|| Record::new(worker))
    }

    /// A worker has succeeded: its own run of failures is over, and the failures of its peers are theirs alone.
    fn answered(&mut self, worker: &Worker, now: Duration) {
        if let Some(record) = self.records.get_mut(&worker.id) {
            record.answered(&self.rules, now);
            if record.is_ejected() {
                // Late success of an ejected worker. It is no usable alternative, so it does not count as a healthy peer.
                return;
            }
        }
        self.records.retain(|_, record| {
            record.peer_answered(worker);
            !record.is_blank(now)
        });
    }

    /// The call says nothing about a worker: if it was the worker's trial, another request may try.
    fn said_nothing(&mut self, worker: WorkerId) {
        if let Some(record) = self.records.get_mut(&worker) {
            record.trial_says_nothing();
        }
    }

    /// The KV of a prefill worker was fetched: its run of failed hand-offs is over, and so is an ejection for these.
    fn handed_off(&mut self, worker: &Worker, now: Duration) {
        if let Some(record) = self.records.get_mut(&worker.id) {
            record.handed_off(&self.rules, now);
        }
        self.answered(worker, now);
    }

    /// A worker has failed a request that another one has served.
    fn failed_what_was_served(&mut self, worker: &Arc<Worker>, row: Row, at: Present<'_>) {
        let record = self.record(worker);
        record.broken(at.now);
        record.peer_served();
        self.failed(worker, row, at);
    }

    /// Counts a failure, and ejects the worker if the limit is reached, a peer is left, and less than half of its kind are
    /// ejected already.
    fn failed(&mut self, worker: &Arc<Worker>, row: Row, at: Present<'_>) {
        let Some(record) = self.records.get_mut(&worker.id) else {
            return;
        };
        if record.failed(row, &self.rules, at.now) == FailureVerdict::Stays {
            return;
        }
        let peers = at.fleet.open().filter(|other| are_peers(other, worker));
        let (out, left): (Vec<_>, Vec<_>) = peers.partition(|peer| self.is_ejected(peer.id));
        let all = out.len().saturating_add(left.len()).saturating_add(1);
        let is_allowed = !left.is_empty() && out.len() < all.div_ceil(2);
        let Some(record) = self.records.get_mut(&worker.id) else {
            return;
        };
        if !is_allowed {
            record.let_in(&self.rules, at.now);
            return;
        }
        let lasts = record.eject(row, &self.rules, at.now);
        self.ejections.push(Ejection {
            worker: Arc::clone(worker),
            lasts,
        });
    }

    /// Forgets expired records, and workers that left.
    pub(super) fn keep(&mut self, fleet: &Fleet, now: Duration) {
        self.records
            .retain(|worker, record| !record.is_blank(now) && fleet.contains(*worker));
        self.warm.retain(|worker| fleet.contains(*worker));
        self.pairs.keep(fleet);
    }

    /// Forgets expired records.
    pub(super) fn expire(&mut self, now: Duration) {
        if !self.has_no_records() {
            self.records.retain(|_, record| !record.is_blank(now));
        }
    }
}

#[cfg(test)]
mod tests;
