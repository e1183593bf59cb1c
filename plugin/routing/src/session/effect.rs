//! Owns the effects of a session: what its host does for it, in their order; and what the host lends it for a step.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::{Bodies, Failure, Header};
use crate::admission::Waiter;
use crate::budget::Budget;
use crate::fleet::Worker;
use crate::handoff::terminal::Terminal;
use crate::outcome::Came;
use crate::refusal::Refusal;
use crate::route::fate::Handed;
use crate::route::{AbortLeg, CallEnd, CleanUpLeg, Dispatch, Fallback, PrefillPhase, Router};

/// What a step of a session needs, and the session does not own.
pub struct StepContext<'m> {
    /// The router.
    pub router: &'m mut Router,
    /// What is kept of the request.
    pub bodies: &'m mut Bodies,
    /// The bound on what is kept for recoveries: here, of replies that wait for their prefill.
    pub budget: &'m Budget,
    /// The time.
    pub now: Duration,
}

/// A worker's answer to a call.
#[derive(Clone, Copy)]
pub struct CallAnswer<'a> {
    /// The answer.
    pub answer: CallEnd<'a>,
    /// Reads the headers that concern a client. Only an answer that may reach the client needs them.
    pub headers: &'a dyn Fn() -> Vec<Header>,
}

impl fmt::Debug for CallAnswer<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.answer.fmt(out)
    }
}

/// A worker's complete answer, for the client.
#[derive(Debug, PartialEq, Eq)]
pub struct WorkerReply<'a> {
    /// Status of the answer.
    pub status: u16,
    /// Headers of the answer, as far as they concern a client.
    pub headers: Vec<Header>,
    /// Body of the answer: of a call that is being answered, or kept.
    pub body: Cow<'a, [u8]>,
}

impl WorkerReply<'_> {
    /// The same reply, kept for later.
    pub fn kept(self) -> WorkerReply<'static> {
        WorkerReply {
            status: self.status,
            headers: self.headers,
            body: Cow::Owned(self.body.into_owned()),
        }
    }
}

/// What the host does for a session. After the end of the stream there are calls and notes alone.
#[derive(Debug)]
#[must_use = "the request's next step"]
pub enum Effect<'a> {
    /// A prefill worker is called.
    CallPrefill(Box<PrefillPhase>),
    /// A decode worker is called: the request was forwarded before. If that fails too, the failure is what came before.
    CallDecode(Box<Dispatch>, Failure),
    /// Something is done to the stream.
    OnStream(OnStream<'a>),
    /// The stream is watched: its answer is reset in one of the next rounds.
    Watch,
    /// The request is copied for the clean-up leg; its client is still being served.
    CopyRequest,
    /// The request is kept for the clean-up leg; no other leg needs it.
    KeepRequest,
    /// A worker fetches KV blocks that this prefill worker has staged, and drops them.
    CleanUp(Box<CleanUpLeg>, Arc<Worker>),
    /// The prefill worker drops what it has computed: so many blocks, which leak if the call cannot be made.
    CallOff(AbortLeg, u64),
    /// The prefill worker drops what it is doing.
    Abort(AbortLeg),
    /// The same at the end of the stream, whose own context makes the call: no answer is awaited.
    AbortAtEnd(AbortLeg),
    /// The request no longer waits for a worker.
    LeaveQueue(Waiter),
    /// Metrics and the log get a note.
    Note(Note),
}

/// What the host does to the stream itself, in the stream's context; nothing once the stream has ended.
#[derive(Debug)]
pub enum OnStream<'a> {
    /// The request, which waits, is forwarded.
    Forward(Box<Dispatch>),
    /// The client gets the reply of a worker that took over, edited as a forwarded answer is.
    Deliver(WorkerReply<'a>),
    /// The client gets what prefill alone has generated.
    AnswerTerminal(Terminal),
    /// The client gets a worker's error unchanged.
    Answer(WorkerReply<'a>),
    /// The client gets a refusal.
    Refuse(Refusal),
    /// The concurrent prefill was good: what is held back of the answer goes on, edited.
    ReleaseHeld,
    /// No other worker takes over: the error that is held back goes on.
    PassHeld,
    /// The answer, which the client reads, is broken off for this reason.
    BreakOff(&'static str),
}

impl<'a> From<OnStream<'a>> for Effect<'a> {
    fn from(done: OnStream<'a>) -> Self {
        Self::OnStream(done)
    }
}

impl From<Note> for Effect<'_> {
    fn from(note: Note) -> Self {
        Self::Note(note)
    }
}

/// What metrics and the log get.
#[derive(Debug)]
pub enum Note {
    /// Blocks of the prompt that the prefill worker had cached.
    Cached(u64),
    /// The decode leg of a hand-off has failed.
    DecodeFailed,
    /// Prefill has failed, and no other worker is asked for the same decode leg.
    PrefillFailed(Refusal),
    /// A prefill worker has failed, and the next is called.
    PrefillReplaced {
        /// The worker that has failed.
        failed: Arc<Worker>,
        /// The worker that is called.
        next: Arc<Worker>,
        /// The failed worker's answer.
        answer: String,
    },
    /// Prefill has failed, and decode runs the request whole.
    RunsWhole {
        /// The reason.
        fallback: Fallback,
        /// The answer of the prefill worker.
        answer: String,
    },
    /// A leg has failed, and the request is placed again.
    Recovers {
        /// How the leg failed, as the client would be answered.
        failure: &'static str,
        /// What came of the last one.
        came: Came,
    },
    /// The worker has broken its answer off.
    BrokenOff,
    /// The request has ended.
    Ended {
        /// First digit of the status that the client got; 0: none.
        status_class: usize,
    },
    /// The fate of a hand-off.
    HandedOff(Handed),
    /// No worker fetches the blocks that this worker has staged.
    Leaked {
        /// KV blocks.
        blocks: u64,
        /// The prefill worker.
        worker: Arc<Worker>,
    },
}
