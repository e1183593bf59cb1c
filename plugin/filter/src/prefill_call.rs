//! Owns the prefill leg of a sequential hand-off: a call that must outlive its client.
//!
//! The call belongs to the root context, and so must its answer: the SDK drops the answer to a call made from a stream
//! that is gone, and with it the only knowledge of the KV blocks that the worker holds. So a stream puts its job into a
//! list, wakes the root through a shared queue that only this VM listens to, and the root makes the call.

use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::Duration;

use hashbrown::HashMap;
use routing::route::{AfterPrefill, PrefillAnswer, PrefillPhase};

use crate::gateway::Gateway;
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};
use crate::shared;
use crate::stream::{self, Stream};

/// A prefill leg and the stream that waits for it.
pub struct Job {
    phase: PrefillPhase,
    client: Weak<Stream>,
    request_id: String,
}

/// The jobs of one root context.
#[derive(Default)]
pub struct Calls {
    queue: Option<u32>,
    waiting: VecDeque<Job>,
    running: HashMap<u32, Job>,
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
        client: Rc::downgrade(client),
        request_id: client.request_id().to_owned(),
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
            None => return,
        }
    }
}

/// Takes the answer to a call; false where the token is another's.
pub fn answered(gateway: &Gateway, token: u32, has_headers: bool) -> bool {
    let Some(job) = gateway.calls.borrow_mut().running.remove(&token) else {
        return false;
    };
    if !has_headers {
        proceed(gateway, job, PrefillAnswer::Broken);
        return true;
    }
    let body = host::buffer(Buffer::CallResponse).unwrap_or_default();
    proceed(
        gateway,
        job,
        PrefillAnswer::Whole {
            status: call_status(),
            body: &body,
        },
    );
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
    let Some(client) = live(&job) else {
        // Its charge ends here, and only then is there something to report.
        drop(job);
        gateway.report_load();
        return;
    };
    let made = make_call(gateway, &job, &client);
    // The call must be the root's: the client's context may be gone when the answer comes.
    match made {
        Some(token) => {
            gateway.telemetry.prefill_called();
            gateway.calls.borrow_mut().running.insert(token, job);
            gateway.report_load();
        }
        None => proceed(gateway, job, PrefillAnswer::NotSent),
    }
}

fn make_call(gateway: &Gateway, job: &Job, client: &Stream) -> Option<u32> {
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
    let back = host::enter_context(gateway.root_id);
    let (client_headers, client_body) = read.ok()?;
    back.ok()?;

    let own = job.phase.headers();
    let mut sent: Vec<(&str, &str)> = own
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    sent.push((headers::DESTINATION, &destination));
    sent.push((headers::REQUEST_ID, client.request_id()));
    let kept = client_headers
        .iter()
        .filter_map(as_text)
        .filter(|(name, _)| {
            headers::goes_on_the_prefill_leg(name.as_bytes())
                && !sent.iter().any(|(set, _)| set == name)
        });
    let all: Vec<(&str, &str)> = kept.chain(sent.iter().copied()).collect();
    let called = host::call(&cluster, all, Some(&job.phase.body(&client_body)), timeout);
    called
        .inspect_err(|status| {
            let worker = &job.phase.worker().name;
            log::warn!(
                "[{}] prefill worker {worker} could not be called: {status:?}",
                job.request_id
            );
        })
        .ok()
}

/// The SDK's calls carry text only; a header that is not text stays behind.
fn as_text((name, value): &Header) -> Option<(&str, &str)> {
    Some((
        std::str::from_utf8(name).ok()?,
        std::str::from_utf8(value).ok()?,
    ))
}

/// The waiting client, its context made the one that host calls are about; none when it has left.
fn live(job: &Job) -> Option<Rc<Stream>> {
    let client = job.client.upgrade().filter(|client| client.waits())?;
    host::enter_context(client.id()).ok()?;
    Some(client)
}

/// What follows from an answer.
fn proceed(gateway: &Gateway, job: Job, answer: PrefillAnswer<'_>) {
    let Job {
        phase,
        client,
        request_id,
    } = job;
    let worker = Rc::clone(phase.worker());
    let after = phase.answered(answer, &mut gateway.router.borrow_mut());
    match after {
        AfterPrefill::Again(phase) => {
            log::warn!(
                "[{request_id}] prefill worker {} failed ({answer}), {} is next",
                worker.name,
                phase.worker().name
            );
            let next = Job {
                phase,
                client,
                request_id,
            };
            if let Some(client) = next.client.upgrade() {
                client.prefill_moved(Rc::clone(next.phase.worker()));
                gateway.telemetry.prefill_retried();
            }
            start(gateway, next);
            return;
        }
        AfterPrefill::Decode { dispatch, blocks } => {
            let client = client.upgrade().filter(|client| client.waits());
            let staged = client.filter(|client| host::enter_context(client.id()).is_ok());
            match staged {
                Some(client) => client.decode(gateway, &dispatch, blocks),
                None => {
                    gateway.telemetry.leaked(blocks);
                    log::info!(
                        "[{request_id}] the client left during prefill: {blocks} blocks stay on {} until its lease ends",
                        worker.name
                    );
                }
            }
        }
        AfterPrefill::Answer => {
            let kept: Vec<Header> = ["content-type", "retry-after"]
                .iter()
                .filter_map(|name| {
                    Some((
                        name.as_bytes().to_vec(),
                        host::header(Map::CallResponse, name)?,
                    ))
                })
                .collect();
            if let (PrefillAnswer::Whole { status, body }, Some(client)) =
                (answer, client.upgrade())
                && host::enter_context(client.id()).is_ok()
            {
                client.answer(u32::from(status), &kept, body);
            }
        }
        AfterPrefill::Refused(refusal) => {
            log::warn!("[{request_id}] {refusal}");
            if let Some(client) = client.upgrade()
                && host::enter_context(client.id()).is_ok()
            {
                stream::refuse(gateway, &client, &refusal);
            }
        }
    }
    gateway.report_load();
}
