//! Owns what a client's stream occupies while it lasts.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::Router;
use super::health::Outcome;
use super::recovery::Recovery;
use super::tally::Facts;
use crate::fleet::{Role, TargetKey, Worker, WorkerId};
use crate::load::{DecodeCharge, PrefillCharge};

/// What a client's stream occupies while it lasts. Dropping it frees everything.
#[derive(Debug, Default)]
pub struct Seat {
    /// The prefill worker, where there is one.
    pub prefill: Option<Rc<Worker>>,
    /// The worker that answers; none for a plain request.
    pub decode: Option<Rc<Worker>>,
    /// Why the request is not disaggregated although the pool would have it so.
    pub fallback: Option<Fallback>,
    /// What it is counted under.
    pub facts: Facts,
    /// Direct mode only: there is no call of ours that the charge could belong to.
    pub(super) prefill_charge: Option<PrefillCharge>,
    pub(super) decode_charge: Option<DecodeCharge>,
    /// How the request would be placed anew.
    pub(super) recovery: Option<Recovery>,
}

/// Why a request runs whole on a decode worker.
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
    /// All of them.
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

impl Seat {
    /// The first token was seen at `now`, since 1970: prefill is over, and its worker is known to be as quick.
    pub fn first_token(&mut self, now: Duration) {
        if let Some(charge) = self.prefill_charge.take() {
            charge.finish(now);
        }
    }

    /// Something of the answer came; `tokens` of it in all.
    pub fn generated(&mut self, tokens: u64) {
        if let Some(charge) = &self.decode_charge {
            charge.renew(tokens);
        }
    }

    /// Whether an answer without a token is no answer.
    pub fn expects_tokens(&self) -> bool {
        self.recovery.is_some()
    }

    /// Whether another worker may take the place of one that fails before the client has read anything.
    pub fn may_recover(&self) -> bool {
        self.recovery.as_ref().is_some_and(Recovery::is_allowed)
    }

    /// How the request can be placed anew while its client has read nothing; told once.
    pub fn take_recovery(&mut self) -> Option<Recovery> {
        self.recovery.take()
    }

    /// The stream ended.
    pub fn release(&mut self) {
        self.prefill_charge = None;
        self.decode_charge = None;
    }
}

impl Router {
    /// Moves the charge to the worker that really answered, when the proxy went on to another one of the list.
    pub fn served_by(&mut self, seat: &mut Seat, address: SocketAddr) {
        let Some(charge) = seat.decode_charge.take() else {
            return;
        };
        let served = self
            .fleet
            .at(address, &[Role::Decode, Role::Aggregated])
            .cloned();
        seat.decode_charge = Some(match served {
            Some(worker) if worker.id != charge.target().worker => {
                if seat.prefill.is_none() {
                    // Its prompt was to be read there: what another one does tells nothing of its speed.
                    seat.prefill_charge = None;
                }
                let target = TargetKey {
                    worker: worker.id,
                    rank: charge.target().rank,
                };
                seat.decode = Some(worker);
                charge.moved_to(target, &mut self.ledger)
            }
            _ => charge,
        });
    }

    /// What the worker that is to answer has shown of itself.
    pub fn heard_of_decode(&mut self, seat: &Seat, outcome: Outcome) {
        if let Some(charge) = &seat.decode_charge {
            self.heard(charge.target().worker, outcome);
        }
    }

    /// Workers at these addresses took no connection.
    pub fn took_no_connection(&mut self, addresses: &[SocketAddr]) {
        for worker in self.decoders_at(addresses) {
            self.heard(worker, Outcome::Unreachable);
        }
    }

    /// The ids of the workers at these addresses that may answer.
    pub fn decoders_at(&self, addresses: &[SocketAddr]) -> Vec<WorkerId> {
        let found = addresses
            .iter()
            .filter_map(|address| self.fleet.at(*address, &[Role::Decode, Role::Aggregated]));
        found.map(|worker| worker.id).collect()
    }

    /// Writes down who decodes, where that has changed since the request was planned, and moves the charge there.
    pub fn seat_decode(&mut self, seat: &mut Seat, worker: &Rc<Worker>, target: TargetKey) {
        if let Some(charge) = seat.decode_charge.take() {
            seat.decode_charge = Some(charge.moved_to(target, &mut self.ledger));
            seat.decode = Some(Rc::clone(worker));
        }
    }
}
