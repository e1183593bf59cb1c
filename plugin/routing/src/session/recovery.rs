//! Owns what follows from an error, and the recovery of a leg that has failed before its client has read anything: other workers
//! are asked in its place, within the pool's budget; and what the client gets where none is left.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;

use super::effect::{CallAnswer, Effect, Note, OnStream, StepContext, WorkerReply};
use super::{
    ConcurrentPrefill, Failure, HeldReply, LastAnswer, LegEnd, Session, Stage, Takeover, Tried,
    after_error, came_of_call,
};
use crate::outcome::{Came, Follows, Leg, of_words};
use crate::refusal::Refusal;
use crate::route::fate::{Fate, Handed};
use crate::route::{Assignment, CallEnd, Dispatch, Failed, Plan, Router};

/// Who has answered with an error.
#[derive(Debug, Clone, Copy)]
pub enum ErrorOrigin<'d> {
    /// The worker.
    Worker,
    /// The proxy, in place of a worker.
    Proxy {
        /// The proxy's words for what has happened.
        details: &'d [u8],
        /// The destination that was tried last; none if none was.
        last: Option<SocketAddr>,
    },
}

/// What follows from an error.
#[derive(Debug)]
#[must_use = "the request's next step"]
pub enum AfterError {
    /// Another worker is asked.
    Recover(Failure, LegEnd),
    /// The client gets the error as it came.
    Pass(Vec<Effect<'static>>),
    /// The client gets this refusal in place of the proxy's words.
    Rewrite(Refusal),
}

impl Session {
    /// What follows from the headers of an answer with this `status`, which is no success.
    pub fn error_came(
        &mut self,
        with: &mut StepContext<'_>,
        status: u16,
        origin: ErrorOrigin<'_>,
    ) -> AfterError {
        let after = match origin {
            ErrorOrigin::Worker => self.worker_failed(with, status),
            ErrorOrigin::Proxy { details, last } if status >= 500 => {
                self.unanswered(with, status, last, details)
            }
            ErrorOrigin::Proxy { .. } => AfterError::Pass(Vec::new()),
        };
        if !matches!(after, AfterError::Recover(..)) {
            // An error says nothing about the worker's speed.
            self.assignment.release();
            self.response.pass_held();
        }
        after
    }

    /// A worker's success has turned out to be none before the client has read anything: how the leg has failed.
    pub fn success_failed(&mut self, with: &mut StepContext<'_>, came: Came) -> (Failure, LegEnd) {
        (Failure::of_answer(came), self.leg_ended(with.router, came))
    }

    fn worker_failed(&mut self, with: &mut StepContext<'_>, status: u16) -> AfterError {
        let end = self.leg_ended(with.router, Came::Status(status));
        let takeover = self.takeover(with.bodies);
        match after_error(&end, status, &self.assignment, takeover) {
            Some(failure) => AfterError::Recover(failure, end),
            None => AfterError::Pass(self.give_up_handoff(with.router)),
        }
    }

    /// No worker has answered: destinations before the `last` one took no connection, and the proxy's `details` say what became
    /// of that.
    fn unanswered(
        &mut self,
        with: &mut StepContext<'_>,
        status: u16,
        last: Option<SocketAddr>,
        details: &[u8],
    ) -> AfterError {
        if let Some(last) = last
            && with.router.pool().rules().reaches_workers
        {
            with.router.took_no_connection(self.tried.before(last));
            with.router.served_by(&mut self.assignment, last);
        }
        // Destinations behind it in the list have not been tried.
        self.tried.reached(last);
        let unknown = match last {
            Some(_) => Came::Cut,
            None => Came::NotSent,
        };
        let came = of_words(details).unwrap_or(unknown);
        let end = self.leg_ended(with.router, came);
        match self.takeover(with.bodies) {
            Takeover::Possible => AfterError::Recover(Failure::of_no_answer(came), end),
            // An answer without a body has no room for words.
            Takeover::Impossible if status == 503 && !self.response.has_ended() => {
                AfterError::Rewrite(self.nobody_reached(with.router))
            }
            Takeover::Impossible => AfterError::Pass(Vec::new()),
        }
    }

    fn nobody_reached(&self, router: &Router) -> Refusal {
        let what = match router.pool().rules().reaches_workers {
            false => "frontend",
            true => "decode worker",
        };
        Refusal::Unreachable {
            what,
            tried: self.tried.all().len(),
        }
    }

    /// Routes the request again after this `end` of a leg. If that is not possible, the client gets the `failure`.
    pub fn replace_leg(
        &mut self,
        with: &mut StepContext<'_>,
        failure: Failure,
        end: LegEnd,
    ) -> Vec<Effect<'static>> {
        if self.stage == Stage::Ended {
            return Vec::new();
        }
        self.stage = Stage::Recovering;
        let mut effects: Vec<Effect<'static>> = self.leave_pair().into_iter().collect();
        if end.leg != Leg::Prefill && self.assignment.prefill.is_some() {
            effects.push(Effect::Note(Note::DecodeFailed));
        }
        let Some(plan) = self.plan_again(with, end) else {
            effects.extend(self.give_up(with, failure));
            return effects;
        };
        effects.push(Effect::Note(Note::Recovers {
            failure: failure.name(),
            came: end.came,
        }));
        match plan {
            Plan::Prefill(phase, assignment) => {
                effects.extend(self.reassign(assignment));
                self.failure = Some(failure);
                effects.push(Effect::CallPrefill(Box::new(phase)));
            }
            Plan::Forward(dispatch, assignment) => {
                effects.extend(self.reassign(assignment));
                effects.push(Effect::CallDecode(Box::new(dispatch), failure));
            }
            Plan::Answer(_) | Plan::Wait(_) => effects.extend(self.give_up(with, failure)),
        }
        effects
    }

    fn plan_again(&mut self, with: &mut StepContext<'_>, end: LegEnd) -> Option<Plan> {
        let body = &with.bodies.replay.as_ref()?.body;
        let failed = Failed {
            leg: end.leg,
            meaning: end.meaning,
            workers: &end.asked(with.router, &self.assignment, &self.tried),
            frontends: self.tried.all(),
        };
        let assignment = &mut self.assignment;
        with.router.recover(assignment, &failed, body, with.now)
    }

    /// Leaves the present workers, and calls off what they are doing for the request.
    fn leave_pair(&mut self) -> Option<Effect<'static>> {
        self.supersede_calls();
        self.response.set_prefill(ConcurrentPrefill::Nothing);
        self.abort.take().map(Effect::Abort)
    }

    /// Assigns the request anew; the facts that it is counted under stay. A hand-off that no leg fetches any more is noted.
    fn reassign(&mut self, mut assignment: Assignment) -> Option<Effect<'static>> {
        assignment.facts = std::mem::take(&mut self.assignment.facts);
        let kept = assignment.staged_blocks();
        self.assignment = assignment;
        let before = std::mem::replace(&mut self.handed, kept.map(Handed::over));
        let unfetched = before.filter(|_| kept.is_none());
        unfetched.map(|handed| Effect::Note(Note::HandedOff(handed)))
    }

    /// Notes that a decode worker is called in place of the one that failed.
    pub fn decode_called(&mut self, dispatch: &Dispatch) {
        self.tried = Tried::new(&dispatch.destinations);
    }

    /// What follows from the answer of a worker that was called in place of one that failed.
    pub fn replacement_answered<'a>(
        &mut self,
        with: &mut StepContext<'_>,
        failure: Failure,
        attempt: u32,
        call: CallAnswer<'a>,
    ) -> Vec<Effect<'a>> {
        if !self.waits_for(attempt) {
            return Vec::new();
        }
        let headers = (call.headers)();
        let end = self.leg_ended(with.router, came_of_call(call.answer, &headers));
        match (end.meaning.follows, end.came, call.answer) {
            (Follows::PassedOn, Came::Good | Came::Status(_), CallEnd::Whole { status, body }) => {
                let body = Cow::Borrowed(body);
                let reply = WorkerReply {
                    status,
                    headers,
                    body,
                };
                self.reply(with, reply)
            }
            (Follows::PassedOn, Came::Unsendable, _) => {
                self.give_up(with, Failure::Refused(Refusal::Unsendable))
            }
            _ => {
                let failure = failure.then(end.came, call.answer, headers);
                self.replace_leg(with, failure, end)
            }
        }
    }

    /// Delivers a reply; a good one not before the concurrent prefill is known to be good.
    fn reply<'a>(&mut self, with: &mut StepContext<'_>, reply: WorkerReply<'a>) -> Vec<Effect<'a>> {
        if reply.status >= 300 || !self.response.prefill_runs() {
            return self.deliver(with, reply);
        }
        match with.budget.take(reply.body.len()) {
            Some(share) => {
                let reply = reply.kept();
                self.held_reply = Some(HeldReply { reply, share });
                Vec::new()
            }
            None => {
                let mut effects: Vec<Effect<'static>> = self.leave_pair().into_iter().collect();
                effects.extend(self.give_up(with, Failure::Refused(Refusal::Busy)));
                effects
            }
        }
    }

    /// Delivers a reply to the client.
    pub(super) fn deliver<'a>(
        &mut self,
        with: &mut StepContext<'_>,
        reply: WorkerReply<'a>,
    ) -> Vec<Effect<'a>> {
        let mut effects = Vec::new();
        match reply.status {
            ..300 => {
                with.bodies.answer_begins();
                self.answer_begins(with.router);
            }
            300.. => effects = self.give_up_handoff(with.router),
        }
        self.supersede_calls();
        effects.push(OnStream::Deliver(reply).into());
        effects
    }

    /// Ends a request that no other worker can take: the failure is the client's answer.
    pub fn give_up(
        &mut self,
        with: &mut StepContext<'_>,
        failure: Failure,
    ) -> Vec<Effect<'static>> {
        self.supersede_calls();
        self.assignment.release();
        let answer = match failure.answer(self.tried.all().len()) {
            LastAnswer::Held => {
                self.stage = Stage::Forwarded;
                self.response.pass_held();
                OnStream::PassHeld
            }
            LastAnswer::Error(reply) => OnStream::Answer(reply),
            LastAnswer::Refused(refusal) => OnStream::Refuse(refusal),
        };
        let mut effects = vec![answer.into()];
        effects.extend(self.give_up_handoff(with.router));
        effects
    }

    /// Gives up what prefill has computed for the decode leg. Blocks that the leg has not begun to fetch are fetched and dropped.
    pub fn give_up_handoff(&mut self, router: &mut Router) -> Vec<Effect<'static>> {
        let Some(handed) = self.handed.take() else {
            return Vec::new();
        };
        let is_unbegun = self.assignment.staged_blocks().is_some();
        let leg = router.give_up_handoff(&mut self.assignment);
        match (leg, &self.assignment.prefill) {
            (Some(leg), Some(prefill)) => vec![
                Effect::CopyRequest,
                Effect::CleanUp(Box::new(leg), Arc::clone(prefill)),
            ],
            _ => {
                let fate = match is_unbegun {
                    true => Fate::Leaked,
                    false => handed.fate,
                };
                let handed = Handed { fate, ..handed };
                vec![Effect::Note(Note::HandedOff(handed))]
            }
        }
    }
}
