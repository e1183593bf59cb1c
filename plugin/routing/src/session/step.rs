//! Owns the vocabulary of an answer's pieces: what comes, and what the proxy does with it.

use crate::outcome::Came;

/// A piece of the answer; while pieces are held back, all of them together.
#[derive(Debug, Clone, Copy)]
pub enum Piece<'a> {
    /// More may follow.
    Part(&'a [u8]),
    /// The answer ends here.
    Last(&'a [u8]),
}

impl<'a> Piece<'a> {
    pub(super) fn bytes(self) -> &'a [u8] {
        match self {
            Self::Part(bytes) | Self::Last(bytes) => bytes,
        }
    }

    pub(super) fn is_last(self) -> bool {
        matches!(self, Self::Last(_))
    }
}

/// Whether another worker can take the place of the one that answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takeover {
    /// The request is still there, and another try is allowed.
    Possible,
    /// The answer is the client's, whatever it says.
    Impossible,
}

/// How a stream has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamEnd {
    /// The worker broke the answer off.
    BrokenOff,
    /// In another way: with the answer, or since the client has left.
    Other,
}

/// Whether the length of the answer, as its headers have it, still holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentLength {
    /// The length holds.
    Kept,
    /// Events are to be edited: the length is not known yet, and its header must go.
    Removed,
}

/// What the proxy does with the received part of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum AnswerStep {
    /// The part waits for what comes next.
    Hold,
    /// The part passes.
    Pass(Passed),
    /// The leg has failed before the client has read anything; everything stays held back.
    Fail(Came),
    /// The answer breaks off now.
    BreakOff(&'static str),
}

/// A part of the answer that passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passed {
    /// Whether the client begins to read the answer of a leg that might have been recovered: no other worker can take over any
    /// more.
    pub is_first: bool,
    /// The part as the client gets it.
    pub body: NewBody,
}

/// A part of the answer as the client gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewBody {
    /// No change.
    AsItCame,
    /// These events in its place.
    Events(Vec<u8>),
    /// This document in its place; the header `content-length` must follow.
    Document(Vec<u8>),
    /// This event in its place: the answer ends with a reset. Where the event cannot be written the reset comes at once.
    Error {
        /// The event.
        event: Vec<u8>,
        /// Reason of the reset.
        reason: &'static str,
    },
}

/// What is due in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// No answer with content has come in time.
    NothingCame,
    /// The answer has begun, and is silent for too long or late with its end.
    Stalled,
    /// The answer breaks off now.
    BreakOff(&'static str),
}
