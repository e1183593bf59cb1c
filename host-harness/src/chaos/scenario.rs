//! Owns the definition of a scenario: a fleet, a mix of clients, and a script of faults.

use std::fmt;

use routing::fleet::Role;
use serde::Serialize;
use serde_json::{Value, json};

use super::health::EngineHealth;
use crate::engine::Dialect;

/// One way in which things go wrong.
#[derive(Debug)]
pub struct Scenario {
    /// Name on the command line.
    pub name: &'static str,
    /// Description in one line of `--help`.
    pub what: &'static str,
    /// Engines of each role.
    pub size: FleetSize,
    /// The clients.
    pub mix: ClientMix,
    /// Steps of the script, in order of time.
    pub script: &'static [Step],
    /// The role of the faulty worker that must be ejected, if any.
    pub ejects: Option<Role>,
    /// How exactly the filter can know the lost hand-offs.
    pub leaks: Leaks,
    /// Roles of which no worker may be ejected.
    pub spares: &'static [Role],
    /// The worst outcome that a client must accept.
    pub demand: Demand,
    /// Pool settings beyond those of all scenarios.
    pub pool: PoolSettings,
    /// The protocol under test, if the scenario is about one.
    pub dialect: Option<Dialect>,
}

impl Scenario {
    /// Whether the script injects faults.
    pub fn injects(&self) -> bool {
        let mut actions = self.script.iter().map(|step| step.action);
        actions.any(|action| matches!(action, EngineAction::Inject(..)))
    }
}

/// Engines of each role.
#[derive(Clone, Copy, Debug)]
pub struct FleetSize {
    /// Prefill engines.
    pub prefill: usize,
    /// Decode engines.
    pub decode: usize,
}

/// Behaviour of the clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientMix {
    /// All read their answers to the end.
    Patient,
    /// A quarter read long answers slowly, with a long stall in the middle.
    WithSlowReaders,
    /// All ask for streams, and two in three hardly read them: they stall for several times the allowed silence of a worker.
    SlowReaders,
    /// Half leave, each time at another point.
    WithLeavers,
    /// A third of the requests make every engine fail that takes them.
    WithPoison,
    /// 200 more clients send a body that begins at once and then trickles without an end.
    WithTricklers,
    /// 60 more clients send a prompt of 30 MB, and leave during its prefill.
    WithLongPrompts,
}

/// How exactly the filter can know which hand-offs were never fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaks {
    /// The filter learns of every decode leg whether the blocks were fetched.
    Exact,
    /// A decode leg that ends before its first byte may or may not have fetched them: the filter may count too many, never too
    /// few.
    AtLeast,
    /// Others run the legs: the filter sees no hand-off, and counts none.
    OutOfSight,
}

/// The worst outcome that a client must accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// The answer, an engine's own error, or a visible reset.
    Honesty,
    /// The answer, and nothing else while a pair is healthy.
    Answer,
    /// The answer for clients that send their request at once and keep reading; the others may be refused because of their
    /// bodies, or broken off.
    AnswerToGood,
    /// The answer, or a 429 or 503 with `retry-after`.
    AnswerOrLater,
}

impl Demand {
    /// Whether a begun answer may be broken off, if its client can see that.
    pub fn bears_resets(self) -> bool {
        matches!(self, Self::Honesty | Self::AnswerToGood)
    }
}

/// Pool settings beyond those of all scenarios.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolSettings {
    /// None.
    Plain,
    /// Poll the engines' metrics.
    AsksMetrics,
    /// As shipped, but with a short allowed silence of decode, and one failure ejects a worker.
    Touchy,
    /// As shipped.
    Shipped,
    /// As shipped, but with a deadline of one second for a body.
    HastyBodies,
    /// As shipped, but a body may have 32 MiB, and all bodies of a thread half of the shipped budget: four such bodies.
    LongBodies,
}

impl PoolSettings {
    /// Whether the memory limits are those of a product in use.
    pub fn bounds_memory(self) -> bool {
        matches!(self, Self::Shipped | Self::HastyBodies | Self::LongBodies)
    }
}

/// A step of the script.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Time, as a share of a round.
    pub at: f64,
    /// The action.
    pub action: EngineAction,
}

/// An action on engines.
#[derive(Clone, Copy, Debug)]
pub enum EngineAction {
    /// Kills the engine like a process.
    Kill(EngineId),
    /// Starts another engine at the same address.
    Start(EngineId),
    /// Adds this fault to the engines.
    Inject(FaultTarget, Fault),
    /// Removes all faults of the engines.
    Repair(FaultTarget),
}

/// Identity of an engine in the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineId {
    /// Role of the engine.
    pub role: Role,
    /// Number of the engine within its role, from 0.
    pub number: usize,
}

/// The engines that get a fault.
#[derive(Clone, Copy, Debug)]
pub enum FaultTarget {
    /// One engine.
    One(EngineId),
    /// All engines of a role.
    All(Role),
}

/// A fault that can be injected into an engine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Fault {
    /// This share of answers has this status, with a distinct body.
    Status {
        /// An HTTP error status.
        status: u16,
        /// From 0 to 1.
        share: f64,
    },
    /// New requests get this status while the engine has more than `above` requests.
    #[serde(rename = "status")]
    Full {
        /// 429 or 503.
        status: u16,
        /// Requests.
        above: u64,
    },
    /// The engine does not answer metrics polls.
    HangMetrics,
    /// The engine closes connections that are idle for that long.
    CloseIdle {
        /// Milliseconds.
        ms: u64,
    },
    /// This share of the requests arrives on a kept-alive connection that the engine has just closed; only connections that have
    /// served a request before.
    ResetKeptAlive {
        /// From 0 to 1.
        share: f64,
    },
    /// The engine accepts requests and never answers.
    Hang,
    /// The engine sends headers with 200, and then nothing.
    Silent,
    /// The engine sends headers with 200, and a clean end.
    Empty,
    /// The connection breaks after that many tokens.
    DieMidStream {
        /// Tokens.
        tokens: u64,
    },
    /// The connection breaks without an answer.
    ResetBeforeHeaders,
    /// The connection breaks after the headers.
    ResetAfterHeaders,
    /// The engine's hand-offs cannot be fetched.
    LoseHandoff,
    /// The engine begins late.
    Delay {
        /// Milliseconds.
        ms: u64,
    },
    /// The engine's tokens come slowly.
    SlowDrip {
        /// Milliseconds between two tokens.
        ms: u64,
    },
}

/// Text in every injected error body, by which it is recognised.
pub const INJECTED: &str = "injected by chaos";

/// `retry-after` of an injected 429 or 503, in seconds.
pub const RETRY_AFTER: &str = "7";

impl Fault {
    /// State of an engine with this fault: closing idle connections is any server's right, and leaves it healthy.
    pub fn leaves(self) -> EngineHealth {
        match self {
            Self::CloseIdle { .. } | Self::ResetKeptAlive { .. } => EngineHealth::Healthy,
            _ => EngineHealth::Faulty,
        }
    }

    /// The JSON that `POST /__fault` takes.
    pub fn to_json(self) -> Value {
        let mut fault = json!(self);
        if let Self::Status { status, .. } | Self::Full { status, .. } = self {
            fault["headers"] = injected_headers(status);
            fault["body"] = json!(injected_body(status));
        }
        fault
    }
}

/// Body of an injected error; it must reach the client byte for byte.
pub fn injected_body(status: u16) -> String {
    // Odd spacing and a number beyond a float's precision reveal any re-serialisation.
    format!(
        r#"{{"error": {{"message":"{INJECTED}",  "type":"Injected", "param":null, "code":{status}}}, "n":9007199254740993}}"#
    )
}

/// Whether an injected error of this status carries `retry-after`.
pub fn has_retry_after(status: u16) -> bool {
    matches!(status, 429 | 503)
}

fn injected_headers(status: u16) -> Value {
    match has_retry_after(status) {
        true => json!({"retry-after": RETRY_AFTER}),
        false => json!({}),
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.role.name(), self.number)
    }
}
