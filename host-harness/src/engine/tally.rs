//! Counts what an engine did; every generation request ends in exactly one of answered, refused, aborted.

use std::cell::{RefCell, RefMut};
use std::rc::Rc;

use serde::Serialize;

use super::refusal::Refusal;

/// Counts since the engine started; `running` and `waiting` are as of now.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counts {
    /// Generation requests whose headers arrived.
    pub requests: u64,
    /// Requests that compute or generate now.
    pub running: u64,
    /// Requests that wait for their turn, for blocks or for a pull now.
    pub waiting: u64,
    /// Requests answered to the end with 200.
    pub answered: u64,
    /// Requests whose client left first.
    pub aborted: u64,
    /// Decode: no hand-off came with the request.
    pub refused_missing_handoff: u64,
    /// Decode: malformed, unknown to the prefill engine, or not of this prompt.
    pub refused_wrong_handoff: u64,
    /// Decode: pulled before, or to be pulled for several sequences.
    pub refused_used_handoff: u64,
    /// Decode: the lease had ended.
    pub refused_expired_handoff: u64,
    /// Decode: the prefill engine could not be asked.
    pub refused_unreachable_handoff: u64,
    /// Prefill: not a prefill leg.
    pub refused_not_a_prefill_leg: u64,
    /// Any role: a bad body or an unknown model.
    pub refused_bad_request: u64,
    /// Prompt tokens computed here; a decode engine computes the last one of each prompt.
    pub prompt_tokens_computed: u64,
}

/// The counts of one engine.
#[derive(Default)]
pub struct Tally(RefCell<Counts>);

impl Tally {
    /// The counts as of now.
    pub fn counts(&self) -> Counts {
        self.0.borrow().clone()
    }

    /// Notes that a generation request has arrived.
    pub fn arrive(self: &Rc<Self>) -> InFlight {
        self.edit().requests += 1;
        InFlight {
            tally: Rc::clone(self),
            stage: Stage::Read,
        }
    }

    /// Notes that prompt tokens were computed.
    pub fn computed(&self, prompt_tokens: u64) {
        self.edit().prompt_tokens_computed += prompt_tokens;
    }

    fn edit(&self) -> RefMut<'_, Counts> {
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
    /// The request is valid and waits.
    pub fn wait(&mut self) {
        self.enter(Stage::Waiting);
    }

    /// The request computes or generates.
    pub fn run(&mut self) {
        self.enter(Stage::Running);
    }

    /// The request was answered in full.
    pub fn answered(mut self) {
        self.enter(Stage::Ended);
        self.tally.edit().answered += 1;
    }

    /// The request was refused.
    pub fn refused(mut self, refusal: &Refusal) {
        self.enter(Stage::Ended);
        let mut counts = self.tally.edit();
        let count = match refusal {
            Refusal::BadRequest(_) | Refusal::TooLarge(_) | Refusal::UnknownModel(_) => {
                &mut counts.refused_bad_request
            }
            Refusal::NotAPrefillLeg(_) => &mut counts.refused_not_a_prefill_leg,
            Refusal::MissingHandoff => &mut counts.refused_missing_handoff,
            Refusal::WrongHandoff(_) => &mut counts.refused_wrong_handoff,
            Refusal::UsedHandoff => &mut counts.refused_used_handoff,
            Refusal::ExpiredHandoff => &mut counts.refused_expired_handoff,
            Refusal::UnreachableHandoff(_) => &mut counts.refused_unreachable_handoff,
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
