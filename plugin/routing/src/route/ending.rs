//! Owns the ends: of a call, of the leg that a client waits for, and of a request; and the moves to another worker in
//! between.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::choice::replace_decode;
use super::health::{EndedCall, Outcome, Present};
use super::recovery::{self, Failed, excluded};
use super::trail::SharedTrail;
use super::workers::Workers;
use super::{Assignment, CleanUpLeg, Dispatch, Plan, Router};
use crate::fleet::{Incarnation, TargetKey, Worker, WorkerId};
use crate::handoff::Staged;
use crate::load::Ledger;
use crate::outcome::{Blame, Came, Leg, Meaning, judge};

impl Router {
    /// Moves the charge to the worker that actually answered, if the proxy went on to another one of the list.
    pub fn served_by(&mut self, assignment: &mut Assignment, address: SocketAddr) {
        let Some(charge) = &assignment.decode_charge else {
            return;
        };
        let planned = charge.target();
        let served = self.workers.decoder_at(address);
        let Some(worker) = served.filter(|worker| worker.id != planned.worker) else {
            return;
        };
        if assignment.prefill.is_none() {
            // The first worker was to read the prompt: the answer of another one says nothing about its speed.
            assignment.prefill_charge = None;
        }
        let target = TargetKey {
            worker: worker.id,
            ..planned
        };
        let worker = Arc::clone(worker);
        self.move_charge(assignment, &worker, target);
    }

    /// Records the decode worker, if it has changed since the request was planned, and moves the charge there. The hand-off
    /// is kept as long as the leg is not known to have begun.
    pub fn assign_decode(
        &mut self,
        assignment: &mut Assignment,
        worker: &Arc<Worker>,
        target: TargetKey,
        staged: Staged,
    ) {
        if let Some(recovery) = &mut assignment.recovery {
            recovery.staged = Some(staged);
        }
        self.move_charge(assignment, worker, target);
    }

    fn move_charge(&mut self, assignment: &mut Assignment, worker: &Arc<Worker>, to: TargetKey) {
        if let Some(charge) = assignment.decode_charge.take() {
            assignment.decode_charge = Some(charge.moved_to(to, &mut self.ledger));
            assignment.decode = Some(Arc::clone(worker));
        }
    }

    /// Records how the leg that the client waits for has ended. After the client has begun to read, no other leg follows.
    /// Updates the health of the workers concerned, and returns the meaning.
    pub fn leg_ended(&mut self, assignment: &mut Assignment, came: Came) -> Meaning {
        let leg = assignment.leg(self.pool.rules());
        let trail = assignment.trail.clone().unwrap_or_default();
        let meaning = judge(leg, came, trail.get().before(leg));
        if let Some(recovery) = &mut assignment.recovery
            && !came.proves_unbegun()
        {
            recovery.staged = None;
        }
        let Some(worker) = &assignment.decode else {
            return meaning;
        };
        let partner = assignment.prefill.as_ref();
        let call = EndedCall {
            leg,
            worker: worker.incarnation(),
            partner: partner.map(|worker| worker.incarnation()),
            came,
        };
        self.blame(meaning.blame, &call, &trail);
        trail.get().ended(leg, worker.id, came);
        if assignment.trail.is_none() {
            self.settle_trail(&trail);
        }
        meaning
    }

    /// The answer has begun, and its client reads it. Earlier failures were not the request's fault, and the two workers of
    /// a pair work with each other.
    pub fn answer_begins(&mut self, assignment: &mut Assignment) {
        assignment.recovery = None;
        let leg = assignment.leg(self.pool.rules());
        if let Some(trail) = &assignment.trail {
            self.leg_succeeded(trail, leg);
        }
        if let (Some(prefill), Some(decode)) = (&assignment.prefill, &assignment.decode)
            && leg != Leg::Frontend
        {
            let at = present(&self.workers, &self.ledger);
            self.health.pair_worked(prefill, decode, at);
        }
    }

    /// The request has ended, in any way: its open suspicions are settled.
    pub fn request_ended(&mut self, assignment: &Assignment) {
        if let Some(trail) = &assignment.trail {
            self.settle_trail(trail);
        }
    }

    /// Places a request again after its decode leg has failed. `assignment` is its own, `body` the client's own. None if
    /// nothing is left to try: the failure is then the client's answer, and a staged hand-off stays with the assignment.
    pub fn recover(
        &mut self,
        assignment: &mut Assignment,
        failed: &Failed<'_>,
        body: &[u8],
        now: Duration,
    ) -> Option<Plan> {
        self.advance(now);
        recovery::recover(self, assignment, failed, body)
    }

    /// The leg that fetches a hand-off with which certainly no decode worker has begun; none if there is none, its lease is
    /// over, or no worker could fetch it. Prefers a worker other than those that have refused it.
    pub fn give_up_handoff(&mut self, assignment: &mut Assignment) -> Option<CleanUpLeg> {
        let now = self.ledger.now();
        let recovery = assignment.recovery.as_mut()?;
        let staged = recovery.staged.take();
        let staged = staged.filter(|staged| !staged.has_expired(now))?;
        let snapshot = &recovery.snapshot;
        let prefill = assignment.prefill.as_ref()?;
        let [_, left_out] = excluded(self.workers.fleet(), snapshot, Leg::Decode);
        let (decode, others) = [left_out.as_slice(), &[]].iter().find_map(|excluded| {
            let context = snapshot.context(self, excluded);
            replace_decode(self, &context, prefill).ok()
        })?;
        let mut dispatch = Dispatch::to(&decode.target, &others, &self.pool);
        dispatch.edits = Some(staged.cleanup);
        Some(CleanUpLeg {
            dispatch,
            blocks: staged.blocks,
        })
    }

    /// Records that the workers at these addresses took no connection.
    pub fn took_no_connection(&mut self, addresses: &[SocketAddr]) {
        for address in addresses {
            let worker = self.workers.decoder_at(*address);
            if let Some(life) = worker.map(|worker| worker.incarnation()) {
                self.record_outcome(&life, Outcome::Unreachable);
            }
        }
    }

    /// The ids of the decode and aggregated workers at these addresses.
    pub fn decoders_at(&self, addresses: &[SocketAddr]) -> Vec<WorkerId> {
        let addresses = addresses.iter();
        let found = addresses.filter_map(|address| self.workers.decoder_at(*address));
        found.map(|worker| worker.id).collect()
    }

    /// Records the outcome of a call.
    pub(super) fn record_outcome(&mut self, life: &Incarnation, outcome: Outcome) {
        let at = present(&self.workers, &self.ledger);
        self.health.record_outcome(life, outcome, at);
        if outcome == Outcome::Unreachable {
            self.lose_cache(life);
        }
    }

    /// Records what a call means for its worker, or for the pair.
    pub(super) fn blame(&mut self, blame: Blame, call: &EndedCall, trail: &SharedTrail) {
        let at = present(&self.workers, &self.ledger);
        self.health.blame(blame, call, trail, at);
        if blame == Blame::Unreachable {
            self.lose_cache(&call.worker);
        }
    }

    /// A worker that took no connection has presumably lost its cache, and may have restarted.
    fn lose_cache(&mut self, life: &Incarnation) {
        if let Some(worker) = self.workers.fleet().alive(life) {
            self.prefixes.forget_cache(worker);
            self.workers.unbind(life.id, &self.pool);
        }
    }

    /// A leg of a request has succeeded.
    pub(super) fn leg_succeeded(&mut self, trail: &SharedTrail, leg: Leg) {
        let at = present(&self.workers, &self.ledger);
        self.health.leg_succeeded(trail, leg, at);
    }

    /// A request has ended, or its client has left.
    pub(super) fn settle_trail(&mut self, trail: &SharedTrail) {
        let at = present(&self.workers, &self.ledger);
        self.health.settle_trail(trail, at);
    }
}

fn present<'f>(workers: &'f Workers, ledger: &Ledger) -> Present<'f> {
    Present {
        fleet: workers.fleet(),
        now: ledger.now(),
    }
}
