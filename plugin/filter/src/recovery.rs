//! Owns what happens when a decode leg has failed before its client has read anything: other workers are called in its place,
//! and what they answer goes to the client in one piece, as the events of a stream too. Nothing can be forwarded twice: so
//! these are calls of the root's.

use std::rc::Rc;
use std::time::Duration;

use routing::answer::{Form, Watch};
use routing::fleet::WorkerId;
use routing::route::{Cost, Dispatch, Failed, Outcome, Plan, PrefillAnswer, Refusal, Seat};

use crate::calls::{self, Asked, Call, Task, headers_for_client};
use crate::gateway::Gateway;
use crate::host::{self, Header};
use crate::prefill_call::{self, Job};
use crate::response;
use crate::stream::{Beside, Doom, Response, Stage, Stream};
use crate::telemetry::Leg;

/// How long an answer in one piece may take where nothing says how long it may be.
const LONGEST: Duration = Duration::from_secs(600);

/// How a decode leg failed, which is the client's answer where nobody can take its place.
pub enum Failure {
    /// Its worker answered with an error, which is held back.
    Status,
    /// The worker that was called in its place answered with an error.
    Told {
        /// Its status.
        status: u16,
        /// Its headers, as far as they concern a client.
        headers: Vec<Header>,
        /// Its body.
        body: Vec<u8>,
    },
    /// No worker took the connection.
    Unreached,
    /// Its worker broke the connection off before it answered.
    Broken,
    /// Its worker said nothing for too long.
    Silent,
    /// Its worker ended the answer without having said anything.
    Empty,
    /// One of its workers is in the fleet no more.
    Left,
    /// The prefill beside it failed.
    Prefill(Refusal),
}

impl Failure {
    /// In words, for the log.
    fn name(&self) -> &'static str {
        match self {
            Self::Status | Self::Told { .. } => "an error",
            Self::Unreached => "no connection",
            Self::Broken => "its connection broke off",
            Self::Silent => "silence",
            Self::Empty => "an empty answer",
            Self::Left => "its worker has left",
            Self::Prefill(_) => "its prefill failed",
        }
    }

    fn setback(&self) -> Setback {
        match self {
            Self::Status | Self::Told { .. } => Setback::Error,
            Self::Unreached => Setback::Unreached,
            Self::Broken => Setback::Broken,
            Self::Silent | Self::Empty => Setback::Mute,
            Self::Left => Setback::Left,
            Self::Prefill(_) => Setback::Prefill,
        }
    }
}

/// What went wrong last: who is left out from now on follows from it, and what the budget is charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Setback {
    /// Nobody took the connection.
    Unreached,
    /// The connection broke off.
    Broken,
    /// An error was answered; its prefill may be the reason.
    Error,
    /// Nothing was said.
    Mute,
    /// A worker is in the fleet no more.
    Left,
    /// The prefill beside failed.
    Prefill,
}

impl Setback {
    /// Whether it was the decode leg that failed.
    fn is_decodes(self) -> bool {
        match self {
            Self::Unreached | Self::Broken | Self::Error | Self::Mute => true,
            Self::Left | Self::Prefill => false,
        }
    }

    fn cost(self) -> Cost {
        match self {
            Self::Unreached | Self::Left => Cost::Nothing,
            Self::Broken | Self::Error | Self::Mute | Self::Prefill => Cost::Work,
        }
    }
}

/// A call that stands in for a decode leg.
pub struct DecodeCall {
    client: Rc<Stream>,
    attempt: u32,
    failure: Failure,
}

/// Hands a failed decode leg to the root, and holds everything back meanwhile. To be called from the stream's own callback.
pub fn begin(gateway: &Gateway, client: &Rc<Stream>, failure: Failure) {
    client.stage.set(Stage::Recovering);
    let submitted = calls::submit(gateway, Task::Recover(Rc::clone(client), failure));
    if let Err(error) = submitted {
        log::error!("[{}] cannot be recovered: {error}", client.request_id());
        client.refuse(gateway, &Refusal::Internal);
    }
}

/// Places the request again, or gives up. To be called on the root.
pub fn recover(gateway: &Gateway, client: &Rc<Stream>, failure: Failure) {
    let setback = failure.setback();
    place_again(gateway, client, setback, failure);
}

/// Places the request again after this `setback`. Where that cannot be done the client is told of the `failure`.
fn place_again(gateway: &Gateway, client: &Rc<Stream>, setback: Setback, failure: Failure) {
    if client.stage.get() == Stage::Ended || !client.enter() {
        return;
    }
    client.stage.set(Stage::Recovering);
    client.leave_pair(gateway);
    if setback.is_decodes() && client.seat.borrow().prefill.is_some() {
        gateway.telemetry.handoff_failed(Leg::Decode);
    }
    let Some(plan) = plan(gateway, client, setback) else {
        give_up(gateway, client, &failure);
        return;
    };
    let id = client.request_id();
    log::warn!(
        "[{id}] its decode leg failed ({}, {setback:?} last) and is replaced",
        failure.name()
    );
    gateway.telemetry.recovered();
    match plan {
        Plan::Prefill(phase, seat) => {
            client.sit(seat);
            client.failure.replace(Some(failure));
            prefill_call::start(gateway, Job::new(gateway, phase, client));
        }
        Plan::Forward(dispatch, seat) => {
            client.sit(seat);
            call_decode(gateway, client, &dispatch, failure);
        }
        Plan::Answer(_) | Plan::Wait(_) => give_up(gateway, client, &failure),
    }
}

fn plan(gateway: &Gateway, client: &Stream, setback: Setback) -> Option<Plan> {
    let recovery = client.seat.borrow_mut().take_recovery()?;
    let spare = client.spare.borrow();
    let body = &spare.as_ref()?.body;
    let failed = Failed {
        workers: &failed(gateway, client, setback),
        otherwise: &otherwise(client, setback),
        frontends: &client.destinations.borrow(),
        cost: setback.cost(),
    };
    let mut router = gateway.router.borrow_mut();
    router.recover(recovery, &failed, body, host::now())
}

/// Who failed: the leg that did is blamed, and no other.
fn failed(gateway: &Gateway, client: &Stream, setback: Setback) -> Vec<WorkerId> {
    let seat = client.seat.borrow();
    let worker = match setback {
        Setback::Unreached | Setback::Broken => {
            let router = gateway.router.borrow();
            return router.decoders_at(&client.destinations.borrow());
        }
        Setback::Prefill => &seat.prefill,
        // Nobody is to blame, and who has left is not picked.
        Setback::Left => &None,
        Setback::Error | Setback::Mute => &seat.decode,
    };
    worker.iter().map(|worker| worker.id).collect()
}

/// Who is left out where everybody else has failed.
fn otherwise(client: &Stream, setback: Setback) -> Vec<WorkerId> {
    let seat = client.seat.borrow();
    let worker = match setback {
        // It may have failed for its prefill's sake.
        Setback::Error => &seat.prefill,
        // Nobody tells who of the list a call has reached: the first, as a rule.
        Setback::Unreached | Setback::Broken => &seat.decode,
        Setback::Mute | Setback::Left | Setback::Prefill => &None,
    };
    worker.iter().map(|worker| worker.id).collect()
}

/// Calls a decode worker in place of the one that failed; prefill, where there is one, has been seen to. To be called on the
/// root.
pub fn call_decode(gateway: &Gateway, client: &Rc<Stream>, dispatch: &Dispatch, failure: Failure) {
    client.destinations.replace(dispatch.destinations.clone());
    match try_to_call(gateway, client, dispatch) {
        Some(token) => {
            let call = Call::Decode(DecodeCall {
                client: Rc::clone(client),
                attempt: client.attempt.get(),
                failure,
            });
            gateway.calls.borrow_mut().run(token, call);
        }
        None => give_up(gateway, client, &failure),
    }
}

fn try_to_call(gateway: &Gateway, client: &Stream, dispatch: &Dispatch) -> Option<u32> {
    let spare = client.spare.borrow();
    let asked = Asked {
        id: client.request_id(),
        headers: &client.headers(),
        body: &spare.as_ref()?.body,
    };
    let timeout = dispatch.patience.whole.unwrap_or(LONGEST);
    calls::call_decode(gateway, dispatch, &asked, timeout)
}

/// Takes the answer of a worker that was called in place of another. To be called on the root.
pub fn answered(gateway: &Gateway, call: DecodeCall, answer: PrefillAnswer<'_>) {
    let DecodeCall {
        client,
        attempt,
        failure,
    } = call;
    if !client.waits_for(attempt) {
        return;
    }
    let mut kept = headers_for_client();
    let outcome = outcome(answer, &kept);
    response::heard(gateway, &client, outcome);
    match (outcome, answer) {
        (Outcome::Good | Outcome::Overloaded, PrefillAnswer::Whole { status, body }) => {
            if status < 300 {
                client.answer_begins();
            }
            client.next_attempt();
            kept.extend(response::names(gateway, &client.seat.borrow()));
            // Of several nobody tells which one the call has reached.
            if gateway.config.response_headers
                && let [address] = client.destinations.borrow().as_slice()
            {
                kept.push(response::served(*address));
            }
            if client.enter() {
                if status < 300 {
                    client.answered_whole(gateway, body, form(&kept));
                }
                let body = client.rewritten(body, form(&kept));
                client.answer(u32::from(status), &kept, &body);
                client.seat.borrow_mut().release();
            }
        }
        _ => {
            let setback = setback(answer, &kept);
            let failure = last(failure, answer, kept);
            place_again(gateway, &client, setback, failure);
        }
    }
}

/// What has become of a call that was to stand in.
fn setback(answer: PrefillAnswer<'_>, headers: &[Header]) -> Setback {
    match answer {
        PrefillAnswer::NotSent => Setback::Unreached,
        PrefillAnswer::Broken => Setback::Broken,
        PrefillAnswer::Whole { status: 503, body } if !is_json(headers) => {
            match took_no_connection(body) {
                true => Setback::Unreached,
                false => Setback::Broken,
            }
        }
        PrefillAnswer::Whole { status: 504, .. } if !is_json(headers) => Setback::Mute,
        PrefillAnswer::Whole { status: 500.., .. } => Setback::Error,
        PrefillAnswer::Whole { .. } => Setback::Mute,
    }
}

/// Whether the proxy's words about a request that it could not deliver say that nobody took the connection: its answer to a call,
/// or the details of a response, in which blanks are underscores. Of one that broke off, or was refused for another reason, work may
/// have been done.
pub fn took_no_connection(words: &[u8]) -> bool {
    const REASONS: [&[u8]; 4] = [
        b"connection failure",
        b"connection_failure",
        b"connection timeout",
        b"connection_timeout",
    ];
    let says = |reason: &&[u8]| words.windows(reason.len()).any(|part| part == *reason);
    REASONS.iter().any(says)
}

/// Whether a worker has said it: the proxy's own words about one that it could not reach are no JSON.
fn is_json(headers: &[Header]) -> bool {
    let is_so =
        |(name, value): &Header| name == b"content-type" && value.starts_with(b"application/json");
    headers.iter().any(is_so)
}

/// What the client is told if nobody else can be found: what a worker said last. One that is still held back stays as it is.
fn last(before: Failure, answer: PrefillAnswer<'_>, headers: Vec<Header>) -> Failure {
    match answer {
        PrefillAnswer::Whole {
            status: status @ 500..,
            body,
        } if !matches!(before, Failure::Status) && is_json(&headers) => Failure::Told {
            status,
            headers,
            body: body.to_vec(),
        },
        _ => before,
    }
}

/// What an answer says of the worker: also one that is a success and says nothing is a failure.
fn outcome(answer: PrefillAnswer<'_>, headers: &[Header]) -> Outcome {
    let PrefillAnswer::Whole { status, body } = answer else {
        return Outcome::Failed;
    };
    match status {
        200..=299 => match says_something(headers, body) {
            true => Outcome::Good,
            false => Outcome::Failed,
        },
        429 => Outcome::Overloaded,
        400..=499 => Outcome::Good,
        503 => Outcome::Unreachable,
        _ => Outcome::Failed,
    }
}

fn form(headers: &[Header]) -> Form {
    let kind = headers.iter().find(|(name, _)| name == b"content-type");
    kind.map_or(Form::Whole, |(_, kind)| Form::of(kind))
}

fn says_something(headers: &[Header], body: &[u8]) -> bool {
    let mut watch = Watch::new(form(headers));
    watch.read(body);
    watch.has_answered() && !watch.is_error_alone()
}

/// Nobody can take the failed worker's place: its failure is the client's answer. To be called on the root.
pub fn give_up(gateway: &Gateway, client: &Rc<Stream>, failure: &Failure) {
    if client.stage.get() == Stage::Ended || !client.enter() {
        return;
    }
    client.next_attempt();
    let unreached = Refusal::Unreachable {
        what: "decode worker",
        tried: client.destinations.borrow().len(),
    };
    match failure {
        Failure::Status => {
            client.stage.set(Stage::Forwarded);
            client.response.set(Response::Flowing);
            client.clock.stir();
            client.seat.borrow_mut().release();
            client.resume_response();
        }
        Failure::Told {
            status,
            headers,
            body,
        } => {
            client.answer(u32::from(*status), headers, body);
            client.seat.borrow_mut().release();
        }
        Failure::Unreached | Failure::Broken => client.refuse(gateway, &unreached),
        Failure::Silent => client.refuse(gateway, &Refusal::DecodeTimeout),
        Failure::Empty => client.refuse(gateway, &Refusal::EmptyAnswer),
        Failure::Left => client.refuse(gateway, &Refusal::WorkerLeft),
        Failure::Prefill(refusal) => client.refuse(gateway, refusal),
    }
}

/// Sees to the streams whose workers are late, and to those whose answers must end badly. Called at each tick.
pub fn see_to_late(gateway: &Gateway) {
    for client in gateway.late_or_doomed() {
        if !client.enter() {
            continue;
        }
        if client.doom.borrow().is_some() {
            see_to_doomed(gateway, &client);
            continue;
        }
        response::note_asked(&client);
        response::heard(gateway, &client, Outcome::Failed);
        match client.response.get() {
            Response::Awaited | Response::Held => recover(gateway, &client, Failure::Silent),
            Response::Complete | Response::Flowing | Response::EndHeld => {
                log::warn!("[{}] its worker fell silent", client.request_id());
                client.break_off(gateway, "silent");
            }
        }
    }
}

/// Sees to the streams whose clients have read nothing and wait for a worker that has left the fleet: they are not left to its
/// deadline.
pub fn see_to_left(gateway: &Gateway) {
    let left = gateway.who_left();
    if left.is_empty() {
        return;
    }
    prefill_call::replace_left(gateway, &left);
    if !gateway.router.borrow().can_serve_any() {
        // Nobody could take over, and an answer may still come.
        return;
    }
    for client in gateway.waiting_for(&left) {
        if client.may_recover() && client.enter() {
            recover(gateway, &client, Failure::Left);
        }
    }
}

fn see_to_doomed(gateway: &Gateway, client: &Stream) {
    let doom = client.doom.take();
    match doom {
        Some(Doom { refusal, ticks: 0 }) => client.break_off(gateway, refusal.code()),
        Some(Doom { refusal, ticks }) => {
            let ticks = ticks.saturating_sub(1);
            client.doom.replace(Some(Doom { refusal, ticks }));
        }
        None => {}
    }
}

impl Stream {
    /// It is placed anew; what it is counted under stays.
    fn sit(&self, mut seat: Seat) {
        seat.facts = std::mem::take(&mut self.seat.borrow_mut().facts);
        self.seat.replace(seat);
    }

    /// The workers that have it now are to be so no more: what they hold for it is given up.
    fn leave_pair(&self, gateway: &Gateway) {
        self.next_attempt();
        self.beside.set(Beside::Nothing);
        self.call_off(gateway);
        if let Some(blocks) = self.staged.take() {
            gateway.telemetry.leaked(blocks);
        }
    }
}
