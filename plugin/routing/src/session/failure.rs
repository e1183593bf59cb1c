//! Owns the end of a leg that the client waits for: what it means, how it failed, and the client's answer where no other worker
//! takes over.

use std::borrow::Cow;

use super::{CompleteAnswer, Header, Takeover, Tried, WorkerReply};
use crate::fleet::WorkerId;
use crate::outcome::{Came, Follows, Leg, Meaning};
use crate::refusal::Refusal;
use crate::route::{Assignment, CallEnd, PrefillEnd, Router};

/// How a leg has ended.
#[derive(Debug, Clone, Copy)]
pub struct LegEnd {
    /// The leg.
    pub leg: Leg,
    /// What came of the leg.
    pub came: Came,
    /// What the outcome means.
    pub meaning: Meaning,
}

impl LegEnd {
    /// Records what came of the leg that the client waits for.
    pub fn record(router: &mut Router, assignment: &mut Assignment, came: Came) -> Self {
        let leg = assignment.leg(router.pool().rules());
        let meaning = router.leg_ended(assignment, came);
        Self { leg, came, meaning }
    }

    /// Whether the client gets what came; else another worker may be asked.
    pub fn is_passed_on(&self) -> bool {
        self.meaning.follows == Follows::PassedOn
    }

    /// The workers that were asked for the leg, in order.
    pub fn asked(&self, router: &Router, assignment: &Assignment, tried: &Tried) -> Vec<WorkerId> {
        let worker = match (self.leg, self.came) {
            (Leg::Prefill, _) => &assignment.prefill,
            (_, Came::Refused | Came::NotSent | Came::Reset | Came::Cut) => {
                return router.decoders_at(tried.all());
            }
            // A worker that has left is not picked.
            (_, Came::Left) => &None,
            (_, _) => &assignment.decode,
        };
        worker.iter().map(|worker| worker.id).collect()
    }
}

impl From<PrefillEnd> for LegEnd {
    fn from(PrefillEnd { came, meaning }: PrefillEnd) -> Self {
        Self {
            leg: Leg::Prefill,
            came,
            meaning,
        }
    }
}

/// What follows an error of a worker's; none: the client gets the error.
pub fn after_error(
    end: &LegEnd,
    status: u16,
    assignment: &Assignment,
    takeover: Takeover,
) -> Option<Failure> {
    // Neither a redirect nor a switch of protocols is an answer to a request for text.
    if status < 400 && assignment.expects_tokens() {
        return Some(Failure::Unusable { status });
    }
    (!end.is_passed_on() && takeover == Takeover::Possible).then_some(Failure::Status)
}

/// How a decode leg failed; the client's answer if no worker can take its place.
#[derive(Debug)]
pub enum Failure {
    /// The worker answered with an error, which is held back.
    Status,
    /// A worker answered a call with an error.
    AnsweredWithError(WorkerReply<'static>),
    /// No worker took the connection.
    Unreached,
    /// The worker broke the connection off before it answered.
    Broken,
    /// The worker said nothing for too long.
    Silent,
    /// The worker ended the answer without content.
    Empty,
    /// One of the request's workers has left the fleet.
    Left,
    /// The worker answered with a status that is no answer to such a request.
    Unusable {
        /// The status.
        status: u16,
    },
    /// The gateway refuses: the concurrent prefill failed, the request cannot be sent, or no room is left for the reply.
    Refused(Refusal),
}

/// The client's answer to a failure that no other worker makes good.
#[derive(Debug)]
pub enum LastAnswer {
    /// What is held back of the worker's error.
    Held,
    /// An error that a worker answered a call with.
    Error(WorkerReply<'static>),
    /// A refusal of the gateway's own.
    Refused(Refusal),
}

impl Failure {
    /// The failure of an answer whose leg has ended as `came` says before the client read anything.
    pub fn of_answer(came: Came) -> Self {
        match came {
            Came::Empty => Self::Empty,
            _ => Self::Status,
        }
    }

    /// The failure of a leg that no worker answered.
    pub fn of_no_answer(came: Came) -> Self {
        match came {
            Came::NotSent | Came::Refused => Self::Unreached,
            Came::TimedOut => Self::Silent,
            _ => Self::Broken,
        }
    }

    /// In words, for the log.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Status | Self::AnsweredWithError(_) | Self::Unusable { .. } => "an error",
            Self::Unreached => "no connection",
            Self::Broken => "its connection broke off",
            Self::Silent => "silence",
            Self::Empty => "an empty answer",
            Self::Left => "its worker has left",
            Self::Refused(_) => "its prefill failed",
        }
    }

    /// The failure after a call to another worker has failed, too: what a worker said last. An error that is still held back
    /// stays as it is.
    #[must_use]
    pub fn then(self, came: Came, answer: CallEnd<'_>, headers: Vec<Header>) -> Self {
        match (&self, came, answer) {
            (Self::Status, ..) => self,
            (_, Came::Status(status @ 400..), CallEnd::Whole { body, .. }) => {
                let body = Cow::Owned(body.to_vec());
                Self::AnsweredWithError(WorkerReply {
                    status,
                    headers,
                    body,
                })
            }
            (_, Came::Status(status), _) => Self::Unusable { status },
            _ => self,
        }
    }

    /// The client's answer, `tried` destinations having been tried.
    pub fn answer(self, tried: usize) -> LastAnswer {
        LastAnswer::Refused(match self {
            Self::Status => return LastAnswer::Held,
            Self::AnsweredWithError(reply) => return LastAnswer::Error(reply),
            Self::Unreached | Self::Broken => Refusal::Unreachable {
                what: "decode worker",
                tried,
            },
            Self::Silent => Refusal::DecodeTimeout,
            Self::Empty => Refusal::EmptyAnswer,
            Self::Left => Refusal::WorkerLeft,
            Self::Unusable { status } => Refusal::UnusableStatus { status },
            Self::Refused(refusal) => refusal,
        })
    }
}

/// What came of a call to a decode worker: a success without content is a failure, too.
pub fn came_of_call(answer: CallEnd<'_>, headers: &[Header]) -> Came {
    if let Some(came) = answer.came() {
        return came;
    }
    match answer {
        CallEnd::Whole { body, .. } => CompleteAnswer { headers, body }.came(),
        _ => Came::Cut,
    }
}
