//! Owns what befalls a request beside its workers' answers: a deadline that passes, a worker that leaves the fleet, and the end of
//! the stream.

use super::effect::{Effect, Note, OnStream, StepContext};
use super::{Failure, Session, Stage, StreamEnd};
use crate::outcome::Came;

impl Session {
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
        let is_answered = stage == Stage::Answered || self.response.has_begun();
        let status_class = match is_answered {
            true => self.response.status_class(),
            false => 0,
        };
        effects.push(Note::Ended { status_class }.into());
        self.assignment.release();
        with.router.request_ended(&self.assignment);
        effects
    }
}
