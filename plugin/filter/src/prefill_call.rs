//! Owns the prefill leg: a call that must outlive its client, and the leg that cleans up after one who has left.
//!
//! The call belongs to the root context, and so must its answer: the SDK drops the answer to a call made from a stream
//! that is gone, and with it the only knowledge of the KV blocks that the worker holds. So a stream puts its job into a
//! list, wakes the root through a shared queue that only this VM listens to, and the root makes the call.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::fleet::Worker;
use routing::handoff::terminal::Terminal;
use routing::route::{AfterPrefill, CleanUpLeg, Client, PrefillAnswer, PrefillPhase, Refusal};

use crate::gateway::Gateway;
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};
use crate::shared;
use crate::stream::{Beside, Estate, Stage, Stream, destination_headers};

/// A prefill leg and the stream that it is for.
struct Job {
    phase: PrefillPhase,
    client: Rc<Stream>,
}

/// A call that has been made.
enum Call {
    /// A prefill leg.
    Prefill(Box<Job>),
    /// The leg that fetches what a client has left behind.
    CleanUp {
        /// Blocks that leak if it fails.
        blocks: u64,
        request_id: String,
        /// Its bytes count until the call has ended: the proxy holds them.
        _estate: Estate,
    },
}

/// The jobs of one root context.
#[derive(Default)]
pub struct Calls {
    queue: Option<u32>,
    waiting: VecDeque<Job>,
    running: HashMap<u32, Call>,
}

impl Calls {
    /// The queue that wakes the root, registered when it is first needed: registering leaves a trace in the proxy, and
    /// a configuration may only be on trial.
    fn queue(&mut self) -> Result<u32, HostError> {
        if let Some(queue) = self.queue {
            return Ok(queue);
        }
        let queue =
            host::register_queue(&format!("pd_router.calls.{:x}", shared::unique_number()))?;
        self.queue = Some(queue);
        Ok(queue)
    }
}

/// Hands a job to the root. To be called from the stream's own callback.
///
/// # Errors
/// When the host would not carry the message: the job is gone then.
pub fn submit(
    gateway: &Gateway,
    phase: PrefillPhase,
    client: &Rc<Stream>,
) -> Result<(), HostError> {
    let mut calls = gateway.calls.borrow_mut();
    let queue = calls.queue()?;
    host::enqueue(queue, b"")?;
    calls.waiting.push_back(Job {
        phase,
        client: Rc::clone(client),
    });
    Ok(())
}

/// Starts the jobs that wait. Called on the root, when its queue has a message.
pub fn start_waiting(gateway: &Gateway, queue: u32) {
    while host::dequeue(queue).is_some() {}
    loop {
        let job = gateway.calls.borrow_mut().waiting.pop_front();
        match job {
            Some(job) => start(gateway, job),
            None => break,
        }
    }
    gateway.report_load();
}

/// Takes the answer to a call; false where the token is another's.
pub fn answered(gateway: &Gateway, token: u32, has_headers: bool) -> bool {
    let call = gateway.calls.borrow_mut().running.remove(&token);
    let Some(call) = call else {
        return false;
    };
    let body = match has_headers {
        true => host::buffer(Buffer::CallResponse).unwrap_or_default(),
        false => Vec::new(),
    };
    let answer = match has_headers {
        true => PrefillAnswer::Whole {
            status: call_status(),
            body: &body,
        },
        false => PrefillAnswer::Broken,
    };
    match call {
        Call::Prefill(job) => proceed(gateway, *job, answer),
        Call::CleanUp {
            blocks, request_id, ..
        } => cleaned_up(gateway, answer, blocks, &request_id),
    }
    gateway.report_load();
    true
}

/// The status of the answer; 502 where there is none that can be read.
fn call_status() -> u16 {
    let status = host::header(Map::CallResponse, ":status");
    status
        .and_then(|value| std::str::from_utf8(&value).ok()?.parse().ok())
        .unwrap_or(502)
}

/// Calls the job's prefill worker, unless the client has left: then nothing runs.
fn start(gateway: &Gateway, job: Job) {
    if job.client.stage.get() != Stage::Prefilling || !job.client.enter() {
        return;
    }
    let Some(token) = make_call(gateway, &job) else {
        proceed(gateway, job, PrefillAnswer::NotSent);
        return;
    };
    gateway.telemetry.prefill_called();
    decode_beside(gateway, &job);
    gateway
        .calls
        .borrow_mut()
        .running
        .insert(token, Call::Prefill(Box::new(job)));
}

/// Where both legs run at once, decode is due as soon as prefill has been called.
fn decode_beside(gateway: &Gateway, job: &Job) {
    let dispatch = job.phase.decode_beside(&mut gateway.router.borrow_mut());
    if let Some(dispatch) = dispatch
        && job.client.enter()
    {
        job.client.beside.set(Beside::Running);
        job.client.abort.replace(job.phase.abort_leg());
        job.client.go_on(gateway, &dispatch);
    }
}

fn make_call(gateway: &Gateway, job: &Job) -> Option<u32> {
    let destination = job.phase.destination()?.to_string();
    let (cluster, timeout) = {
        let router = gateway.router.borrow();
        let pool = router.pool();
        (
            pool.clusters.prefill.clone(),
            Duration::from_millis(u64::from(pool.prefill.timeout_ms)),
        )
    };
    let read = host::headers(Map::Request)
        .and_then(|headers| Ok((headers, host::buffer(Buffer::Request)?)));
    // The call must be the root's: the client's context may be gone when the answer comes.
    host::enter_context(gateway.root_id).ok()?;
    let (client_headers, client_body) = read.ok()?;

    let mut own = job.phase.headers();
    own.push((headers::DESTINATION, destination));
    own.push((headers::REQUEST_ID, job.client.request_id().to_owned()));
    let sent = with_clients_headers(&client_headers, &own);
    let called = host::call(&cluster, sent, Some(&job.phase.body(&client_body)), timeout);
    called
        .inspect_err(|status| {
            let worker = &job.phase.worker().name;
            log::warn!(
                "[{}] prefill worker {worker} could not be called: {status:?}",
                job.client.request_id()
            );
        })
        .ok()
}

/// The client's headers, as far as they are about the request, with our own set in their place.
fn with_clients_headers<'h>(
    clients: &'h [Header],
    own: &'h [(&'static str, String)],
) -> Vec<(&'h str, &'h str)> {
    let is_own = |name: &str| own.iter().any(|(set, _)| *set == name);
    let kept = clients
        .iter()
        .filter_map(as_text)
        .filter(|(name, _)| headers::goes_on_the_prefill_leg(name.as_bytes()) && !is_own(name));
    kept.chain(own.iter().map(|(name, value)| (*name, value.as_str())))
        .collect()
}

/// The SDK's calls carry text only; a header that is not text stays behind.
fn as_text((name, value): &Header) -> Option<(&str, &str)> {
    Some((
        std::str::from_utf8(name).ok()?,
        std::str::from_utf8(value).ok()?,
    ))
}

/// What follows from an answer.
fn proceed(gateway: &Gateway, job: Job, answer: PrefillAnswer<'_>) {
    let Job { phase, client } = job;
    let worker = Rc::clone(phase.worker());
    let waits = match client.is_open() {
        true => Client::Waits,
        false => Client::Left,
    };
    gateway.advance();
    let after = phase.answered(answer, waits, &mut gateway.router.borrow_mut());
    match after {
        AfterPrefill::Again(phase) => try_another(gateway, Job { phase, client }, &worker, answer),
        AfterPrefill::Decode {
            dispatch,
            blocks,
            target: (worker, key),
        } => {
            if !client.enter() {
                gateway.telemetry.leaked(blocks);
                return;
            }
            gateway
                .router
                .borrow_mut()
                .seat_decode(&mut client.seat.borrow_mut(), &worker, key);
            client.staged.set(Some(blocks));
            client.go_on(gateway, &dispatch);
        }
        AfterPrefill::Whole { dispatch, fallback } => {
            log::warn!(
                "[{}] runs whole: {} ({answer})",
                client.request_id(),
                fallback.name()
            );
            gateway.telemetry.fell_back(fallback.name());
            if client.enter() {
                client.go_on(gateway, &dispatch);
            }
        }
        AfterPrefill::Good => client.prefill_is_good(),
        AfterPrefill::Answer => pass_on(gateway, &client, answer),
        AfterPrefill::Terminal(terminal) => end_here(&client, terminal),
        AfterPrefill::Refused(refusal) => refused(gateway, &client, &refusal),
        AfterPrefill::CleanUp(leg) => clean_up(gateway, &client, &leg, &worker),
        AfterPrefill::Leaked { blocks } => leaked(gateway, &client, blocks, &worker),
        AfterPrefill::Nothing => {}
    }
}

fn try_another(gateway: &Gateway, job: Job, failed: &Worker, answer: PrefillAnswer<'_>) {
    let next = Rc::clone(job.phase.worker());
    let id = job.client.request_id();
    log::warn!(
        "[{id}] prefill worker {} failed ({answer}), {} is next",
        failed.name,
        next.name
    );
    job.client.prefill_moved(next);
    gateway.telemetry.prefill_retried();
    start(gateway, job);
}

/// The worker's answer is the client's: the request was at fault. If decode has begun to answer, that is broken off.
fn pass_on(gateway: &Gateway, client: &Stream, answer: PrefillAnswer<'_>) {
    let PrefillAnswer::Whole { status, body } = answer else {
        return;
    };
    let kept: Vec<Header> = ["content-type", "retry-after"]
        .iter()
        .filter_map(|name| {
            Some((
                name.as_bytes().to_vec(),
                host::header(Map::CallResponse, name)?,
            ))
        })
        .collect();
    if client.beside.get() == Beside::Running && client.answer_has_begun() {
        let cause = routing::route::PrefillFailure::Status(status);
        client.prefill_has_failed(gateway, &Refusal::PrefillFailed { tried: 1, cause });
        return;
    }
    client.beside.set(Beside::Nothing);
    if client.enter() {
        client.answer(u32::from(status), &kept, body);
        client.seat.borrow_mut().release();
    }
}

fn end_here(client: &Stream, terminal: Terminal) {
    if client.enter() {
        let kind = (
            b"content-type".to_vec(),
            terminal.content_type.as_bytes().to_vec(),
        );
        client.answer(200, &[kind], &terminal.body);
        client.seat.borrow_mut().release();
    }
}

fn refused(gateway: &Gateway, client: &Stream, refusal: &Refusal) {
    log::warn!("[{}] {refusal}", client.request_id());
    if client.beside.get() == Beside::Running {
        client.prefill_has_failed(gateway, refusal);
    } else if client.enter() {
        client.refuse(gateway, refusal);
    }
}

/// Fetches the blocks that a client has left behind, so that the prefill worker can free them.
fn clean_up(gateway: &Gateway, client: &Stream, leg: &CleanUpLeg, prefill: &Worker) {
    let Some(estate) = client.estate.take() else {
        leaked(gateway, client, leg.blocks, prefill);
        return;
    };
    let (cluster, timeout) = {
        let router = gateway.router.borrow();
        let pool = router.pool();
        (
            pool.clusters.decode.clone(),
            Duration::from_millis(u64::from(pool.cleanup.timeout_ms)),
        )
    };
    let mut own = leg.dispatch.headers.clone();
    own.extend(destination_headers(&leg.dispatch));
    own.push((headers::REQUEST_ID, client.request_id().to_owned()));
    let body = leg
        .dispatch
        .edits
        .as_ref()
        .map(|edits| edits.apply(&estate.body));
    let sent = with_clients_headers(&estate.headers, &own);
    match host::call(&cluster, sent, body.as_deref(), timeout) {
        Ok(token) => {
            gateway.telemetry.cleaning_up();
            let call = Call::CleanUp {
                blocks: leg.blocks,
                request_id: client.request_id().to_owned(),
                _estate: estate,
            };
            gateway.calls.borrow_mut().running.insert(token, call);
        }
        Err(_) => leaked(gateway, client, leg.blocks, prefill),
    }
}

fn cleaned_up(gateway: &Gateway, answer: PrefillAnswer<'_>, blocks: u64, request_id: &str) {
    if matches!(
        answer,
        PrefillAnswer::Whole {
            status: 200..=299,
            ..
        }
    ) {
        return;
    }
    gateway.telemetry.leaked(blocks);
    log::warn!(
        "[{request_id}] {blocks} blocks that the client left behind could not be fetched: {answer}"
    );
}

fn leaked(gateway: &Gateway, client: &Stream, blocks: u64, prefill: &Worker) {
    gateway.telemetry.leaked(blocks);
    log::info!(
        "[{}] the client left during prefill: {blocks} blocks stay on {} until its lease ends",
        client.request_id(),
        prefill.name
    );
}
