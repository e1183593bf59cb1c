//! Owns the types for what follows from the prefill answer.

use std::net::SocketAddr;
use std::sync::Arc;

use super::prefill::PrefillPhase;
use super::{Dispatch, Fallback, Refusal};
use crate::fleet::{TargetKey, Worker};
use crate::handoff::terminal::Terminal;
use crate::handoff::{AbortCall, Staged};
use crate::outcome::{Came, Meaning};

/// Whether the client still waits for the answer to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    /// The client waits.
    Waits,
    /// The client waits for another call: this one is late, or its pair was given up.
    Superseded,
    /// The client has left.
    Left,
}

/// How a prefill has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillEnd {
    /// The outcome of the call.
    pub came: Came,
    /// The meaning of that outcome.
    pub meaning: Meaning,
}

/// The next step after the prefill answer.
#[allow(
    clippy::large_enum_variant,
    reason = "one a request, moved once or twice: cheaper than a box"
)]
#[derive(Debug)]
#[must_use = "the request's next step"]
pub enum AfterPrefill {
    /// Decode runs, and fetches the staged KV.
    Decode {
        /// The decode leg.
        dispatch: Dispatch,
        /// The decode worker and its rank: another one than picked, if that has left.
        target: (Arc<Worker>, TargetKey),
        /// The staged KV, to be kept with the assignment.
        staged: Staged,
    },
    /// Another prefill worker is called.
    Again(PrefillPhase),
    /// The worker's answer goes to the client unchanged: the request itself was at fault.
    Answer,
    /// The worker has refused the request while a concurrent decode is under way. Another pair is tried; if there is none,
    /// the worker's answer goes to the client.
    AnswerUnlessPair(PrefillEnd),
    /// Generation ended by itself: this is the client's answer.
    Terminal(Terminal),
    /// The same, with the clean-up of staged KV blocks that no decode needs.
    TerminalStaged(Terminal, Box<Self>),
    /// The decode worker runs the request aggregated.
    Whole {
        /// The leg.
        dispatch: Dispatch,
        /// The reason.
        fallback: Fallback,
    },
    /// Decode is running already, and prefill has done its part.
    Good,
    /// The request is refused.
    Refused(Refusal),
    /// Prefill has failed while a concurrent decode is under way. Another pair is tried; if there is none, or the answer has
    /// begun, the request is refused.
    FailedBeside(Refusal, PrefillEnd),
    /// The client has left, and the KV blocks staged for its decode are fetched and dropped.
    CleanUp(CleanUpLeg),
    /// The client has left, and no worker can fetch the staged KV blocks.
    Leaked {
        /// Number of leaked blocks.
        blocks: u64,
    },
    /// The answer is awaited no longer, and the prefill worker must drop the KV it has computed.
    CallOff {
        /// The abort call.
        leg: AbortLeg,
        /// Blocks that leak if the call fails.
        blocks: u64,
    },
    /// The client has left, and nothing remains to be done.
    Nothing,
}

/// The leg that fetches KV blocks left behind by a client: one token, unstreamed.
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
    /// The worker's address.
    pub destination: SocketAddr,
    /// The call.
    pub call: AbortCall,
}
