//! Owns one request's life as a value: what has come, and what follows. No proxy, no cell, no clock of its own.

mod bodies;
mod complete;
mod deadlines;
mod effect;
mod failure;
mod prefilled;
mod recovery;
mod response;
mod step;
mod tried;

#[cfg(test)]
mod tests;

pub use bodies::{Bodies, CleanupRequest, ReplayBuffer};
pub use complete::CompleteAnswer;
pub use effect::{CallAnswer, Effect, Note, OnStream, StepContext, WorkerReply};
pub use failure::{Failure, LastAnswer, LegEnd};
use failure::{after_error, came_of_call};
pub use recovery::{AfterError, ErrorOrigin};
pub use response::{ConcurrentPrefill, Response, SuccessHead};
pub use step::{AnswerStep, ContentLength, Due, NewBody, Passed, Piece, StreamEnd, Takeover};
pub use tried::Tried;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::admission::Waiter;
use crate::budget::Share;
use crate::fleet::{Worker, WorkerId};
use crate::outcome::Came;
use crate::request::Generation;
use crate::route::fate::Handed;
use crate::route::{AbortLeg, Assignment, Dispatch, Router};

/// A header: name and value.
pub type Header = (Vec<u8>, Vec<u8>);

/// Stage of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The body is being buffered.
    Reading(Generation),
    /// The body is compressed, and is buffered only to be passed on as it is.
    ReadingEncoded,
    /// All eligible workers are too busy: the request waits for one of them.
    Waiting(Waiter),
    /// A prefill worker is being called, and the client waits for it.
    Prefilling,
    /// The proxy forwards the request.
    Forwarded,
    /// The decode leg has failed before the client read anything, and is replaced by calls.
    Recovering,
    /// The gateway has answered the request.
    Answered,
    /// The stream has ended.
    Ended,
}

/// A good answer to a call, held while the concurrent prefill is not known to be good.
#[derive(Debug)]
pub struct HeldReply {
    /// The answer.
    pub reply: WorkerReply<'static>,
    /// The share of the budget.
    pub share: Share,
}

/// One request's life.
#[derive(Debug)]
pub struct Session {
    /// Stage of the request.
    pub stage: Stage,
    /// The answer on its way to the client.
    pub response: Response,
    /// Workers and charges that the request occupies.
    pub assignment: Assignment,
    /// Destinations that the request was forwarded to.
    pub tried: Tried,
    /// The hand-off from prefill to this request's decode, and the fate to report if the stream ended now.
    pub handed: Option<Handed>,
    /// The call that aborts prefill, or makes it drop its blocks: kept until decode is known to have fetched them.
    pub abort: Option<AbortLeg>,
    /// How the leg failed that is being replaced, while prefill runs for the replacement.
    pub failure: Option<Failure>,
    /// The reply of a replacement decode worker, while the concurrent prefill runs.
    pub held_reply: Option<HeldReply>,
    /// Terms of the selection, for a caller that asked for them.
    pub explanation: Option<String>,
    /// Whether the request has trailers.
    pub has_trailers: bool,
    /// Number of the present attempt: an answer to a call of an earlier attempt is no longer waited for.
    attempt: u32,
    /// Prefill calls under way for the present attempt.
    racing: u32,
    /// Prefill calls under way for any attempt.
    prefill_calls: u32,
}

impl Default for Session {
    fn default() -> Self {
        Self {
            stage: Stage::Forwarded,
            response: Response::default(),
            assignment: Assignment::default(),
            tried: Tried::default(),
            handed: None,
            abort: None,
            failure: None,
            held_reply: None,
            explanation: None,
            has_trailers: false,
            attempt: 0,
            racing: 0,
            prefill_calls: 0,
        }
    }
}

impl Session {
    /// Number of the present attempt.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether the client still waits for this `attempt`.
    pub fn waits_for(&self, attempt: u32) -> bool {
        let is_open = matches!(
            self.stage,
            Stage::Prefilling | Stage::Forwarded | Stage::Recovering
        );
        is_open && self.attempt == attempt
    }

    /// Begins a new attempt: what was begun before no longer concerns the request.
    pub fn supersede_calls(&mut self) {
        self.attempt = self.attempt.wrapping_add(1);
        self.racing = 0;
        self.held_reply = None;
    }

    /// Whether the client waits for this `attempt`, and exactly one of its prefill calls is under way.
    pub fn awaits_one_prefill(&self, attempt: u32) -> bool {
        self.racing == 1 && self.waits_for(attempt)
    }

    /// Notes that decode is dispatched.
    pub fn dispatched(&mut self, dispatch: &Dispatch, now: Duration) {
        self.tried = Tried::new(&dispatch.destinations);
        self.stage = Stage::Forwarded;
        self.response.start(dispatch.patience, now);
    }

    /// Whether the stream is to be watched: it has deadlines, or a worker that may leave.
    pub fn is_watched(&self) -> bool {
        self.response.has_deadline() || self.assignment.decode.is_some()
    }

    /// Records how the leg that the client waits for has ended, and what that means.
    fn leg_ended(&mut self, router: &mut Router, came: Came) -> LegEnd {
        LegEnd::record(router, &mut self.assignment, came)
    }

    /// Records which destination answered: those tried before it took no connection, and are returned.
    pub fn answered_by(&mut self, router: &mut Router, address: SocketAddr) -> Vec<SocketAddr> {
        let refused = self.tried.before(address).to_vec();
        self.tried.reached(Some(address));
        if !refused.is_empty() {
            router.took_no_connection(&refused);
            router.served_by(&mut self.assignment, address);
        }
        refused
    }

    /// Whether the request was answered, so that no leg needs its body any more.
    pub fn is_answered(&self) -> bool {
        matches!(self.stage, Stage::Answered | Stage::Ended) || self.response.has_begun()
    }

    /// Whether another worker may take the place of one that fails, as far as the request and what is kept of it allow.
    pub fn takeover(&self, bodies: &Bodies) -> Takeover {
        match bodies.replay.is_some() && self.assignment.may_recover() {
            true => Takeover::Possible,
            false => Takeover::Impossible,
        }
    }

    /// Notes that the client has begun to read: no other worker can take over any more.
    pub fn answer_begins(&mut self, router: &mut Router) {
        self.handed = self.handed.map(Handed::fetched);
        router.answer_begins(&mut self.assignment);
        // While a concurrent prefill runs, a client that leaves aborts it; afterwards decode has fetched its blocks.
        if !self.response.prefill_runs() {
            self.abort = None;
        }
    }

    /// Notes that the concurrent prefill has handed over `blocks` blocks, and was good; whether what is held back of the answer
    /// can go on, up to its end.
    fn prefill_is_good(&mut self, blocks: u64) -> bool {
        let handed = Handed::over(blocks);
        let has_begun = self.response.has_begun();
        self.handed = Some(match has_begun {
            true => handed.fetched(),
            false => handed,
        });
        if has_begun {
            self.abort = None;
        }
        self.response.prefill_is_good() && self.stage == Stage::Forwarded
    }

    /// Reads what is new in a piece of the answer: further tokens let the decode charge grow. Whether the first token has come.
    pub fn read(&mut self, piece: Piece<'_>) -> bool {
        let is_first_token = self.response.read(piece);
        self.assignment.generated(self.response.tokens());
        is_first_token
    }

    /// Notes that the first token came at `now`: the prompt has been read.
    pub fn first_token(&mut self, now: Duration) {
        self.assignment.first_token(now);
        self.response.first_token_at(now);
    }

    /// Whether a piece of the answer passes unread. Any piece renews a booking, whatever it contains.
    pub fn passes_unread(&mut self) -> bool {
        let passes = self.response.passes_unread();
        if passes {
            self.assignment.generated(self.response.tokens());
        }
        passes
    }

    /// What is due in a round at `now`, while the answer is awaited or flows. To be called once a round.
    pub fn round(&mut self, now: Duration) -> Option<Due> {
        match self.stage {
            Stage::Forwarded => self.response.round(now),
            _ => None,
        }
    }

    /// Whether the client has read nothing yet, and waits for one of these workers.
    pub fn awaits(&self, workers: &[WorkerId]) -> bool {
        let is_among =
            |worker: &Option<Arc<Worker>>| worker.as_ref().is_some_and(|w| workers.contains(&w.id));
        self.stage == Stage::Forwarded
            && self.response.is_unread()
            && (is_among(&self.assignment.decode)
                || self.response.prefill_runs() && is_among(&self.assignment.prefill))
    }

    /// Whether this answer has moved since the other one, of the same worker, last did.
    pub fn has_moved_since(&self, other: &Self) -> bool {
        let decode = |session: &Self| session.assignment.decode.as_ref().map(|worker| worker.id);
        decode(self).is_some()
            && decode(self) == decode(other)
            && self.response.has_moved_since(&other.response)
    }

    /// Nothing has come in time: another worker is asked.
    pub fn timed_out(&mut self, with: &mut StepContext<'_>) -> Vec<Effect<'static>> {
        let end = self.leg_ended(with.router, Came::TimedOut);
        self.replace_leg(with, Failure::Silent, end)
    }

    /// A worker that the client waits for has left the fleet: another worker is asked.
    pub fn worker_left(&mut self, with: &mut StepContext<'_>) -> Vec<Effect<'static>> {
        let end = self.leg_ended(with.router, Came::Left);
        self.replace_leg(with, Failure::Left, end)
    }

    /// An answer that flowed has stopped: `came` says whether its worker is silent or its client does not read.
    pub fn stalled(&mut self, with: &mut StepContext<'_>, came: Came) -> Vec<Effect<'static>> {
        self.leg_ended(with.router, came);
        vec![OnStream::BreakOff("silent").into()]
    }

    /// The stream has ended: the client was answered, or has left. Judges the worker by the answer; a worker that breaks its
    /// answer off is known here at the earliest, and `is_broken_off` is asked only where it matters.
    pub fn stream_ended(
        &mut self,
        with: &mut StepContext<'_>,
        is_broken_off: impl FnOnce() -> bool,
    ) -> Vec<Effect<'static>> {
        let may_be_broken_off = match self.stage {
            Stage::Forwarded => self.response.is_open(),
            // No worker is judged any more, but the break is counted.
            Stage::Recovering => true,
            _ => false,
        };
        let end = match may_be_broken_off && is_broken_off() {
            true => StreamEnd::BrokenOff,
            false => StreamEnd::Other,
        };
        if self.stage == Stage::Forwarded
            && let Some(came) = self.response.outcome(end)
        {
            self.leg_ended(with.router, came);
        }
        let stage = self.end();
        let mut effects: Vec<Effect<'static>> = Vec::new();
        if end == StreamEnd::BrokenOff {
            effects.push(Note::BrokenOff.into());
        }
        let handed = self.handed.take();
        effects.extend(handed.map(|handed| Note::HandedOff(handed).into()));
        match stage {
            // Blocks that a call under way computes must be fetched.
            Stage::Prefilling | Stage::Recovering if self.prefill_calls > 0 => {
                effects.push(Effect::KeepRequest);
            }
            Stage::Waiting(waiter) => effects.push(Effect::LeaveQueue(waiter)),
            _ => {}
        }
        effects.extend(self.abort.take().map(Effect::AbortAtEnd));
        // An answer that was held back did not reach the client, which may have got the proxy's own 503.
        let has_reached_client = stage == Stage::Answered || self.response.has_begun();
        let status_class = match has_reached_client {
            true => self.response.status_class(),
            false => 0,
        };
        effects.push(Note::Ended { status_class }.into());
        self.assignment.release();
        with.router.request_ended(&self.assignment);
        effects
    }

    /// Ends the session with its stream; returns the stage that it ended in.
    fn end(&mut self) -> Stage {
        self.response.set_prefill(ConcurrentPrefill::Nothing);
        self.held_reply = None;
        std::mem::replace(&mut self.stage, Stage::Ended)
    }
}
