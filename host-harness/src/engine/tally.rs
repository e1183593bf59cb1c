//! Owns an engine's counters; every generation request ends in exactly one of answered, refused, failed, aborted.

use std::cell::{RefCell, RefMut};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::dialect::Leg;
use super::refusal::Refusal;

/// Counts since the engine started; `running` and `waiting` are current.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct EngineCounters {
    /// Generation requests whose headers arrived.
    pub requests: u64,
    /// Requests that compute or generate now.
    pub running: u64,
    /// Requests that wait now, for their turn, for blocks or for a pull.
    pub waiting: u64,
    /// Requests answered to the end with 200.
    pub answered: u64,
    /// Requests whose client left first, or that were aborted by request.
    pub aborted: u64,
    /// Requests ended, or kept KV dropped, through `POST /abort_request`.
    pub aborted_by_request: u64,
    /// Requests that failed because of a marker in their prompt.
    pub failed_as_marked: u64,
    /// Requests that failed because of an injected fault.
    pub failed_by_fault: u64,
    /// Decode: the prefill of the room or transfer, or that of the sidecar, failed, was aborted or lost.
    pub failed_partner: u64,
    /// Decode: no hand-off came with the request.
    pub refused_missing_handoff: u64,
    /// Malformed, unknown to the prefill engine, or not of this prompt.
    pub refused_wrong_handoff: u64,
    /// Decode: pulled before, or to be pulled for several sequences. Prefill: a transfer or request id already used.
    pub refused_used_handoff: u64,
    /// Decode: the lease had ended.
    pub refused_expired_handoff: u64,
    /// Decode: the prefill engine could not be reached.
    pub refused_unreachable_handoff: u64,
    /// Decode: the prefill engine had lost the hand-off through a fault.
    pub refused_lost_handoff: u64,
    /// SGLang: no bootstrap room.
    pub refused_missing_room: u64,
    /// SGLang: a bootstrap room that is no integer from 0 to 2^63 - 1, or one room for several sequences.
    pub refused_bad_room: u64,
    /// SGLang: a bootstrap address that is missing, or not the prefill engine's own.
    pub refused_wrong_bootstrap: u64,
    /// SGLang: a bootstrap room that an earlier request had.
    pub refused_used_room: u64,
    /// A data-parallel rank that is missing, contradicts the room, or does not exist.
    pub refused_rank_conflict: u64,
    /// SGLang, decode: the prefill of the room never came.
    pub refused_partner_timeout: u64,
    /// Prefill: not a prefill leg.
    pub refused_not_a_prefill_leg: u64,
    /// Any role: a bad body or an unknown model.
    pub refused_bad_request: u64,
    /// Prompt tokens computed here; a vLLM decode engine (mooncake too) computes the last one of each prompt.
    pub prompt_tokens_computed: u64,
    /// Prompt tokens found in the prefix cache.
    pub prompt_tokens_cached: u64,
    /// Decode: prompt tokens computed beyond those that the hand-off protocol leaves to decode.
    pub recomputed: u64,
    /// Valid requests by leg, according to their hand-off part.
    pub requests_by_leg: RequestsByLeg,
}

impl EngineCounters {
    /// Requests refused because of their hand-off.
    pub fn refused_handoffs(&self) -> u64 {
        self.refused_missing_handoff
            + self.refused_wrong_handoff
            + self.refused_used_handoff
            + self.refused_expired_handoff
            + self.refused_unreachable_handoff
            + self.refused_lost_handoff
            + self.refused_missing_room
            + self.refused_bad_room
            + self.refused_wrong_bootstrap
            + self.refused_used_room
            + self.refused_rank_conflict
            + self.refused_partner_timeout
    }
}

/// Requests by leg.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RequestsByLeg {
    /// Requests whose KV is to be handed off.
    pub prefill: u64,
    /// Requests with a hand-off.
    pub decode: u64,
    /// Requests with neither.
    pub whole: u64,
}

/// The counts of one engine.
#[derive(Default)]
pub struct Tally(RefCell<EngineCounters>);

impl Tally {
    /// The current counts.
    pub fn counts(&self) -> EngineCounters {
        self.0.borrow().clone()
    }

    /// Valid requests that wait or run.
    pub fn in_flight(&self) -> u64 {
        let counts = self.0.borrow();
        counts.waiting + counts.running
    }

    /// Counts an arriving generation request.
    pub fn arrive(self: &Rc<Self>) -> InFlight {
        self.edit().requests += 1;
        InFlight {
            tally: Rc::clone(self),
            stage: Stage::Read,
        }
    }

    /// Counts the leg of a valid request.
    pub fn leg(&self, leg: Leg) {
        let mut counts = self.edit();
        let legs = &mut counts.requests_by_leg;
        let count = match leg {
            Leg::Prefill => &mut legs.prefill,
            Leg::Decode => &mut legs.decode,
            Leg::Whole => &mut legs.whole,
        };
        *count += 1;
    }

    /// Counts requests aborted by request.
    pub fn aborted_by_request(&self, requests: usize) {
        self.edit().aborted_by_request += requests as u64;
    }

    /// Counts a prompt computed by a decode engine although its KV should have come.
    pub fn recomputed(&self, prompt_tokens: u64) {
        self.edit().recomputed += prompt_tokens;
    }

    /// Counts computed prompt tokens.
    pub fn computed(&self, prompt_tokens: u64) {
        self.edit().prompt_tokens_computed += prompt_tokens;
    }

    /// Counts prompt tokens found in the prefix cache.
    pub fn cached(&self, prompt_tokens: u64) {
        self.edit().prompt_tokens_cached += prompt_tokens;
    }

    fn edit(&self) -> RefMut<'_, EngineCounters> {
        self.0.borrow_mut()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Read,
    Waiting,
    Running,
    Ended,
}

/// A request in the engine; dropped before its end, it counts as aborted.
pub struct InFlight {
    tally: Rc<Tally>,
    stage: Stage,
}

impl InFlight {
    /// Marks the request as waiting.
    pub fn wait(&mut self) {
        self.enter(Stage::Waiting);
    }

    /// Marks the request as running.
    pub fn run(&mut self) {
        self.enter(Stage::Running);
    }

    /// Counts a complete answer.
    pub fn answered(mut self) {
        self.enter(Stage::Ended);
        self.tally.edit().answered += 1;
    }

    /// Counts a refusal.
    pub fn refused(mut self, refusal: &Refusal) {
        self.enter(Stage::Ended);
        let mut counts = self.tally.edit();
        let count = match refusal {
            Refusal::BadRequest(_)
            | Refusal::BadParameter { .. }
            | Refusal::Invalid { .. }
            | Refusal::TooLarge(_)
            | Refusal::UnknownModel(_) => &mut counts.refused_bad_request,
            Refusal::NotAPrefillLeg(_) => &mut counts.refused_not_a_prefill_leg,
            Refusal::MissingHandoff(_) => &mut counts.refused_missing_handoff,
            Refusal::WrongHandoff(_) | Refusal::BadDisaggId(_) => &mut counts.refused_wrong_handoff,
            Refusal::UsedHandoff | Refusal::UsedDisaggId(_) => &mut counts.refused_used_handoff,
            Refusal::ExpiredHandoff => &mut counts.refused_expired_handoff,
            Refusal::UnreachableHandoff(_) => &mut counts.refused_unreachable_handoff,
            Refusal::LostHandoff => &mut counts.refused_lost_handoff,
            Refusal::MissingRoom(_) => &mut counts.refused_missing_room,
            Refusal::BadRoom(_) => &mut counts.refused_bad_room,
            Refusal::WrongBootstrap(_) => &mut counts.refused_wrong_bootstrap,
            Refusal::UsedRoom(_) => &mut counts.refused_used_room,
            Refusal::RankConflict { .. } | Refusal::BadRank(_) => &mut counts.refused_rank_conflict,
            Refusal::PartnerFailed(_) | Refusal::PrefillGone | Refusal::PrefillSaid(..) => {
                &mut counts.failed_partner
            }
            Refusal::PartnerTimeout(_) => &mut counts.refused_partner_timeout,
            Refusal::Aborted => &mut counts.aborted,
            Refusal::AsMarked | Refusal::DiedAsMarked => &mut counts.failed_as_marked,
            Refusal::Ordered(_) | Refusal::ResetByFault | Refusal::EmptiedByFault => {
                &mut counts.failed_by_fault
            }
        };
        *count += 1;
    }

    fn enter(&mut self, stage: Stage) {
        let mut counts = self.tally.edit();
        match self.stage {
            Stage::Waiting => counts.waiting -= 1,
            Stage::Running => counts.running -= 1,
            Stage::Read | Stage::Ended => {}
        }
        match stage {
            Stage::Waiting => counts.waiting += 1,
            Stage::Running => counts.running += 1,
            Stage::Read | Stage::Ended => {}
        }
        self.stage = stage;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.stage == Stage::Ended {
            return;
        }
        self.enter(Stage::Ended);
        self.tally.edit().aborted += 1;
    }
}
