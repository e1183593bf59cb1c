//! Owns the prefill leg: a call that must outlive its client, and what follows from its answer.

use std::rc::Rc;
use std::time::Duration;

use routing::answer::usage;
use routing::answer::{EventEdit, PromptLogprobs};
use routing::fleet::{Worker, WorkerId};
use routing::handoff::LegOrder;
use routing::handoff::terminal::Terminal;
use routing::route::fate::{Fate, Handed};
use routing::route::{
    AfterPrefill, Client, Dispatch, PrefillAnswer, PrefillEnd, PrefillFailure, Refusal,
};
use routing::session::{ConcurrentPrefill, Failure, Stage};

use super::calls::{self, headers_for_client, not_made};
use super::{cleanup, recovery};
use crate::headers;
use crate::host;
use crate::telemetry::CalledLeg;
use crate::vm::{Call, Job, PoolRuntime, Stream};

/// Calls the job's prefill worker, unless the client has left. Called on the root.
pub fn start(runtime: &PoolRuntime, job: Job) {
    let is_due = matches!(job.client.stage(), Stage::Prefilling | Stage::Recovering);
    if !is_due || !job.client.enter() {
        return;
    }
    job.client.session().prefill_called();
    let token = match make_call(runtime, &job) {
        Ok(token) => token,
        Err(answer) => return answered(runtime, job, answer),
    };
    runtime.telemetry.prefill_called();
    decode_beside(runtime, &job);
    let call = Call::Prefill(Box::new(job));
    runtime.calls.borrow_mut().run(token, call);
}

/// Starts decode right after the call to prefill, if both legs run at once.
fn decode_beside(runtime: &PoolRuntime, job: &Job) {
    let dispatch = job.phase.decode_beside(&mut runtime.router_mut());
    if let Some(dispatch) = dispatch
        && job.client.enter()
    {
        let mut session = job.client.session();
        session
            .response
            .set_prefill(match job.phase.wants_logprobs() {
                true => ConcurrentPrefill::RunningWithLogprobs,
                false => ConcurrentPrefill::Running,
            });
        session.abort = job.phase.abort_leg();
        drop(session);
        decode(runtime, &job.client, &dispatch);
    }
}

/// Starts decode: forwards the request or, if it was forwarded before, makes a call.
fn decode(runtime: &PoolRuntime, client: &Rc<Stream>, dispatch: &Dispatch) {
    match client.stage() {
        Stage::Recovering => {
            let failure = client.session().failure.take();
            let failure = failure.unwrap_or(Failure::Unreached);
            recovery::call_decode(runtime, client, dispatch, failure);
        }
        _ => client.go_on(runtime, dispatch),
    }
}

fn make_call(runtime: &PoolRuntime, job: &Job) -> Result<u32, PrefillAnswer<'static>> {
    let destination = job.phase.destination();
    let destination = destination.ok_or(PrefillAnswer::NotSent)?.to_string();
    let cluster = runtime.router().pool().clusters.prefill.clone();
    let body = prefill_body(runtime, job);
    // The root makes the call: the client's context may be gone when the answer comes.
    host::enter_context(runtime.root_id).map_err(|_| PrefillAnswer::NotSent)?;
    let body = body.map_err(|_| PrefillAnswer::NotSent)?;
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
pub fn answered(runtime: &PoolRuntime, mut job: Job, answer: PrefillAnswer<'_>) {
    let is_waited_for = job.is_waited_for();
    if !is_waited_for {
        return proceed(runtime, job, Client::Left, answer);
    }
    let left = job.client.session().prefill_answered();
    if left == 0 {
        return proceed(runtime, job, Client::Waits, answer);
    }
    match job.phase.absorb_failure(answer, &mut runtime.router_mut()) {
        Ok(()) => return,
        Err(phase) => job.phase = *phase,
    }
    let client = Rc::clone(&job.client);
    proceed(runtime, job, Client::Waits, answer);
    // Blocks that the other call computes must be fetched too.
    client.leave_copy(runtime);
}

/// Acts on an answer.
fn proceed(runtime: &PoolRuntime, job: Job, waits: Client, answer: PrefillAnswer<'_>) {
    let Job { phase, client, .. } = job;
    let worker = Rc::clone(phase.worker());
    let order = phase.order();
    let is_waited_for = waits == Client::Waits;
    let cached = runtime.note_cached(answer);
    let after = phase.answered(answer, waits, &mut runtime.router_mut());
    if is_waited_for && order == LegOrder::Sequential && !matches!(after, AfterPrefill::Again(_)) {
        // Other calls of the same attempt are late now.
        let mut session = client.session();
        session.next_attempt();
        session.prefill_moved(Rc::clone(&worker));
    }
    match after {
        AfterPrefill::Again(phase) => {
            try_another(runtime, Job::new(runtime, phase, &client), &worker, answer);
        }
        AfterPrefill::Decode {
            dispatch,
            target: (worker, key),
            staged,
        } => {
            let blocks = staged.blocks;
            if !client.enter() {
                runtime.telemetry.handed_off(Fate::Leaked, blocks);
                return;
            }
            runtime.router_mut().assign_decode(
                &mut client.session().assignment,
                &worker,
                key,
                staged,
            );
            client.session().handed = Some(Handed::over(blocks));
            report_cached(runtime, &client, cached);
            decode(runtime, &client, &dispatch);
        }
        AfterPrefill::Whole { dispatch, fallback } => {
            log::warn!(
                "[{}] runs whole: {} ({answer})",
                client.ids(),
                fallback.name()
            );
            runtime.telemetry.handoff_failed(CalledLeg::Prefill);
            runtime.telemetry.fell_back(fallback);
            if client.enter() {
                decode(runtime, &client, &dispatch);
            }
        }
        AfterPrefill::Good => {
            add_logprobs(&client, answer);
            client.prefill_is_good(runtime, blocks_of(runtime, answer));
            recovery::deliver_held(runtime, &client);
        }
        AfterPrefill::CallOff { leg, blocks } => {
            cleanup::abort_prefill(runtime, &client, &leg, blocks)
        }
        AfterPrefill::Answer => pass_on(runtime, &client, answer),
        AfterPrefill::AnswerUnlessPair(end) => ask_another_pair(runtime, &client, answer, end),
        AfterPrefill::Terminal(terminal) => end_here(runtime, &client, terminal),
        AfterPrefill::TerminalStaged(terminal, rest) => {
            client.leave_cleanup_request(runtime);
            end_here(runtime, &client, terminal);
            clean_up(runtime, &client, *rest, &worker);
        }
        AfterPrefill::Refused(refusal) => refused(runtime, &client, refusal),
        AfterPrefill::FailedBeside(refusal, end) => failed_beside(runtime, &client, refusal, end),
        rest @ (AfterPrefill::CleanUp(_) | AfterPrefill::Leaked { .. } | AfterPrefill::Nothing) => {
            clean_up(runtime, &client, rest, &worker);
        }
    }
}

/// Cleans up blocks that a prefill has staged and no decode fetches.
fn clean_up(runtime: &PoolRuntime, client: &Stream, after: AfterPrefill, worker: &Worker) {
    match after {
        AfterPrefill::CleanUp(leg) => cleanup::start(runtime, client, &leg, worker),
        AfterPrefill::Leaked { blocks } => cleanup::leaked(runtime, client, blocks, worker),
        _ => {}
    }
}

/// Blocks of a hand-off whose answer names none: those of its prompt.
fn blocks_of(runtime: &PoolRuntime, answer: PrefillAnswer<'_>) -> u64 {
    match answer {
        PrefillAnswer::Whole { body, .. } => usage::prompt_blocks(body, runtime.pool.block_tokens),
        _ => 0,
    }
}

fn try_another(runtime: &PoolRuntime, job: Job, failed: &Worker, answer: PrefillAnswer<'_>) {
    let next = Rc::clone(job.phase.worker());
    let id = job.client.ids();
    log::warn!(
        "[{id}] prefill worker {} failed ({answer}), {} is next",
        failed.name,
        next.name
    );
    job.client.session().prefill_moved(next);
    runtime.telemetry.handoff_failed(CalledLeg::Prefill);
    runtime.telemetry.prefill_retried();
    start(runtime, job);
}

/// Passes the worker's answer to the client: the request was at fault. A decode answer that has begun gets a pending reset
/// instead.
fn pass_on(runtime: &PoolRuntime, client: &Rc<Stream>, answer: PrefillAnswer<'_>) {
    let PrefillAnswer::Whole { status, body } = answer else {
        return;
    };
    let kept = headers_for_client();
    let is_reset = {
        let response = &client.session().response;
        response.prefill_runs() && response.has_begun()
    };
    if is_reset {
        let cause = PrefillFailure::Status(status);
        schedule_reset(runtime, client, Refusal::PrefillFailed { tried: 1, cause });
        return;
    }
    client
        .session()
        .response
        .set_prefill(ConcurrentPrefill::Nothing);
    if client.enter() {
        client.answer(u32::from(status), &kept, body);
        client.session().assignment.release();
    }
}

/// Asks another pair: prefill has refused the request while decode waits for it.
fn ask_another_pair(
    runtime: &PoolRuntime,
    client: &Rc<Stream>,
    answer: PrefillAnswer<'_>,
    end: PrefillEnd,
) {
    let PrefillAnswer::Whole { status, body } = answer else {
        return;
    };
    let has_begun = client.session().response.has_begun();
    if has_begun {
        return pass_on(runtime, client, answer);
    }
    let failure = Failure::AnsweredWithError {
        status,
        headers: headers_for_client(),
        body: body.to_vec(),
    };
    client.session().drop_prefill();
    recovery::recover(runtime, client, failure, end.into());
}

fn end_here(runtime: &PoolRuntime, client: &Stream, terminal: Terminal) {
    if client.enter() {
        let kind = terminal.content_type.as_bytes().to_vec();
        client.answer_complete(
            runtime,
            200,
            &[(b"content-type".to_vec(), kind)],
            &terminal.body,
        );
    }
}

/// Adds the number of tokens that the prefill worker had cached to the answer's edits, if clients get it.
fn report_cached(runtime: &PoolRuntime, client: &Stream, cached: u64) {
    if runtime.router().pool().report_cached_tokens {
        let edit = EventEdit::CachedTokens(cached);
        client.session().response.edit(edit);
    }
}

/// Adds the prompt's logprobs to the answer's edits, if decode's answer lacks them.
fn add_logprobs(client: &Stream, answer: PrefillAnswer<'_>) {
    let PrefillAnswer::Whole { body, .. } = answer else {
        return;
    };
    let response = &mut client.session().response;
    if response.awaits_logprobs()
        && let Some(logprobs) = PromptLogprobs::read(body)
    {
        response.edit(EventEdit::PromptLogprobs(logprobs));
    }
}

/// Ends a request whose prefill has failed for good.
fn refused(runtime: &PoolRuntime, client: &Rc<Stream>, refusal: Refusal) {
    log::warn!("[{}] {refusal}", client.ids());
    runtime.telemetry.handoff_failed(CalledLeg::Prefill);
    match client.stage() {
        Stage::Recovering => {
            let failure = client.session().failure.take();
            let failure = failure.unwrap_or(Failure::Refused(refusal));
            recovery::give_up(runtime, client, &failure);
        }
        _ if client.enter() => client.refuse(runtime, &refusal),
        _ => {}
    }
}

/// Handles a failed concurrent prefill: while the client has read nothing, another pair is asked.
fn failed_beside(runtime: &PoolRuntime, client: &Rc<Stream>, refusal: Refusal, end: PrefillEnd) {
    let (runs, has_begun) = {
        let response = &client.session().response;
        (response.prefill_runs(), response.has_begun())
    };
    if !runs {
        return refused(runtime, client, refusal);
    }
    log::warn!("[{}] {refusal}", client.ids());
    runtime.telemetry.handoff_failed(CalledLeg::Prefill);
    if has_begun {
        return schedule_reset(runtime, client, refusal);
    }
    client.session().drop_prefill();
    recovery::recover(runtime, client, Failure::Refused(refusal), end.into());
}

/// Sets a pending reset: concurrent prefill has failed, and the client has begun to read. The answer must not end as a success.
fn schedule_reset(runtime: &PoolRuntime, client: &Rc<Stream>, refusal: Refusal) {
    client.session().reset_for(refusal);
    runtime.watch_over(client);
}
