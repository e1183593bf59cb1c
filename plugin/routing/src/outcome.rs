//! Owns what the end of a leg means: against whom it is held, what follows, and what that costs the request.
//!
//! One table for every host, engine and leg. It is asked with who was called ([`Leg`]), what came ([`Came`]) and what had
//! happened to the request before ([`Before`]); it answers with a [`Meaning`]. It keeps nothing and touches nothing.

use crate::fleet::Role;

/// Which leg has ended, by who runs it and what it depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Leg {
    /// A prefill call of ours.
    Prefill,
    /// A decode leg that fetches what a prefill of ours has computed.
    Decode,
    /// One worker runs the request whole.
    Aggregated,
    /// A decode worker behind a sidecar that runs the prefill leg itself (`llmd`).
    Sidecar,
    /// A frontend that runs both legs on workers out of sight (`direct`).
    Frontend,
}

impl Leg {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Prefill,
        Self::Decode,
        Self::Aggregated,
        Self::Sidecar,
        Self::Frontend,
    ];

    /// The role of the worker that was called.
    pub fn role(self) -> Role {
        match self {
            Self::Prefill => Role::Prefill,
            Self::Decode | Self::Sidecar | Self::Frontend => Role::Decode,
            Self::Aggregated => Role::Aggregated,
        }
    }
}

/// What came of a leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Came {
    /// An answer that says something, or an error that is an answer of the worker's own kind: see [`Came::Status`].
    Good,
    /// The host refused the call for what it carries: the client's own bytes.
    Unsendable,
    /// The host would not make the call: it has no such host, or a circuit breaker is open.
    NotSent,
    /// No connection was taken: nothing began.
    Refused,
    /// The connection was reset before the first byte of an answer. Whether it was a kept-alive one that the worker had
    /// closed already cannot be seen.
    Reset,
    /// The answer broke off after its first byte.
    Cut,
    /// The worker answered with this status, which is no 2xx.
    Status(u16),
    /// No answer came, or none that says anything, within its deadline.
    TimedOut,
    /// A stream fell silent after its first token, and no other stream of that worker has moved meanwhile.
    Silent,
    /// A stream fell silent after its first token while others of that worker moved: its client may read slowly.
    Unread,
    /// 200, and nothing in it: no choice, no word, no reason.
    Empty,
    /// 200, and the answer says that it failed.
    FailedInside,
    /// A prefill answered 200 without the hand-off that decode needs, or with one that has expired.
    NoHandoff,
    /// The worker is in the fleet no more.
    Left,
}

impl Came {
    /// Whether it is certain that the worker has not begun: what waits for it is as good as before.
    pub fn proves_unbegun(self) -> bool {
        match self {
            Self::Unsendable | Self::NotSent | Self::Refused => true,
            Self::Status(408) => false,
            // Refused for what it says, before any work.
            Self::Status(status) => (400..=499).contains(&status),
            _ => false,
        }
    }
}

/// What the request had met before, and what the gateway had done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Before {
    /// The gateway had told the worker to drop the request, or given the leg up.
    pub called_off: bool,
    /// Resets of this leg before a first byte, since the leg last succeeded.
    pub resets: usize,
    /// Another worker was asked already because one refused the request with a status that may be its own fault.
    pub has_asked_another: bool,
}

/// Against whom an outcome is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Held {
    /// Against no worker, and for none.
    Nothing,
    /// For the worker: it works.
    Credit,
    /// The worker has too much to do: it is passed over for a while of its own, never ejected for it, and keeps what is
    /// known of its cache.
    BackPressure,
    /// The worker is passed over for a second: never ejected for it, and what is known of its cache stays.
    PassedOver,
    /// The worker takes no connection: what it had cached is thought to be lost.
    Unreachable,
    /// The worker is suspected, until it is known whether another one serves this request.
    Worker,
    /// Either of the pair is to blame: both are suspected, until one of them succeeds with somebody else.
    Pair,
}

/// What follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Follows {
    /// What came is the client's, and nothing else is tried.
    PassedOn,
    /// One other worker is asked with the same bytes, a hand-off included: the first provably never began.
    SameBytes,
    /// The leg is done again, a hand-off's from its prefill on.
    Anew(LeftOut),
}

/// Who is left out when a leg is done again, as far as anybody else is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LeftOut {
    /// The worker, for good.
    Worker,
    /// The worker, unless no other one is left.
    WorkerAtFirst,
    /// Both workers of the pair; where that leaves no pair, the likelier one.
    Pair,
}

/// What another try costs the request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Cost {
    /// A worker may have worked on it: one of `decode.recoveries`.
    #[default]
    Work,
    /// Hardly anything: one of `decode.attempts`.
    Nothing,
}

/// What an outcome means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meaning {
    /// Against whom it is held.
    pub held: Held,
    /// What follows.
    pub follows: Follows,
    /// What that costs.
    pub cost: Cost,
}

impl Meaning {
    const fn new(held: Held, follows: Follows, cost: Cost) -> Self {
        Self {
            held,
            follows,
            cost,
        }
    }
}

/// The table.
pub fn judge(leg: Leg, came: Came, before: Before) -> Meaning {
    let meaning = match came {
        Came::Good => Meaning::new(Held::Credit, Follows::PassedOn, Cost::Nothing),
        Came::Unsendable | Came::Unread => {
            Meaning::new(Held::Nothing, Follows::PassedOn, Cost::Nothing)
        }
        Came::NotSent => Meaning::new(Held::PassedOver, unbegun(leg), Cost::Nothing),
        Came::Refused => Meaning::new(Held::Unreachable, unbegun(leg), Cost::Nothing),
        Came::Left => {
            let another = Follows::Anew(LeftOut::Worker);
            Meaning::new(Held::Nothing, another, Cost::Nothing)
        }
        Came::Reset => reset(before.resets),
        Came::Cut | Came::NoHandoff => {
            let another = Follows::Anew(LeftOut::Worker);
            Meaning::new(Held::Worker, another, Cost::Work)
        }
        Came::Silent => Meaning::new(Held::Worker, Follows::PassedOn, Cost::Work),
        Came::TimedOut | Came::Empty | Came::FailedInside => failed(leg),
        Came::Status(status) => of_status(leg, status, before),
    };
    let is_ours = before.called_off && came != Came::Good;
    let held = match (is_ours, leg) {
        (true, _) => Held::Nothing,
        // What a frontend answers is its workers' doing as likely as its own.
        (false, Leg::Frontend) if meaning.held != Held::Credit => Held::Nothing,
        (false, _) => meaning.held,
    };
    Meaning { held, ..meaning }
}

/// Nothing has begun: where a hand-off waits it is as good as before.
fn unbegun(leg: Leg) -> Follows {
    match leg {
        Leg::Decode => Follows::SameBytes,
        Leg::Prefill | Leg::Aggregated | Leg::Sidecar | Leg::Frontend => {
            Follows::Anew(LeftOut::Worker)
        }
    }
}

/// The first reset of a leg may be a kept-alive connection that the worker had closed; the next is the worker's, and the third is
/// the end.
fn reset(before: usize) -> Meaning {
    let again = Follows::Anew(LeftOut::WorkerAtFirst);
    match before {
        0 => Meaning::new(Held::Nothing, again, Cost::Nothing),
        1 => Meaning::new(Held::Worker, again, Cost::Nothing),
        _ => Meaning::new(Held::Worker, Follows::PassedOn, Cost::Nothing),
    }
}

/// A failure of which one or both of the workers may be the cause, by the leg.
fn failed(leg: Leg) -> Meaning {
    match leg {
        Leg::Prefill | Leg::Aggregated | Leg::Frontend => {
            Meaning::new(Held::Worker, Follows::Anew(LeftOut::Worker), Cost::Work)
        }
        Leg::Decode | Leg::Sidecar => {
            Meaning::new(Held::Pair, Follows::Anew(LeftOut::Pair), Cost::Work)
        }
    }
}

fn of_status(leg: Leg, status: u16, before: Before) -> Meaning {
    match status {
        // Full: a queue's bound, not a fault.
        429 => Meaning::new(Held::BackPressure, ask_another(leg, before), Cost::Nothing),
        503 => {
            let follows = match leg {
                Leg::Sidecar | Leg::Decode => Follows::Anew(LeftOut::Pair),
                Leg::Prefill | Leg::Aggregated | Leg::Frontend => Follows::Anew(LeftOut::Worker),
            };
            Meaning::new(Held::BackPressure, follows, Cost::Nothing)
        }
        // What one worker refuses so, others would refuse too.
        _ if is_the_requests_own(status) => {
            Meaning::new(Held::Nothing, Follows::PassedOn, Cost::Nothing)
        }
        // As below, but the worker took its time: it may have begun.
        408 => {
            let follows = match ask_another(leg, before) {
                Follows::SameBytes => Follows::Anew(LeftOut::Worker),
                other => other,
            };
            Meaning::new(suspected(leg), follows, Cost::Work)
        }
        // A wrong key, another model's name, another host's: the worker's own, if another one takes the request.
        400..=499 => Meaning::new(suspected(leg), ask_another(leg, before), Cost::Nothing),
        // 5xx; and neither a redirect nor a switch of protocols is an answer to a request for text.
        _ => failed(leg),
    }
}

/// Whether a status is about what the request says, whoever is asked: its syntax, its size, its media type, its fields.
fn is_the_requests_own(status: u16) -> bool {
    matches!(status, 400 | 409 | 411 | 413..=417 | 422 | 428 | 431 | 451)
}

/// Whether a worker that answers so refuses what one other worker is asked for then.
pub fn is_one_workers_refusal(status: u16) -> bool {
    (400..=499).contains(&status) && !is_the_requests_own(status)
}

/// Behind a sidecar an error may be either worker's.
fn suspected(leg: Leg) -> Held {
    match leg {
        Leg::Sidecar => Held::Pair,
        Leg::Prefill | Leg::Decode | Leg::Aggregated | Leg::Frontend => Held::Worker,
    }
}

/// One other worker is asked; what that one says is passed on.
fn ask_another(leg: Leg, before: Before) -> Follows {
    match (before.has_asked_another, leg) {
        (true, _) => Follows::PassedOn,
        (false, Leg::Decode) => Follows::SameBytes,
        (false, Leg::Sidecar) => Follows::Anew(LeftOut::Pair),
        (false, _) => Follows::Anew(LeftOut::Worker),
    }
}

/// What the proxy's own words about a leg that it could not deliver mean: the details of a response, in which blanks are
/// underscores, or the body of its answer to a call.
pub fn of_words(words: &[u8]) -> Option<Came> {
    let says = |reason: &[u8]| words.windows(reason.len()).any(|part| part == reason);
    let says_any = |reasons: &[&[u8]]| reasons.iter().any(|reason| says(reason));
    if says_any(&[b"no healthy upstream", b"no_healthy_upstream"]) {
        return Some(Came::NotSent);
    }
    if says_any(&[b"request timeout", b"response_timeout", b"per_try_timeout"]) {
        return Some(Came::TimedOut);
    }
    if says_any(&[b"overflow", b"maximum_connections", b"maximum connections"]) {
        return Some(Came::NotSent);
    }
    let is_refused = says_any(&[
        b"connection failure",
        b"connection_failure",
        b"connection timeout",
        b"connection_timeout",
    ]);
    if is_refused {
        return Some(Came::Refused);
    }
    let is_reset = says_any(&[
        b"disconnect/reset before headers",
        b"reset_before_response_started",
    ]);
    is_reset.then_some(Came::Reset)
}

/// Whether a body is the proxy's own, of a call that it could not deliver, and what that means.
pub fn of_call(status: u16, body: &[u8]) -> Option<Came> {
    const OWN_WORDS: [&[u8]; 3] = [
        b"upstream connect error",
        b"no healthy upstream",
        b"upstream request timeout",
    ];
    let is_own = OWN_WORDS.iter().any(|words| body.starts_with(words));
    match status {
        502..=504 if is_own => of_words(body),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
