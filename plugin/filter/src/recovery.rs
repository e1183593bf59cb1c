//! Owns the recovery of a decode leg that has failed before its client has read anything: other workers are called in its place,
//! and their answer goes to the client in one piece, event streams included. A request cannot be forwarded twice, so the root
//! makes these calls.

use std::rc::Rc;
use std::time::Duration;

use routing::answer::{Form, Reader, Verdict};
use routing::budget::Share;
use routing::fleet::WorkerId;
use routing::outcome::{Came, Follows, Leg, Meaning};
use routing::route::fate::Handed;
use routing::route::{Assignment, Dispatch, Failed, Plan, PrefillAnswer, Refusal};

use crate::calls::{self, Call, ClientRequest, RootTask, headers_for_client};
use crate::cleanup;
use crate::host::{self, Header};
use crate::pool_runtime::PoolRuntime;
use crate::prefill_call::{self, Job};
use crate::response;
use crate::stream::{ConcurrentPrefill, PendingReset, Response, Stage, Stream};
use crate::telemetry;

/// Timeout of an answer in one piece, if the dispatch has none.
const LONGEST: Duration = Duration::from_secs(600);

/// How a decode leg failed; the client's answer if no worker can take its place.
pub enum Failure {
    /// The worker answered with an error, which is held back.
    Status,
    /// The replacement worker answered with an error.
    AnsweredWithError {
        /// Status of the error.
        status: u16,
        /// Headers of the error, as far as they concern a client.
        headers: Vec<Header>,
        /// Body of the error.
        body: Vec<u8>,
    },
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
    /// The concurrent prefill failed, or the request cannot be sent.
    Refused(Refusal),
}

impl Failure {
    /// In words, for the log.
    fn name(&self) -> &'static str {
        match self {
            Self::Status | Self::AnsweredWithError { .. } | Self::Unusable { .. } => "an error",
            Self::Unreached => "no connection",
            Self::Broken => "its connection broke off",
            Self::Silent => "silence",
            Self::Empty => "an empty answer",
            Self::Left => "its worker has left",
            Self::Refused(_) => "its prefill failed",
        }
    }
}

/// How a leg has ended.
#[derive(Clone, Copy)]
pub struct LegEnd {
    /// The leg.
    pub leg: Leg,
    /// What came of the leg.
    pub came: Came,
    /// What the outcome means.
    pub meaning: Meaning,
}

/// A call in place of a decode leg.
pub struct DecodeCall {
    client: Rc<Stream>,
    attempt: u32,
    failure: Failure,
    /// The body's bytes count until the call has ended.
    _share: Option<Rc<Share>>,
}

/// Hands a failed decode leg to the root, and holds everything back meanwhile. Called from the stream's own callback.
pub fn begin(runtime: &PoolRuntime, client: &Rc<Stream>, failure: Failure, end: LegEnd) {
    client.stage.set(Stage::Recovering);
    let submitted = calls::submit(runtime, RootTask::Recover(Rc::clone(client), failure, end));
    if let Err(error) = submitted {
        log::error!("[{}] cannot be recovered: {error}", client.ids());
        client.refuse(runtime, &Refusal::Internal);
    }
}

/// Routes the request again after this `end` of a leg. If that is not possible, the client gets the `failure`. Called on the
/// root.
pub fn recover(runtime: &PoolRuntime, client: &Rc<Stream>, failure: Failure, end: LegEnd) {
    if client.stage.get() == Stage::Ended {
        return;
    }
    client.stage.set(Stage::Recovering);
    client.leave_pair(runtime);
    if !client.enter() {
        return;
    }
    if end.leg != Leg::Prefill && client.assignment.borrow().prefill.is_some() {
        runtime
            .telemetry
            .handoff_failed(telemetry::CalledLeg::Decode);
    }
    let Some(plan) = plan(runtime, client, end) else {
        give_up(runtime, client, &failure);
        return;
    };
    let id = client.ids();
    log::warn!(
        "[{id}] its decode leg failed ({}, {:?} last) and is replaced",
        failure.name(),
        end.came
    );
    runtime.telemetry.recovered();
    match plan {
        Plan::Prefill(phase, assignment) => {
            client.sit(runtime, assignment);
            client.failure.replace(Some(failure));
            prefill_call::start(runtime, Job::new(runtime, phase, client));
        }
        Plan::Forward(dispatch, assignment) => {
            client.sit(runtime, assignment);
            call_decode(runtime, client, &dispatch, failure);
        }
        Plan::Answer(_) | Plan::Wait(_) => give_up(runtime, client, &failure),
    }
}

fn plan(runtime: &PoolRuntime, client: &Stream, end: LegEnd) -> Option<Plan> {
    let replay_buffer = client.replay_buffer.borrow();
    let body = &replay_buffer.as_ref()?.body;
    let failed = Failed {
        leg: end.leg,
        meaning: end.meaning,
        workers: &asked(runtime, client, end),
        frontends: &client.destinations.borrow(),
    };
    let mut router = runtime.router.borrow_mut();
    let mut assignment = client.assignment.borrow_mut();
    router.recover(&mut assignment, &failed, body, runtime.vm.now())
}

/// Workers that were asked for the failed leg, in their order.
fn asked(runtime: &PoolRuntime, client: &Stream, end: LegEnd) -> Vec<WorkerId> {
    let assignment = client.assignment.borrow();
    let worker = match (end.leg, end.came) {
        (Leg::Prefill, _) => &assignment.prefill,
        (_, Came::Refused | Came::NotSent | Came::Reset | Came::Cut) => {
            let router = runtime.router.borrow();
            return router.decoders_at(&client.destinations.borrow());
        }
        // A worker that has left is not picked.
        (_, Came::Left) => &None,
        (_, _) => &assignment.decode,
    };
    worker.iter().map(|worker| worker.id).collect()
}

/// Calls a decode worker in place of the one that failed; prefill, if any, is done or under way. Called on the root.
pub fn call_decode(
    runtime: &PoolRuntime,
    client: &Rc<Stream>,
    dispatch: &Dispatch,
    failure: Failure,
) {
    client.destinations.replace(dispatch.destinations.clone());
    let call = DecodeCall {
        client: Rc::clone(client),
        attempt: client.attempt.get(),
        failure,
        _share: client.share(),
    };
    match try_to_call(runtime, client, dispatch) {
        Ok(token) => runtime.calls.borrow_mut().run(token, Call::Decode(call)),
        Err(answer) => answered(runtime, call, answer),
    }
}

fn try_to_call(
    runtime: &PoolRuntime,
    client: &Stream,
    dispatch: &Dispatch,
) -> Result<u32, PrefillAnswer<'static>> {
    let replay_buffer = client.replay_buffer.borrow();
    let asked = ClientRequest {
        id: client.request_id(),
        headers: &client.headers(),
        body: &replay_buffer.as_ref().ok_or(PrefillAnswer::NotSent)?.body,
    };
    let timeout = dispatch.patience.whole.unwrap_or(LONGEST);
    calls::call_decode(runtime, dispatch, &asked, timeout)
}

/// Handles the answer of a replacement worker. Called on the root.
pub fn answered(runtime: &PoolRuntime, call: DecodeCall, answer: PrefillAnswer<'_>) {
    let DecodeCall {
        client,
        attempt,
        failure,
        _share,
    } = call;
    if !client.waits_for(attempt) {
        return;
    }
    let kept = headers_for_client();
    let end = response::ended(runtime, &client, came(answer, &kept));
    match (end.meaning.follows, end.came, answer) {
        (
            Follows::PassedOn,
            Came::Good | Came::Status(_),
            PrefillAnswer::Whole { status, body },
        ) => reply(runtime, &client, status, kept, body),
        (Follows::PassedOn, Came::Unsendable, _) => {
            give_up(runtime, &client, &Failure::Refused(Refusal::Unsendable));
        }
        _ => {
            let failure = last(failure, end.came, answer, kept);
            recover(runtime, &client, failure, end);
        }
    }
}

/// A good answer to a call, held while the concurrent prefill is not known to be good.
pub struct HeldReply {
    status: u16,
    headers: Vec<Header>,
    body: Vec<u8>,
    _share: Share,
}

/// Delivers an answer; a good one not before the concurrent prefill is known to be good.
fn reply(
    runtime: &PoolRuntime,
    client: &Rc<Stream>,
    status: u16,
    headers: Vec<Header>,
    body: &[u8],
) {
    if status >= 300 || client.concurrent_prefill.get() == ConcurrentPrefill::Nothing {
        return deliver(runtime, client, status, headers, body);
    }
    let Some(share) = runtime.hold_replay_buffer(body.len()) else {
        client.leave_pair(runtime);
        return give_up(runtime, client, &Failure::Refused(Refusal::Busy));
    };
    client.held_reply.replace(Some(HeldReply {
        status,
        headers,
        body: body.to_vec(),
        _share: share,
    }));
}

/// Delivers the held answer, if there is one: the concurrent prefill is good.
pub fn deliver_held(runtime: &PoolRuntime, client: &Rc<Stream>) {
    if let Some(held) = client.held_reply.take() {
        deliver(runtime, client, held.status, held.headers, &held.body);
    }
}

/// Delivers an answer to the client.
fn deliver(
    runtime: &PoolRuntime,
    client: &Rc<Stream>,
    status: u16,
    mut kept: Vec<Header>,
    body: &[u8],
) {
    match status {
        ..300 => client.answer_begins(runtime),
        300.. => cleanup::give_up(runtime, client),
    }
    client.next_attempt();
    kept.extend(response::names(runtime, &client.assignment.borrow()));
    // Of several destinations, the one that the call has reached is not known.
    if runtime.config.response_headers
        && let [address] = client.destinations.borrow().as_slice()
    {
        kept.push(response::served(*address));
    }
    if client.enter() {
        if status < 300 {
            client.answered_whole(runtime, &read(&kept, body));
        }
        let body = client.rewritten(body, form(&kept));
        client.answer(u32::from(status), &kept, &body);
        client.assignment.borrow_mut().release();
    }
}

/// The client's answer if no other worker is found: what a worker said last. An error that is still held back stays as it is.
fn last(before: Failure, came: Came, answer: PrefillAnswer<'_>, headers: Vec<Header>) -> Failure {
    match (&before, came, answer) {
        (Failure::Status, ..) => before,
        (_, Came::Status(status @ 400..), PrefillAnswer::Whole { body, .. }) => {
            Failure::AnsweredWithError {
                status,
                headers,
                body: body.to_vec(),
            }
        }
        (_, Came::Status(status), _) => Failure::Unusable { status },
        _ => before,
    }
}

/// What came of a call: a success without content is a failure, too.
fn came(answer: PrefillAnswer<'_>, headers: &[Header]) -> Came {
    if let Some(came) = answer.came() {
        return came;
    }
    let PrefillAnswer::Whole { body, .. } = answer else {
        return Came::Cut;
    };
    match read(headers, body).verdict() {
        Verdict::Failed(_) => Came::FailedInside,
        Verdict::Empty => Came::Empty,
        Verdict::Nothing | Verdict::Content | Verdict::Ended(_) => Came::Good,
    }
}

fn form(headers: &[Header]) -> Form {
    Form::of(find(headers, b"content-type").unwrap_or_default())
}

fn find<'h>(headers: &'h [Header], name: &[u8]) -> Option<&'h [u8]> {
    let found = headers.iter().find(|(known, _)| known == name);
    found.map(|(_, value)| value.as_slice())
}

/// Reads a complete answer.
fn read(headers: &[Header], body: &[u8]) -> Reader {
    let kind = find(headers, b"content-type").unwrap_or_default();
    let mut reader = Reader::new(kind, find(headers, b"content-encoding"));
    reader.read(body);
    reader.finish();
    reader
}

/// Ends a request that no other worker can take: the failure is the client's answer. Called on the root.
pub fn give_up(runtime: &PoolRuntime, client: &Rc<Stream>, failure: &Failure) {
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
            client.clock.mark_activity();
            client.assignment.borrow_mut().release();
            client.resume_response();
        }
        Failure::AnsweredWithError {
            status,
            headers,
            body,
        } => {
            client.answer(u32::from(*status), headers, body);
            client.assignment.borrow_mut().release();
        }
        Failure::Unreached | Failure::Broken => client.refuse(runtime, &unreached),
        Failure::Silent => client.refuse(runtime, &Refusal::DecodeTimeout),
        Failure::Empty => client.refuse(runtime, &Refusal::EmptyAnswer),
        Failure::Left => client.refuse(runtime, &Refusal::WorkerLeft),
        Failure::Unusable { status } => {
            let status = *status;
            client.refuse(runtime, &Refusal::UnusableStatus { status });
        }
        Failure::Refused(refusal) => client.refuse(runtime, refusal),
    }
    cleanup::give_up(runtime, client);
}

/// Handles streams whose workers are late, and streams with a pending reset. Called in each round.
pub fn see_to_late(runtime: &PoolRuntime) {
    for client in runtime.late_or_doomed() {
        if !client.enter() {
            continue;
        }
        if client.pending_reset.borrow().is_some() {
            see_to_doomed(runtime, &client);
            continue;
        }
        response::note_asked(&client);
        match client.response.get() {
            Response::Awaited | Response::Held => {
                let end = response::ended(runtime, &client, Came::TimedOut);
                recover(runtime, &client, Failure::Silent, end);
            }
            Response::Complete | Response::Flowing | Response::EndHeld => {
                response::ended(runtime, &client, silence(runtime, &client));
                log::warn!("[{}] its worker fell silent", client.ids());
                client.break_off(runtime, "silent");
            }
        }
    }
}

/// Meaning of a stream's silence: if other streams of its worker have moved since, its client may read slowly.
fn silence(runtime: &PoolRuntime, client: &Stream) -> Came {
    match runtime.has_moved_since(client) {
        true => Came::Unread,
        false => Came::Silent,
    }
}

/// Recovers streams whose clients have read nothing and wait for a worker that has left the fleet, without waiting for its
/// deadline.
pub fn see_to_left(runtime: &PoolRuntime) {
    let left = runtime.departed_workers();
    if left.is_empty() {
        return;
    }
    prefill_call::replace_left(runtime, &left);
    if !runtime.router.borrow().can_serve_any() {
        // No worker could take over, and an answer may still come.
        return;
    }
    for client in runtime.waiting_for(&left) {
        if client.may_recover() && client.enter() {
            let end = response::ended(runtime, &client, Came::Left);
            recover(runtime, &client, Failure::Left, end);
        }
    }
}

fn see_to_doomed(runtime: &PoolRuntime, client: &Stream) {
    let pending_reset = client.pending_reset.take();
    match pending_reset {
        Some(PendingReset { refusal, ticks: 0 }) => client.break_off(runtime, refusal.code()),
        Some(PendingReset { refusal, ticks }) => {
            let ticks = ticks.saturating_sub(1);
            client
                .pending_reset
                .replace(Some(PendingReset { refusal, ticks }));
        }
        None => {}
    }
}

impl Stream {
    /// Assigns the request anew; the facts that it is counted under stay.
    fn sit(&self, runtime: &PoolRuntime, mut assignment: Assignment) {
        assignment.facts = std::mem::take(&mut self.assignment.borrow_mut().facts);
        let kept = assignment.staged_blocks();
        if kept.is_none() {
            cleanup::tell_of_handed(runtime, self);
        }
        self.handed.set(kept.map(Handed::over));
        self.assignment.replace(assignment);
    }

    /// Leaves the present workers, and calls off what they are doing for the request. Changes the effective context.
    fn leave_pair(&self, runtime: &PoolRuntime) {
        self.next_attempt();
        self.concurrent_prefill.set(ConcurrentPrefill::Nothing);
        // The root makes the call, so that the answer finds its caller.
        if self.abort.borrow().is_some()
            && host::enter_context(runtime.root_id).is_ok()
            && let Some(token) = self.abort_prefill(runtime)
        {
            runtime.calls.borrow_mut().run(token, Call::Abort);
        }
    }
}
