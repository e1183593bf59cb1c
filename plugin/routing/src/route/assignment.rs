//! Owns the assignment: what a client's stream occupies while it lasts.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::Router;
use super::after_prefill::CleanUpLeg;
use super::health::Outcome;
use super::recovery::Recovery;
use super::tally::Facts;
use super::trail::SharedTrail;
use crate::fleet::{Role, TargetKey, Worker, WorkerId};
use crate::handoff::{LegOrder, ProtocolRules, Staged};
use crate::load::{DecodeCharge, PrefillCharge};
use crate::outcome::{Came, Leg, Meaning, judge};

/// The workers and charges of a client's stream while it lasts. Dropping it frees everything.
#[derive(Debug, Default)]
pub struct Assignment {
    /// The prefill worker, if there is one.
    pub prefill: Option<Rc<Worker>>,
    /// The worker that answers; none for a plain request.
    pub decode: Option<Rc<Worker>>,
    /// Why the request is not disaggregated although the pool is configured for it.
    pub fallback: Option<Fallback>,
    /// What the request is counted under.
    pub facts: Facts,
    /// Only where no prefill call of this router's exists to which the charge could belong, as in direct mode.
    pub(super) prefill_charge: Option<PrefillCharge>,
    pub(super) decode_charge: Option<DecodeCharge>,
    /// The charge of a request that generates nothing.
    pub(super) errand_charge: Option<DecodeCharge>,
    /// How the request would be retried.
    pub(super) recovery: Option<Recovery>,
    /// The request's trail so far.
    pub(super) trail: Option<SharedTrail>,
}

/// Why a request runs aggregated on a decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// There is no prefill worker.
    PrefillAbsent,
    /// Prefill failed.
    PrefillFailed,
    /// A hand-off would cost more than it saves (conditional disaggregation).
    NotWorthIt,
    /// There is no worker, and the proxy's cluster picks a host by itself.
    FleetEmpty,
}

impl Fallback {
    /// All reasons.
    pub const ALL: [Self; 4] = [
        Self::PrefillAbsent,
        Self::PrefillFailed,
        Self::NotWorthIt,
        Self::FleetEmpty,
    ];

    /// The reason in one word, for metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::PrefillAbsent => "prefill_absent",
            Self::PrefillFailed => "prefill_failed",
            Self::NotWorthIt => "conditional",
            Self::FleetEmpty => "fleet_empty",
        }
    }
}

impl Assignment {
    /// Ends the prefill charge at the first token, seen at `now`, since 1970, and records a sample of the worker's prefill rate.
    pub fn first_token(&mut self, now: Duration) {
        if let Some(charge) = self.prefill_charge.take() {
            charge.finish(now);
        }
    }

    /// Renews the decode charge on a new piece of the answer; `tokens`: output tokens so far.
    pub fn generated(&mut self, tokens: u64) {
        if let Some(charge) = &self.decode_charge {
            charge.renew(tokens);
        }
    }

    /// Whether an answer without a token counts as no answer.
    pub fn expects_tokens(&self) -> bool {
        self.recovery.is_some()
    }

    /// Whether another worker may replace one that fails before the client has read anything.
    pub fn may_recover(&self) -> bool {
        self.recovery.as_ref().is_some_and(Recovery::is_allowed)
    }

    /// KV blocks staged for a decode leg that is known not to have begun.
    pub fn staged_blocks(&self) -> Option<u64> {
        let staged = self.recovery.as_ref()?.staged.as_ref()?;
        Some(staged.blocks)
    }

    /// The leg that the client waits for, under this protocol.
    pub fn leg(&self, rules: &ProtocolRules) -> Leg {
        match (rules.order, &self.prefill) {
            _ if !rules.reaches_workers => Leg::Frontend,
            (LegOrder::Backend, Some(_)) => Leg::Sidecar,
            (_, Some(_)) => Leg::Decode,
            (_, None) => Leg::Aggregated,
        }
    }

    /// Frees all charges: the stream ended.
    pub fn release(&mut self) {
        self.prefill_charge = None;
        self.decode_charge = None;
        self.errand_charge = None;
    }
}

impl Router {
    /// Moves the charge to the worker that actually answered, if the proxy went on to another one of the list.
    pub fn served_by(&mut self, assignment: &mut Assignment, address: SocketAddr) {
        let Some(charge) = assignment.decode_charge.take() else {
            return;
        };
        let served = self
            .fleet
            .at(address, &[Role::Decode, Role::Aggregated])
            .cloned();
        assignment.decode_charge = Some(match served {
            Some(worker) if worker.id != charge.target().worker => {
                if assignment.prefill.is_none() {
                    // The first worker was to read the prompt: the answer of another one says nothing about its speed.
                    assignment.prefill_charge = None;
                }
                let target = TargetKey {
                    worker: worker.id,
                    rank: charge.target().rank,
                };
                assignment.decode = Some(worker);
                charge.moved_to(target, &mut self.ledger)
            }
            _ => charge,
        });
    }

    /// Records how the leg that the client waits for has ended: before any of the answer was read or, if good, after.
    /// Updates the health of the workers concerned, and returns the meaning.
    pub fn leg_ended(&mut self, assignment: &mut Assignment, came: Came) -> Meaning {
        let leg = assignment.leg(self.pool.rules());
        let trail = assignment.trail.clone().unwrap_or_default();
        let meaning = judge(leg, came, trail.borrow().before(leg));
        if let Some(recovery) = &mut assignment.recovery
            && !came.proves_unbegun()
        {
            recovery.staged = None;
        }
        let Some(worker) = &assignment.decode else {
            return meaning;
        };
        let worker = worker.incarnation();
        let partner = assignment
            .prefill
            .as_ref()
            .map(|worker| worker.incarnation());
        self.hold(meaning.held, leg, worker, partner, came, &trail);
        trail.borrow_mut().ended(leg, worker.id, came);
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
            self.pair_worked(prefill, decode);
        }
    }

    /// The request has ended, in any way: its open suspicions are settled.
    pub fn request_ended(&mut self, assignment: &Assignment) {
        if let Some(trail) = &assignment.trail {
            self.settle_trail(trail);
        }
    }

    /// The leg that fetches a hand-off with which certainly no decode worker has begun; none if there is none, its lease is
    /// over, or no worker could fetch it. Prefers a worker other than those that have refused it.
    pub fn give_up_handoff(&mut self, assignment: &mut Assignment) -> Option<CleanUpLeg> {
        let now = self.ledger.now();
        let recovery = assignment.recovery.as_mut()?;
        let staged = recovery.staged.take();
        let staged = staged.filter(|staged| !staged.has_expired(now))?;
        let snapshot = recovery.snapshot();
        let prefill = assignment.prefill.clone()?;
        let [_, left_out] = self.excluded(&snapshot, Leg::Decode);
        let (decode, others) = [left_out.as_slice(), &[]].iter().find_map(|excluded| {
            let context = snapshot.context(self, excluded);
            self.replace_decode(&context, &prefill).ok()
        })?;
        let mut dispatch = self.dispatch_to(&decode.target, &others);
        dispatch.edits = Some(staged.cleanup);
        Some(CleanUpLeg {
            dispatch,
            blocks: staged.blocks,
        })
    }

    /// Records that the workers at these addresses took no connection.
    pub fn took_no_connection(&mut self, addresses: &[SocketAddr]) {
        for address in addresses {
            let worker = self.fleet.at(*address, &[Role::Decode, Role::Aggregated]);
            if let Some(life) = worker.map(|worker| worker.incarnation()) {
                self.record_outcome(life, Outcome::Unreachable);
            }
        }
    }

    /// The ids of the decode and aggregated workers at these addresses.
    pub fn decoders_at(&self, addresses: &[SocketAddr]) -> Vec<WorkerId> {
        let found = addresses
            .iter()
            .filter_map(|address| self.fleet.at(*address, &[Role::Decode, Role::Aggregated]));
        found.map(|worker| worker.id).collect()
    }

    /// Records the decode worker, if it has changed since the request was planned, and moves the charge there. The hand-off
    /// is kept as long as the leg is not known to have begun.
    pub fn assign_decode(
        &mut self,
        assignment: &mut Assignment,
        worker: &Rc<Worker>,
        target: TargetKey,
        staged: Staged,
    ) {
        if let Some(recovery) = &mut assignment.recovery {
            recovery.staged = Some(staged);
        }
        if let Some(charge) = assignment.decode_charge.take() {
            assignment.decode_charge = Some(charge.moved_to(target, &mut self.ledger));
            assignment.decode = Some(Rc::clone(worker));
        }
    }
}
