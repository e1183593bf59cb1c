//! Owns the words for what follows from prefill's answer.

use std::net::SocketAddr;
use std::rc::Rc;

use super::legs::Staged;
use super::prefill::PrefillPhase;
use super::{Dispatch, Fallback, Refusal};
use crate::fleet::{TargetKey, Worker};
use crate::handoff::terminal::Terminal;
use crate::outcome::{Came, Meaning};

/// Whether anybody still waits for the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    /// The client does.
    Waits,
    /// It has left.
    Left,
}

/// How a prefill has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillEnd {
    /// What came.
    pub came: Came,
    /// What that means.
    pub meaning: Meaning,
}

/// What follows from prefill's answer.
#[allow(
    clippy::large_enum_variant,
    reason = "one a request, moved once or twice: cheaper than a box"
)]
pub enum AfterPrefill {
    /// Decode runs, and fetches what prefill has staged.
    Decode {
        /// The decode leg.
        dispatch: Dispatch,
        /// The decode worker and its rank: another one than before, where that has left.
        target: (Rc<Worker>, TargetKey),
        /// What waits for it: to be kept with the seat.
        staged: Staged,
    },
    /// Another prefill worker is called.
    Again(PrefillPhase),
    /// The worker's answer is the client's, as it came: the request itself was at fault.
    Answer,
    /// The worker has refused the request beside a decode that is under way. Another pair is asked; where there is none, the
    /// worker's answer is the client's.
    AnswerUnlessPair(PrefillEnd),
    /// Generation ended by itself: this is the client's answer.
    Terminal(Terminal),
    /// The same, and KV blocks wait for a decode that is not needed: what is done about them.
    TerminalStaged(Terminal, Box<Self>),
    /// The decode worker runs the request whole.
    Whole {
        /// The leg.
        dispatch: Dispatch,
        /// Why.
        fallback: Fallback,
    },
    /// Decode is running already, and prefill has done its part.
    Good,
    /// The request is refused.
    Refused(Refusal),
    /// Prefill has failed beside a decode that is under way. Another pair is asked; where there is none, or the answer has begun, it
    /// is refused.
    FailedBeside(Refusal, PrefillEnd),
    /// The client has left, and KV blocks wait for a decode that it would have been: they are fetched and dropped.
    CleanUp(CleanUpLeg),
    /// The client has left, and nobody can fetch the KV blocks that wait for it.
    Leaked {
        /// How many.
        blocks: u64,
    },
    /// Nobody waits for it any more, and the worker is to be told to drop what it has computed.
    CallOff {
        /// The call that tells it.
        leg: AbortLeg,
        /// Blocks that leak if it fails.
        blocks: u64,
    },
    /// The client has left, and nothing remains to be done.
    Nothing,
}

/// The leg that fetches KV blocks which a client has left behind: one token, no stream.
#[derive(Debug)]
pub struct CleanUpLeg {
    /// The leg, with changes of the client's body.
    pub dispatch: Dispatch,
    /// Blocks that leak if this leg fails.
    pub blocks: u64,
}

/// The call that makes a prefill worker drop a request whose client has left.
#[derive(Debug, PartialEq, Eq)]
pub struct AbortLeg {
    /// Where to.
    pub destination: SocketAddr,
    /// Path and query.
    pub path: &'static str,
    /// Its JSON body.
    pub body: String,
}
