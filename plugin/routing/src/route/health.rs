//! Owns what workers have shown of themselves lately, as their answers tell it: who is passed over, and who is ejected.
//!
//! What is held against a worker is a preference only: where it is held against all, nobody is passed over. A worker that
//! keeps failing while another one of its kind works is ejected for a time that grows, and let back in by one request, its
//! trial. What the whole cluster does wrong ejects nobody, since nobody works then.

mod record;

use std::rc::Rc;
use std::time::Duration;

use hashbrown::HashMap;

use self::record::{Held, Record, Verdict, are_peers};
use super::Router;
use crate::config;
use crate::fleet::{Fleet, Worker, WorkerId};

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
    /// Notes what a worker has shown of itself, once for each call.
    pub(super) fn heard(&mut self, worker: WorkerId, outcome: Outcome) {
        if outcome == Outcome::Good && self.health.has_no_records() {
            return;
        }
        // Of one that has left nothing is noted.
        let Some(worker) = self.fleet.get(worker) else {
            return;
        };
        let now = self.ledger.now();
        match outcome {
            Outcome::Good => self.health.answered(worker, now),
            Outcome::Overloaded => self.health.record(worker).overloaded(now),
            Outcome::Unreachable => {
                self.health.record(worker).unreachable(now);
                self.health.failed(worker, &self.fleet, now);
                let worker = Rc::clone(worker);
                self.forget_cache(&worker);
                self.unbind(worker.id);
            }
            Outcome::Failed => {
                self.health.record(worker).broken(now);
                self.health.failed(worker, &self.fleet, now);
            }
        }
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
    ejections: Vec<Ejection>,
}

impl Health {
    pub(super) fn new(rules: config::Health) -> Self {
        Self {
            rules,
            records: HashMap::new(),
            ejections: Vec::new(),
        }
    }

    /// What was held against a worker is held against it no more.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.records.remove(&worker);
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

    /// One failed, and is ejected if that was once too often and somebody else is left.
    fn failed(&mut self, worker: &Rc<Worker>, fleet: &Fleet, now: Duration) {
        let Some(record) = self.records.get_mut(&worker.id) else {
            return;
        };
        if record.failed(&self.rules, now) == Verdict::Stays {
            return;
        }
        let mut peers = fleet.open().filter(|other| are_peers(other, worker));
        let is_another_left = peers.any(|peer| !self.is_ejected(peer.id));
        let Some(record) = self.records.get_mut(&worker.id) else {
            return;
        };
        if !is_another_left {
            record.let_in(&self.rules, now);
            return;
        }
        let lasts = record.eject(&self.rules, now);
        self.ejections.push(Ejection {
            worker: Rc::clone(worker),
            lasts,
        });
    }

    /// Forgets what has expired, and workers that left.
    pub(super) fn keep(&mut self, fleet: &Fleet, now: Duration) {
        self.records
            .retain(|worker, record| !record.is_blank(now) && fleet.contains(*worker));
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
