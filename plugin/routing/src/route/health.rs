//! Owns what workers have shown of themselves lately, as their answers tell it: who is passed over, and who is ejected.
//!
//! What is held against a worker is a preference only: where it is held against all, nobody is passed over. A worker that
//! keeps failing while another one of its kind works is ejected for a time that grows, and let back in by one request, its
//! trial. What the whole cluster does wrong ejects nobody, since nobody works then.

mod pairs;
mod record;

use std::rc::Rc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};

use self::pairs::Pairs;
use self::record::{Held, Record, Row, Verdict, are_peers};
use super::Router;
use super::trail::{SharedTrail, Suspect};
use crate::config;
use crate::fleet::{Fleet, Incarnation, Worker, WorkerId};
use crate::outcome::{self, Came, Leg};

/// What the end of a call says of the worker that was called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It answered. An error that is the client's own is an answer too.
    Good,
    /// It said that it has too much to do.
    Overloaded,
    /// It took no connection: what it had cached is thought to be lost.
    Unreachable,
    /// It gave an error of its own, or nothing in time, or broke off, or ended without a token.
    Failed,
    /// Its call could not be made, for no fault of its own that is known.
    PassedOver,
    /// The call says nothing of it: the request or the gateway was at fault.
    Nothing,
}

/// A worker has been ejected.
#[derive(Debug, Clone, PartialEq)]
pub struct Ejection {
    /// The worker.
    pub worker: Rc<Worker>,
    /// For how long, until its trial.
    pub lasts: Duration,
}

impl Router {
    /// Notes what a worker has shown of itself, once for each call. Of a life that has ended nothing is noted, whoever has its id
    /// now.
    pub(super) fn heard(&mut self, life: Incarnation, outcome: Outcome) {
        let is_word = !matches!(outcome, Outcome::Good | Outcome::Nothing);
        if !is_word && self.health.has_no_records() {
            return;
        }
        let Some(worker) = self.fleet.alive(&life) else {
            return;
        };
        let now = self.ledger.now();
        match outcome {
            Outcome::Good => self.health.answered(worker, now),
            Outcome::Nothing => self.health.said_nothing(worker.id),
            Outcome::PassedOver => self.health.record(worker).passed_over(now),
            Outcome::Overloaded => self.health.record(worker).overloaded(now),
            Outcome::Unreachable => {
                self.health.record(worker).unreachable(now);
                self.health.failed(worker, Row::Calls, &self.fleet, now);
                let worker = Rc::clone(worker);
                self.forget_cache(&worker);
                self.unbind(worker.id);
            }
            Outcome::Failed => {
                self.health.record(worker).broken(now);
                self.health.failed(worker, Row::Calls, &self.fleet, now);
            }
        }
    }

    /// What a worker is granted at least for its answer, as long as it may still have to compile what it runs.
    pub(super) fn grace(&self, worker: WorkerId) -> Duration {
        let ms = u64::from(self.health.rules.cold_timeout_ms);
        match self.health.warm.contains(&worker) {
            true => Duration::ZERO,
            false => Duration::from_millis(ms),
        }
    }

    /// Holds an outcome against a worker, for it, or against the pair. A suspicion waits in the request's trail.
    pub(super) fn hold(
        &mut self,
        held: outcome::Held,
        leg: Leg,
        worker: Incarnation,
        partner: Option<Incarnation>,
        came: Came,
        trail: &SharedTrail,
    ) {
        if matches!(came, Came::Good | Came::TimedOut) && self.fleet.lives(&worker) {
            self.health.warm.insert(worker.id);
        }
        match held {
            outcome::Held::Nothing => self.heard(worker, Outcome::Nothing),
            outcome::Held::Credit => self.heard(worker, Outcome::Good),
            outcome::Held::PassedOver => self.heard(worker, Outcome::PassedOver),
            outcome::Held::Unreachable => self.heard(worker, Outcome::Unreachable),
            outcome::Held::BackPressure => {
                self.heard(worker, Outcome::Overloaded);
                // Behind a sidecar either of the two may be the one that is full.
                if let (Leg::Sidecar, Some(partner)) = (leg, partner) {
                    self.heard(partner, Outcome::Overloaded);
                }
            }
            outcome::Held::Worker => trail.borrow_mut().suspect(leg, worker, None, came),
            outcome::Held::Pair => trail.borrow_mut().suspect(leg, worker, partner, came),
        }
    }

    /// A leg of a request has succeeded: what others failed of it is theirs.
    pub(super) fn leg_succeeded(&mut self, trail: &SharedTrail, leg: Leg) {
        let suspects = trail.borrow_mut().succeeded(leg);
        let now = self.ledger.now();
        for suspect in suspects {
            if let (None, Some(worker)) = (suspect.partner, self.fleet.alive(&suspect.worker)) {
                self.health
                    .failed_what_was_served(worker, Row::Calls, &self.fleet, now);
            } else {
                self.charge(suspect);
            }
        }
    }

    /// A request has ended, and nobody has served what some failed.
    pub(super) fn settle_trail(&mut self, trail: &SharedTrail) {
        let suspects = trail.borrow_mut().settle();
        for suspect in suspects {
            self.charge(suspect);
        }
    }

    /// A failure is the worker's or, where it may be either's, the pair's: one of them is cleared when it works with another.
    fn charge(&mut self, suspect: Suspect) {
        let Some(partner) = suspect.partner else {
            self.heard(suspect.worker, Outcome::Failed);
            return;
        };
        let pair = (
            self.fleet.alive(&partner),
            self.fleet.alive(&suspect.worker),
        );
        let (Some(prefill), Some(decode)) = pair else {
            // Either may have failed because the other one, or itself, was about to end.
            return;
        };
        let now = self.ledger.now();
        self.health.record(prefill).broken(now);
        self.health.record(decode).suspected(now);
        self.health.pairs.suspect(prefill.id, decode.id, now);
    }

    /// A prefill and a decode worker have done a hand-off together: whichever of them was suspected beside somebody else is
    /// cleared, and the other one is not.
    pub(super) fn pair_worked(&mut self, prefill: &Worker, decode: &Worker) {
        if self.health.has_no_records() && self.health.pairs.is_empty() {
            return;
        }
        let lives = |worker: &Worker| self.fleet.lives(&worker.incarnation());
        if !lives(prefill) || !lives(decode) {
            return;
        }
        let now = self.ledger.now();
        for (id, row) in self.health.pairs.worked(prefill.id, decode.id, now) {
            let Some(worker) = self.fleet.get(id) else {
                continue;
            };
            self.health
                .failed_what_was_served(worker, row, &self.fleet, now);
        }
        self.health.handed_off(prefill, now);
    }

    /// Whether a worker is passed over because it has too much to do.
    pub(super) fn is_in_back_off(&self, worker: WorkerId) -> bool {
        self.health.held(worker, self.ledger.now()).is_overloaded()
    }

    /// The ejections since this was last asked, each told once.
    pub fn take_ejections(&mut self) -> Vec<Ejection> {
        std::mem::take(&mut self.health.ejections)
    }

    /// How many workers are ejected, those included whose trial is due or under way.
    pub fn ejected(&self) -> usize {
        let records = self.health.records.values();
        records.filter(|record| record.is_ejected()).count()
    }

    /// Whether a worker is ejected, also while its trial is due or under way.
    pub fn is_ejected(&self, worker: WorkerId) -> bool {
        self.health.is_ejected(worker)
    }
}

/// The records of those workers against whom there is anything.
#[derive(Debug)]
pub(super) struct Health {
    rules: config::Health,
    records: HashMap<WorkerId, Record>,
    /// Failures that either of two workers may have caused.
    pairs: Pairs,
    /// Workers that have answered something, or passed a deadline.
    warm: HashSet<WorkerId>,
    ejections: Vec<Ejection>,
}

impl Health {
    pub(super) fn new(rules: config::Health) -> Self {
        Self {
            rules,
            records: HashMap::new(),
            pairs: Pairs::default(),
            warm: HashSet::new(),
            ejections: Vec::new(),
        }
    }

    /// From now on these rules hold.
    pub(super) fn follow(&mut self, rules: config::Health) {
        self.rules = rules;
    }

    /// Whether nobody is passed over, so that nobody need be looked up.
    pub(super) fn is_clear(&self, now: Duration) -> bool {
        let mut records = self.records.values();
        records.all(|record| record.held(now) == Held::default())
    }

    fn has_no_records(&self) -> bool {
        self.records.is_empty()
    }

    /// What is held against a worker now.
    pub(super) fn held(&self, worker: WorkerId, now: Duration) -> Held {
        let record = self.records.get(&worker);
        record.map(|record| record.held(now)).unwrap_or_default()
    }

    fn is_ejected(&self, worker: WorkerId) -> bool {
        self.records.get(&worker).is_some_and(Record::is_ejected)
    }

    /// It was picked, by nobody's name: if it is ejected, this is its trial.
    pub(super) fn picked(&mut self, worker: WorkerId, now: Duration) {
        if self.has_no_records() {
            return;
        }
        if let Some(record) = self.records.get_mut(&worker) {
            record.picked(now);
        }
    }

    fn record(&mut self, worker: &Rc<Worker>) -> &mut Record {
        let record = self.records.entry(worker.id);
        record.or_insert_with(|| Record::new(worker))
    }

    /// One worked: its own run of failures is over, and those of its peers are theirs alone.
    fn answered(&mut self, worker: &Worker, now: Duration) {
        if let Some(record) = self.records.get_mut(&worker.id) {
            record.answered(&self.rules, now);
            if record.is_ejected() {
                // A late answer. Nobody can go there, so that nobody should be ejected for it.
                return;
            }
        }
        self.records.retain(|_, record| {
            record.peer_answered(worker);
            !record.is_blank(now)
        });
    }

    /// The call says nothing of a worker: where it was its trial, another request may try.
    fn said_nothing(&mut self, worker: WorkerId) {
        if let Some(record) = self.records.get_mut(&worker) {
            record.trial_says_nothing();
        }
    }

    /// What a prefill worker has computed was fetched: its run of failed hand-offs is over, and so is an ejection for these.
    fn handed_off(&mut self, worker: &Worker, now: Duration) {
        if let Some(record) = self.records.get_mut(&worker.id) {
            record.handed_off(&self.rules, now);
        }
        self.answered(worker, now);
    }

    /// One failed what another one has served.
    fn failed_what_was_served(
        &mut self,
        worker: &Rc<Worker>,
        row: Row,
        fleet: &Fleet,
        now: Duration,
    ) {
        let record = self.record(worker);
        record.broken(now);
        record.peer_served();
        self.failed(worker, row, fleet, now);
    }

    /// One failed, and is ejected if that was once too often, somebody else is left, and not half of its kind are out already.
    fn failed(&mut self, worker: &Rc<Worker>, row: Row, fleet: &Fleet, now: Duration) {
        let Some(record) = self.records.get_mut(&worker.id) else {
            return;
        };
        if record.failed(row, &self.rules, now) == Verdict::Stays {
            return;
        }
        let peers = fleet.open().filter(|other| are_peers(other, worker));
        let (out, left): (Vec<_>, Vec<_>) = peers.partition(|peer| self.is_ejected(peer.id));
        let all = out.len().saturating_add(left.len()).saturating_add(1);
        let is_allowed = !left.is_empty() && out.len() < all.div_ceil(2);
        let Some(record) = self.records.get_mut(&worker.id) else {
            return;
        };
        if !is_allowed {
            record.let_in(&self.rules, now);
            return;
        }
        let lasts = record.eject(row, &self.rules, now);
        self.ejections.push(Ejection {
            worker: Rc::clone(worker),
            lasts,
        });
    }

    /// Forgets what has expired, and workers that left.
    pub(super) fn keep(&mut self, fleet: &Fleet, now: Duration) {
        self.records
            .retain(|worker, record| !record.is_blank(now) && fleet.contains(*worker));
        self.warm.retain(|worker| fleet.contains(*worker));
        self.pairs.keep(fleet);
    }

    /// Forgets what has expired.
    pub(super) fn expire(&mut self, now: Duration) {
        if !self.has_no_records() {
            self.records.retain(|_, record| !record.is_blank(now));
        }
    }
}

#[cfg(test)]
mod tests;
