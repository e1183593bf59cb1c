//! Owns what a client's stream occupies while it lasts.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::Router;
use super::health::Outcome;
use crate::fleet::{Role, TargetKey, Worker};
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
    /// Direct mode only: there is no call of ours that the charge could belong to.
    pub(super) prefill_charge: Option<PrefillCharge>,
    pub(super) decode_charge: Option<DecodeCharge>,
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
}

impl Fallback {
    /// The reason in one word, for metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::PrefillAbsent => "prefill_absent",
            Self::PrefillFailed => "prefill_failed",
            Self::NotWorthIt => "conditional",
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
                // It was passed over because it took no connection.
                self.heard(charge.target().worker, Outcome::Unreachable);
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

    /// The worker that was picked to answer took no connection, nor did whoever else was tried.
    pub fn unreachable(&mut self, seat: &Seat) {
        if let Some(charge) = &seat.decode_charge {
            self.heard(charge.target().worker, Outcome::Unreachable);
        }
    }

    /// Writes down who decodes, where that has changed since the request was planned, and moves the charge there.
    pub fn seat_decode(&mut self, seat: &mut Seat, worker: &Rc<Worker>, target: TargetKey) {
        if let Some(charge) = seat.decode_charge.take() {
            seat.decode_charge = Some(charge.moved_to(target, &mut self.ledger));
            seat.decode = Some(Rc::clone(worker));
        }
    }
}
