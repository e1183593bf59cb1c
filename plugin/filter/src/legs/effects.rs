//! Owns the carrying out of a session's effects: calls, answers to the client, and notes for metrics and the log.

use std::rc::Rc;

use routing::route::CallEnd;
use routing::route::fate::{Fate, Handed};
use routing::session::{CallAnswer, Effect, Note, OnStream, Session, StepContext, WorkerReply};

use super::{calls, cleanup, marks, prefill, recovery};
use crate::telemetry::{CalledLeg, Ended};
use crate::vm::{InStream, Job, PoolRuntime, Stream};

/// Takes a step of a request's session, and carries out what follows. Called on the root.
pub fn step<'a>(
    runtime: &PoolRuntime,
    client: &Rc<Stream>,
    take: impl FnOnce(&mut Session, &mut StepContext<'_>) -> Vec<Effect<'a>>,
) {
    for effect in lent(runtime, client, take) {
        carry_out(runtime, client, effect);
    }
    client.free_answered();
}

/// Takes a step of a request's session, which is lent what it does not own.
pub fn lent<T>(
    runtime: &PoolRuntime,
    client: &Stream,
    take: impl FnOnce(&mut Session, &mut StepContext<'_>) -> T,
) -> T {
    let mut with = StepContext {
        router: &mut runtime.router_mut(),
        bodies: &mut client.bodies(),
        budget: runtime.replay_budget(),
        now: runtime.now(),
    };
    take(&mut client.session(), &mut with)
}

/// Carries out an effect: a call is made by the root, and so is only asked for there.
pub fn carry_out(runtime: &PoolRuntime, client: &Rc<Stream>, effect: Effect<'_>) {
    match effect {
        Effect::CallPrefill(phase) => {
            prefill::start(runtime, Job::new(runtime, *phase, client));
        }
        Effect::CallDecode(dispatch, failure) => {
            recovery::call_decode(runtime, client, &dispatch, failure);
        }
        Effect::CleanUp(leg, prefill) => cleanup::start(runtime, client, &leg, &prefill),
        Effect::CallOff(leg, blocks) => cleanup::call_off(runtime, client, &leg, blocks),
        Effect::Abort(leg) => cleanup::abort(runtime, client, &leg),
        Effect::AbortAtEnd(leg) => cleanup::abort_at_the_end(runtime, client, &leg),
        Effect::LeaveQueue(waiter) => runtime.waits_no_more(waiter),
        Effect::CopyRequest => client.leave_copy(runtime),
        Effect::KeepRequest => client.leave_cleanup_request(runtime),
        Effect::Watch => runtime.watch_over(client),
        Effect::Note(note) => take_note(runtime, client, note),
        Effect::OnStream(done) => on_stream(runtime, client, done),
    }
}

/// Carries out an effect on the stream, unless the stream is gone.
fn on_stream(runtime: &PoolRuntime, client: &Rc<Stream>, done: OnStream<'_>) {
    let Some(client) = InStream::enter(client) else {
        return;
    };
    match done {
        OnStream::Forward(dispatch) => client.go_on(runtime, &dispatch),
        OnStream::Deliver(reply) => deliver(runtime, &client, reply),
        OnStream::AnswerTerminal(terminal) => {
            let kind = terminal.content_type.as_bytes().to_vec();
            let headers = [(b"content-type".to_vec(), kind)];
            client.answer_complete(runtime, 200, &headers, &terminal.body);
        }
        OnStream::Answer(reply) => {
            client.answer(u32::from(reply.status), &reply.headers, &reply.body);
        }
        OnStream::Refuse(refusal) => client.refuse(runtime, &refusal),
        OnStream::ReleaseHeld => client.release_held(runtime),
        OnStream::PassHeld => client.resume_response(),
        OnStream::BreakOff(reason) => client.break_off(runtime, reason),
    }
}

/// Delivers a reply, with the names of the workers if they are configured.
fn deliver(runtime: &PoolRuntime, client: &InStream, reply: WorkerReply<'_>) {
    let WorkerReply {
        status,
        mut headers,
        body,
    } = reply;
    {
        let session = client.session();
        headers.extend(marks::names(runtime, &session.assignment));
        // Of several destinations, the one that the call has reached is not known.
        if runtime.config.response_headers
            && let [address] = session.tried.all()
        {
            headers.push(marks::served(*address));
        }
    }
    client.answer_complete(runtime, status, &headers, &body);
}

/// The answer to the present call.
pub fn call_answer(answer: CallEnd<'_>) -> CallAnswer<'_> {
    CallAnswer {
        answer,
        headers: &calls::headers_for_client,
    }
}

/// Counts and logs a note.
pub fn take_note(runtime: &PoolRuntime, client: &Stream, note: Note) {
    let (telemetry, ids) = (&runtime.telemetry, client.ids());
    match note {
        Note::Cached(blocks) => runtime.metrics.cached(blocks),
        Note::DecodeFailed => telemetry.handoff_failed(CalledLeg::Decode),
        Note::PrefillFailed(refusal) => {
            log::warn!("[{ids}] {refusal}");
            telemetry.handoff_failed(CalledLeg::Prefill);
        }
        Note::PrefillReplaced {
            failed,
            next,
            answer,
        } => {
            log::warn!(
                "[{ids}] prefill worker {} failed ({answer}), {} is next",
                failed.name,
                next.name
            );
            telemetry.handoff_failed(CalledLeg::Prefill);
            telemetry.prefill_retried();
        }
        Note::RunsWhole { fallback, answer } => {
            log::warn!("[{ids}] runs whole: {} ({answer})", fallback.name());
            telemetry.handoff_failed(CalledLeg::Prefill);
            telemetry.fell_back(fallback);
        }
        Note::Recovers { failure, came } => {
            log::warn!("[{ids}] its decode leg failed ({failure}, {came:?} last) and is replaced");
            telemetry.recovered();
        }
        Note::BrokenOff => {
            log::warn!("[{ids}] its worker broke the answer off");
            telemetry.reset("broken_off");
        }
        Note::Ended { status_class } => ended(runtime, client, status_class),
        Note::HandedOff(handed) => handed_off(runtime, client, handed),
        Note::Leaked { blocks, worker } => {
            telemetry.handed_off(Fate::Leaked, blocks);
            log::info!(
                "[{ids}] nothing fetches what prefill computed: {blocks} blocks stay on {} until its lease ends",
                worker.name
            );
        }
    }
}

/// Counts a request that has ended.
fn ended(runtime: &PoolRuntime, client: &Stream, status_class: usize) {
    let session = client.session();
    let response = &session.response;
    runtime.metrics.ended(&Ended {
        facts: &session.assignment.facts,
        output_tokens: response.tokens(),
        code: status_class,
    });
    if let Some(time) = response.time_between_tokens(|| runtime.vm.now()) {
        runtime.metrics.between_tokens(time);
    }
}

/// Counts the fate of a hand-off.
fn handed_off(runtime: &PoolRuntime, client: &Stream, handed: Handed) {
    let Handed { blocks, fate } = handed;
    runtime.telemetry.handed_off(fate, blocks);
    if fate == Fate::Unknown {
        log::info!(
            "[{}] whether decode has fetched {blocks} blocks is not known: they may stay until their lease ends",
            client.ids()
        );
    }
}
