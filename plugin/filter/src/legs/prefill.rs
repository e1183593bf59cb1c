//! Owns the calls of the prefill leg, which must outlive their client.

use std::time::Duration;

use routing::fleet::WorkerId;
use routing::route::CallEnd;

use super::calls::{self, not_made};
use super::effects;
use crate::headers;
use crate::host;
use crate::vm::{Call, InStream, Job, PoolRuntime};

/// Calls the job's prefill worker, unless the client has left. Called on the root.
pub fn start(runtime: &PoolRuntime, job: Job) {
    let is_due = job.client.session().needs_prefill();
    if !is_due || InStream::enter(&job.client).is_none() {
        return;
    }
    job.client.session().prefill_called();
    let token = match make_call(runtime, &job) {
        Ok(token) => token,
        Err(answer) => return answered(runtime, job, answer),
    };
    runtime.telemetry.prefill_called();
    let decode = {
        let mut session = job.client.session();
        session.decode_beside(&mut runtime.router_mut(), &job.phase)
    };
    if let Some(decode) = decode {
        effects::carry_out(runtime, &job.client, decode);
    }
    let call = Call::Prefill(Box::new(job));
    runtime.calls.borrow_mut().run(token, call);
}

fn make_call(runtime: &PoolRuntime, job: &Job) -> Result<u32, CallEnd<'static>> {
    let destination = job.phase.destination();
    let destination = destination.ok_or(CallEnd::NotSent)?.to_string();
    let cluster = runtime.router().pool().clusters.prefill.clone();
    let body = prefill_body(runtime, job);
    // The root makes the call: the client's context may be gone when the answer comes.
    host::enter_context(runtime.root_id).map_err(|_| CallEnd::NotSent)?;
    let body = body.map_err(|_| CallEnd::NotSent)?;
    let client_headers = job.client.headers();

    let mut own = job.phase.headers();
    own.push((headers::DESTINATION, destination));
    own.push((headers::REQUEST_ID, job.client.request_id().to_owned()));
    let sent = calls::head(&runtime.pool, &client_headers, &own);
    let called = host::call(&cluster, sent, Some(&body), job.phase.timeout());
    called
        .inspect_err(|status| {
            let worker = &job.phase.worker().name;
            log::warn!(
                "[{}] prefill worker {worker} could not be called: {status:?}",
                job.client.ids()
            );
        })
        .map_err(not_made)
}

/// The prefill leg's body, made from the client's: the proxy has the client's body, unless the request was forwarded already.
fn prefill_body(runtime: &PoolRuntime, job: &Job) -> Result<Vec<u8>, host::HostError> {
    if let Some(replay) = &job.client.bodies().replay {
        return Ok(job.phase.body(&replay.body));
    }
    let body = runtime.vm.copy_body()?;
    Ok(job.phase.body(&body))
}

/// Calls a second worker for each late prefill, if the pool is configured to hedge. Called in each round.
pub fn hedge_late(runtime: &PoolRuntime) {
    let Some(after_ms) = runtime.router().pool().prefill.hedge_after_ms else {
        return;
    };
    let after = Duration::from_millis(u64::from(after_ms));
    let now = runtime.now();
    for hedge in hedges(runtime, |job| now.saturating_sub(job.since) >= after) {
        let (id, worker) = (hedge.client.ids(), hedge.phase.worker());
        log::info!("[{id}] its prefill is late, {} is called too", worker.name);
        runtime.telemetry.hedged();
        start(runtime, hedge);
    }
}

/// Calls a second worker if the first has left the fleet. The first call cannot be taken back; if it is answered after all, that
/// answer counts.
pub fn replace_left(runtime: &PoolRuntime, left: &[WorkerId]) {
    for next in hedges(runtime, |job| left.contains(&job.phase.worker().id)) {
        let (id, worker) = (next.client.ids(), next.phase.worker());
        log::warn!(
            "[{id}] its prefill worker has left, {} is next",
            worker.name
        );
        runtime.telemetry.prefill_retried();
        start(runtime, next);
    }
}

/// Second calls for clients whose only call `is_due` picks, as far as there are other workers.
fn hedges(runtime: &PoolRuntime, is_due: impl Fn(&Job) -> bool) -> Vec<Job> {
    let calls = runtime.calls.borrow();
    let due = calls
        .prefills()
        .filter(|job| job.client.session().awaits_one_prefill(job.attempt) && is_due(job));
    due.filter_map(|job| {
        let phase = job.phase.hedge(&mut runtime.router_mut())?;
        Some(Job::new(runtime, phase, &job.client))
    })
    .collect()
}

/// Handles a call's answer. Called on the root.
pub fn answered(runtime: &PoolRuntime, job: Job, answer: CallEnd<'_>) {
    let Job {
        phase,
        client,
        attempt,
        ..
    } = job;
    effects::step(runtime, &client, |session, with| {
        session.prefill_answered(with, phase, attempt, effects::call_answer(answer))
    });
}
