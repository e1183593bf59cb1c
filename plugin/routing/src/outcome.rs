//! Owns what the end of a leg means: which worker is blamed or credited, what follows, and what that costs the request.
//!
//! One table for every host, engine and leg. Input: the called worker's leg ([`Leg`]), what came ([`Came`]) and the
//! request's earlier failures ([`Before`]); output: a [`Meaning`]. The table is a pure function.

use crate::fleet::Role;

/// Which leg has ended: which component runs it, and what it depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Leg {
    /// A prefill call made by the gateway.
    Prefill,
    /// A decode leg that fetches the KV of a prefill call made by the gateway.
    Decode,
    /// One worker that runs the whole request.
    Aggregated,
    /// A decode worker behind a sidecar that runs the prefill leg itself (`llmd`).
    Sidecar,
    /// A frontend that runs both legs on workers out of sight (`direct`).
    Frontend,
}

impl Leg {
    /// All legs.
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

/// How a leg ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Came {
    /// An answer with content, or an error that is an answer of the worker's own kind: see [`Came::Status`].
    Good,
    /// The host refused the call because of its content, which are the client's own bytes.
    Unsendable,
    /// The host did not make the call: no host in the cluster, or an open circuit breaker.
    NotSent,
    /// No connection was accepted: nothing began.
    Refused,
    /// The connection was reset before the first byte of an answer. A kept-alive connection that the worker had already
    /// closed looks the same.
    Reset,
    /// The answer broke off after its first byte.
    Cut,
    /// The worker answered with this status, not a 2xx.
    Status(u16),
    /// No answer, or none with content, within its deadline.
    TimedOut,
    /// A stream stalled after its first token, and no other stream of that worker has moved meanwhile.
    Silent,
    /// A stream stalled after its first token while others of that worker moved: its client may read slowly.
    Unread,
    /// 200 without content: no choice, no text, no finish reason.
    Empty,
    /// 200, and the answer reports a failure.
    FailedInside,
    /// A prefill answered 200 without the hand-off that decode needs, or with an expired one.
    NoHandoff,
    /// The worker has left the fleet.
    Left,
}

impl Came {
    /// Whether the worker certainly has not begun: a waiting hand-off is then as good as before.
    pub fn proves_unbegun(self) -> bool {
        match self {
            Self::Unsendable | Self::NotSent | Self::Refused => true,
            Self::Status(408) => false,
            // Refused because of its content, before any work.
            Self::Status(status) => (400..=499).contains(&status),
            _ => false,
        }
    }
}

/// What the request met before, and what the gateway had done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Before {
    /// The gateway had asked the worker to drop the request, or had given up the leg.
    pub called_off: bool,
    /// Resets of this leg before a first byte, since its last success.
    pub resets: usize,
    /// Another worker was already asked, after a refusal whose status may be the refusing worker's own fault.
    pub has_asked_another: bool,
}

/// The worker that an outcome is blamed on, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Blame {
    /// Neither blame nor credit.
    Nothing,
    /// Credits the worker: it works.
    Credit,
    /// The worker has too much to do: passed over for a while, never ejected for it; its cache is still considered valid.
    BackPressure,
    /// The worker is passed over for a second, never ejected for it; its cache is still considered valid.
    PassedOver,
    /// The worker accepts no connection: its cache counts as lost.
    Unreachable,
    /// The worker is suspected, until it is known whether another worker serves this request.
    Worker,
    /// Either worker of the pair may be the cause: both are suspected, until one of them succeeds with another partner.
    Pair,
}

/// The next step after an outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Follows {
    /// The client gets what came, and nothing else is tried.
    PassedOn,
    /// One other worker gets the same bytes, a hand-off included: the first worker provably never began.
    SameBytes,
    /// The leg runs again; a leg with a hand-off from its prefill on.
    Anew(LeftOut),
}

/// Which workers are left out when a leg runs again, as far as others are left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LeftOut {
    /// The worker, for good.
    Worker,
    /// The worker, unless no other is left.
    WorkerAtFirst,
    /// Both workers of the pair; where that leaves no pair, only the likelier cause.
    Pair,
}

/// What another try costs the request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Cost {
    /// A worker may have done work for it: one of `decode.recoveries`.
    #[default]
    Work,
    /// Hardly anything: one of `decode.attempts`.
    Nothing,
}

/// Meaning of an outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meaning {
    /// The worker that the outcome is blamed on.
    pub blame: Blame,
    /// The next step.
    pub follows: Follows,
    /// The price of the next step.
    pub cost: Cost,
}

impl Meaning {
    const fn new(blame: Blame, follows: Follows, cost: Cost) -> Self {
        Self {
            blame,
            follows,
            cost,
        }
    }
}

/// The table of outcomes.
pub fn judge(leg: Leg, came: Came, before: Before) -> Meaning {
    let meaning = match came {
        Came::Good => Meaning::new(Blame::Credit, Follows::PassedOn, Cost::Nothing),
        Came::Unsendable | Came::Unread => {
            Meaning::new(Blame::Nothing, Follows::PassedOn, Cost::Nothing)
        }
        Came::NotSent => Meaning::new(Blame::PassedOver, unbegun(leg), Cost::Nothing),
        Came::Refused => Meaning::new(Blame::Unreachable, unbegun(leg), Cost::Nothing),
        Came::Left => {
            let another = Follows::Anew(LeftOut::Worker);
            Meaning::new(Blame::Nothing, another, Cost::Nothing)
        }
        Came::Reset => reset(before.resets),
        Came::Cut | Came::NoHandoff => {
            let another = Follows::Anew(LeftOut::Worker);
            Meaning::new(Blame::Worker, another, Cost::Work)
        }
        Came::Silent => Meaning::new(Blame::Worker, Follows::PassedOn, Cost::Work),
        Came::TimedOut | Came::Empty | Came::FailedInside => failed(leg),
        Came::Status(status) => of_status(leg, status, before),
    };
    let is_ours = before.called_off && came != Came::Good;
    let blame = match (is_ours, leg) {
        (true, _) => Blame::Nothing,
        // A frontend's answer may be its workers' fault as well as its own.
        (false, Leg::Frontend) if meaning.blame != Blame::Credit => Blame::Nothing,
        (false, _) => meaning.blame,
    };
    Meaning { blame, ..meaning }
}

/// Nothing has begun: a waiting hand-off is as good as before.
fn unbegun(leg: Leg) -> Follows {
    match leg {
        Leg::Decode => Follows::SameBytes,
        Leg::Prefill | Leg::Aggregated | Leg::Sidecar | Leg::Frontend => {
            Follows::Anew(LeftOut::Worker)
        }
    }
}

/// The first reset of a leg may be a kept-alive connection that the worker had closed; the second counts against the
/// worker, and the third ends the retries.
fn reset(before: usize) -> Meaning {
    let again = Follows::Anew(LeftOut::WorkerAtFirst);
    match before {
        0 => Meaning::new(Blame::Nothing, again, Cost::Nothing),
        1 => Meaning::new(Blame::Worker, again, Cost::Nothing),
        _ => Meaning::new(Blame::Worker, Follows::PassedOn, Cost::Nothing),
    }
}

/// A failure that one or both of the workers may have caused, by the leg.
fn failed(leg: Leg) -> Meaning {
    match leg {
        Leg::Prefill | Leg::Aggregated | Leg::Frontend => {
            Meaning::new(Blame::Worker, Follows::Anew(LeftOut::Worker), Cost::Work)
        }
        Leg::Decode | Leg::Sidecar => {
            Meaning::new(Blame::Pair, Follows::Anew(LeftOut::Pair), Cost::Work)
        }
    }
}

fn of_status(leg: Leg, status: u16, before: Before) -> Meaning {
    match status {
        // A full queue, not a fault.
        429 => Meaning::new(Blame::BackPressure, ask_another(leg, before), Cost::Nothing),
        503 => {
            let follows = match leg {
                Leg::Sidecar | Leg::Decode => Follows::Anew(LeftOut::Pair),
                Leg::Prefill | Leg::Aggregated | Leg::Frontend => Follows::Anew(LeftOut::Worker),
            };
            Meaning::new(Blame::BackPressure, follows, Cost::Nothing)
        }
        // A request that one worker refuses with such a status would be refused by others too.
        _ if is_the_requests_own(status) => {
            Meaning::new(Blame::Nothing, Follows::PassedOn, Cost::Nothing)
        }
        // Like other 4xx, but after a timeout: the worker may have begun.
        408 => {
            let follows = match ask_another(leg, before) {
                Follows::SameBytes => Follows::Anew(LeftOut::Worker),
                other => other,
            };
            Meaning::new(suspected(leg), follows, Cost::Work)
        }
        // A wrong key, another model's or host's name: the worker's own fault if another worker takes the request.
        400..=499 => Meaning::new(suspected(leg), ask_another(leg, before), Cost::Nothing),
        // 5xx. Redirects and protocol switches count too: neither is an answer to a request for text.
        _ => failed(leg),
    }
}

/// Whether a status concerns the request itself, whichever worker answers: its syntax, size, media type or fields.
fn is_the_requests_own(status: u16) -> bool {
    matches!(status, 400 | 409 | 411 | 413..=417 | 422 | 428 | 431 | 451)
}

/// Whether a status is one worker's own refusal, after which one other worker is asked.
pub fn is_one_workers_refusal(status: u16) -> bool {
    (400..=499).contains(&status) && !is_the_requests_own(status)
}

/// Behind a sidecar, an error may come from either worker.
fn suspected(leg: Leg) -> Blame {
    match leg {
        Leg::Sidecar => Blame::Pair,
        Leg::Prefill | Leg::Decode | Leg::Aggregated | Leg::Frontend => Blame::Worker,
    }
}

/// One other worker is asked; its answer is passed on.
fn ask_another(leg: Leg, before: Before) -> Follows {
    match (before.has_asked_another, leg) {
        (true, _) => Follows::PassedOn,
        (false, Leg::Decode) => Follows::SameBytes,
        (false, Leg::Sidecar) => Follows::Anew(LeftOut::Pair),
        (false, _) => Follows::Anew(LeftOut::Worker),
    }
}

/// Meaning of the proxy's own text about a leg that it could not deliver: a response's details, with underscores for
/// blanks, or the body of its answer to a call.
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

/// Meaning of a call's body, where the proxy itself wrote it because it could not deliver the call.
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
