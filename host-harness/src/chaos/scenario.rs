//! Owns what a scenario is: a fleet, a crowd of clients, and a script of what befalls the fleet.

use std::fmt;

use routing::fleet::Role;
use serde_json::{Value, json};

use super::wellbeing::State;
use crate::engine::Dialect;

/// One way in which things go wrong.
#[derive(Debug)]
pub struct Scenario {
    /// As the command line spells it.
    pub name: &'static str,
    /// What happens, in a line of `--help`.
    pub what: &'static str,
    /// Engines of each role.
    pub shape: Shape,
    /// Who asks.
    pub crowd: Crowd,
    /// What happens to the engines, in order of time.
    pub script: &'static [Step],
    /// The role of the worker that must be noticed and left alone, where there is one.
    pub ejects: Option<Role>,
    /// How exactly the filter can know what was lost.
    pub leaks: Leaks,
    /// Roles of which no worker may be ejected.
    pub spares: &'static [Role],
    /// What a client may be content with.
    pub demand: Demand,
    /// What the pool is told beside what all are.
    pub pool: Pool,
    /// The protocol that it is about, where it is about one.
    pub dialect: Option<Dialect>,
}

impl Scenario {
    /// Whether engines are told to have faults.
    pub fn injects(&self) -> bool {
        let mut acts = self.script.iter().map(|step| step.act);
        acts.any(|act| matches!(act, Act::Inject(..)))
    }
}

/// Engines of each role.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Those that prefill.
    pub prefill: usize,
    /// Those that decode.
    pub decode: usize,
}

/// What clients are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crowd {
    /// All read what they are sent, to its end.
    Patient,
    /// A quarter reads long answers slowly, and stops reading for a while in the middle.
    WithSlowReaders,
    /// All ask for streams, and two in three hardly read them: they stop for several times as long as a worker may be silent.
    SlowReaders,
    /// Half leave, each time at another point.
    WithLeavers,
    /// A third of the requests make every engine fail that takes them.
    WithPoison,
    /// Two hundred more send a body that begins at once and then trickles without an end.
    WithTricklers,
    /// Sixty more send a prompt of 30 MB, and leave while it is prefilled.
    WithLongPrompts,
}

/// How exactly the filter can know which hand-offs nobody fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaks {
    /// It learns of every decode leg whether the blocks were fetched.
    Exact,
    /// A decode leg ends before its first byte, and nobody can tell whether it had fetched them: it may count too many, never too few.
    AtLeast,
    /// It sees no hand-off, since others run the legs, and counts none.
    OutOfSight,
}

/// What a client may be content with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// The answer, an engine's own error, or a reset that can be seen.
    Honesty,
    /// The answer, and nothing else while a pair is well.
    Answer,
    /// The answer for whoever sends its request at once and reads on; the others may be refused over their bodies, or broken off.
    AnswerToGood,
    /// The answer, or a 429 or 503 that says when to come again.
    AnswerOrLater,
}

impl Demand {
    /// Whether an answer that had begun may be broken off, if its client can see that.
    pub fn bears_resets(self) -> bool {
        matches!(self, Self::Honesty | Self::AnswerToGood)
    }
}

/// What a pool is told beside what all are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// Nothing.
    Plain,
    /// To ask the engines for their metrics.
    AsksMetrics,
    /// As shipped, but decode may not be silent for long, and who fails once is left alone.
    Touchy,
    /// All as shipped.
    Shipped,
    /// As shipped, but a body has a second.
    HastyBodies,
    /// As shipped, but a body may have 32 MiB, and all of a thread together half of what is shipped: four such bodies.
    LongBodies,
}

impl Pool {
    /// Whether the limits of what may be held are those of a product in use.
    pub fn bounds_memory(self) -> bool {
        matches!(self, Self::Shipped | Self::HastyBodies | Self::LongBodies)
    }
}

/// Something that happens to engines.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// When, as a part of a round.
    pub at: f64,
    /// What.
    pub act: Act,
}

/// What happens.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// The engine's end, as of a process that is killed.
    Kill(Seat),
    /// Another engine takes its place, at the same address.
    Start(Seat),
    /// From now on they have this fault as well.
    Inject(Whom, Fault),
    /// They have no fault any more.
    Mend(Whom),
}

/// An engine's place in the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Its role.
    pub role: Role,
    /// Its number among those of the role, from 0.
    pub number: usize,
}

/// Who has a fault.
#[derive(Clone, Copy, Debug)]
pub enum Whom {
    /// One engine.
    One(Seat),
    /// All of a role.
    All(Role),
}

/// A fault that an engine can be told to have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// This share of its answers is this status, with a body of its own.
    Status {
        /// An HTTP status that is an error.
        status: u16,
        /// From 0 to 1.
        share: f64,
    },
    /// It answers so what comes while it has more requests than it wants.
    Full {
        /// 429 or 503.
        status: u16,
        /// Requests.
        above: u64,
    },
    /// It does not tell its metrics.
    HangMetrics,
    /// It closes connections that are idle for so long.
    CloseIdle {
        /// Milliseconds.
        ms: u64,
    },
    /// It has just closed the connection on which this share of the requests comes, where it had served another one on it.
    ResetKeptAlive {
        /// From 0 to 1.
        share: f64,
    },
    /// It takes requests and never answers.
    Hang,
    /// It sends headers of 200, and then nothing.
    Silent,
    /// It sends headers of 200, and a clean end.
    Empty,
    /// The connection breaks after so many tokens.
    DieMidStream {
        /// Tokens.
        tokens: u64,
    },
    /// The connection breaks without an answer.
    ResetBeforeHeaders,
    /// The connection breaks after the headers.
    ResetAfterHeaders,
    /// Its hand-offs cannot be fetched.
    LoseHandoff,
    /// It begins late.
    Delay {
        /// Milliseconds.
        ms: u64,
    },
    /// Its tokens come slowly.
    SlowDrip {
        /// Milliseconds between two tokens.
        ms: u64,
    },
}

/// What every body of a made-up error says, so that it is known again.
pub const INJECTED: &str = "injected by chaos";

/// Seconds that a made-up 429 or 503 asks clients to wait.
pub const RETRY_AFTER: &str = "7";

impl Fault {
    /// How an engine is that has it: closing idle connections is any server's right.
    pub fn leaves(self) -> State {
        match self {
            Self::CloseIdle { .. } | Self::ResetKeptAlive { .. } => State::Well,
            _ => State::Unwell,
        }
    }

    /// As `POST /__fault` takes it.
    pub fn to_json(self) -> Value {
        match self {
            Self::Status { status, share } => json!({
                "kind": "status", "status": status, "share": share,
                "headers": injected_headers(status), "body": injected_body(status),
            }),
            Self::Full { status, above } => json!({
                "kind": "status", "status": status, "above": above,
                "headers": injected_headers(status), "body": injected_body(status),
            }),
            Self::HangMetrics => json!({"kind": "hang_metrics"}),
            Self::CloseIdle { ms } => json!({"kind": "close_idle", "ms": ms}),
            Self::ResetKeptAlive { share } => json!({"kind": "reset_kept_alive", "share": share}),
            Self::Hang => json!({"kind": "hang"}),
            Self::Silent => json!({"kind": "silent"}),
            Self::Empty => json!({"kind": "empty"}),
            Self::DieMidStream { tokens } => json!({"kind": "die_mid_stream", "tokens": tokens}),
            Self::ResetBeforeHeaders => json!({"kind": "reset_before_headers"}),
            Self::ResetAfterHeaders => json!({"kind": "reset_after_headers"}),
            Self::LoseHandoff => json!({"kind": "lose_handoff"}),
            Self::Delay { ms } => json!({"kind": "delay", "ms": ms}),
            Self::SlowDrip { ms } => json!({"kind": "slow_drip", "ms": ms}),
        }
    }
}

/// The body of a made-up error, byte for byte: it must reach the client so.
pub fn injected_body(status: u16) -> String {
    // Odd spacing and a number that no float holds: whoever writes it anew is found out.
    format!(
        r#"{{"error": {{"message":"{INJECTED}",  "type":"Injected", "param":null, "code":{status}}}, "n":9007199254740993}}"#
    )
}

/// Whether a made-up error of this status says when to come again.
pub fn has_retry_after(status: u16) -> bool {
    matches!(status, 429 | 503)
}

fn injected_headers(status: u16) -> Value {
    match has_retry_after(status) {
        true => json!({"retry-after": RETRY_AFTER}),
        false => json!({}),
    }
}

impl fmt::Display for Seat {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.role.name(), self.number)
    }
}
