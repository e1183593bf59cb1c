//! Owns the step from a request that has been read to its plan: at once, or after a wait for a worker.

use std::rc::Rc;

use routing::admission::Waiter;
use routing::answer::EventEdit;
use routing::request::Generation;
use routing::route::{Explain, Plan, PlanInput, QueueTicket, Refusal, Router};
use routing::session::Stage;

use crate::host::{self, HostError, Map};
use crate::vm::{InStream, Job, PoolRuntime, RootTask, Waits};

/// Whether a request goes on, or stays where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The proxy forwards the request now.
    GoesOn,
    /// The request waits, or was answered.
    Stays,
}

/// Whether another context is the effective one after a call than before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EffectiveContext {
    /// The same one.
    Unchanged,
    /// Perhaps another one.
    Changed,
}

/// Plans a request whose body is complete at the time of [`PoolRuntime::now`], and carries out the plan.
pub fn plan(runtime: &Rc<PoolRuntime>, stream: &InStream, generation: Generation) -> Next {
    let body = read_body(runtime, stream).and_then(|body| renamed(runtime, stream, body));
    let body = match body {
        Ok(body) => body,
        Err(error) => return unreadable(runtime, stream, &error),
    };
    let outcome = {
        let routing_headers = &stream.routing_headers;
        let subset = routing_headers.subset(stream);
        let input = PlanInput {
            headers: &routing_headers.overrides,
            now: runtime.now(),
            session: routing_headers.session.as_deref(),
            tenant: routing_headers.tenant.as_deref(),
            subset: subset.as_ref(),
            explain: routing_headers.explain(),
        };
        let mut router = runtime.router_mut();
        let outcome = router.plan(generation, &body, input);
        explained(&mut router, stream, input.explain);
        outcome
    };
    match outcome {
        Ok(Plan::Wait(ticket)) => wait(runtime, stream, *ticket, body),
        outcome => carry_out(runtime, stream, outcome, body),
    }
}

/// The body of a complete request; empty if the request has none.
///
/// # Errors
/// If the proxy does not return the body that it has received.
pub fn read_body(runtime: &PoolRuntime, stream: &InStream) -> Result<Vec<u8>, HostError> {
    let received = stream.bodies().received_bytes();
    match runtime.vm.copy_body() {
        // A request without a body has no buffer.
        Err(_) if received == 0 => Ok(Vec::new()),
        read => read,
    }
}

/// Refuses a request whose body the proxy does not return, or does not take back.
pub fn unreadable(runtime: &PoolRuntime, stream: &InStream, error: &HostError) -> Next {
    log::error!(
        "[{}] its body could not be read or written: {error}",
        stream.ids()
    );
    stream.refuse(runtime, &Refusal::Internal);
    Next::Stays
}

/// Queues a request with its body, which is not copied or read again before the request's turn.
fn wait(runtime: &Rc<PoolRuntime>, stream: &InStream, ticket: QueueTicket, body: Vec<u8>) -> Next {
    let waiter = ticket.waiter;
    match ticket.with_body(body) {
        Some(queued) => runtime.wait(queued, stream),
        None => {
            runtime.router_mut().gives_up(waiter);
            stream.refuse(runtime, &Refusal::Internal);
        }
    }
    Next::Stays
}

fn explained(router: &mut Router, stream: &InStream, wanted: Explain) {
    if let Some(explanation) = router.take_explanation() {
        log::debug!("[{}] {explanation}", stream.ids());
        let is_asked = wanted == Explain::ForCaller;
        stream.session().explanation = is_asked.then_some(explanation);
    }
}

/// The body with the model's name as workers know it.
fn renamed(runtime: &PoolRuntime, stream: &InStream, body: Vec<u8>) -> Result<Vec<u8>, HostError> {
    let renamed = {
        let routing_headers = &stream.routing_headers;
        let mut router = runtime.router_mut();
        router.rename(&body, &routing_headers.overrides)
    };
    let Some(renamed) = renamed else {
        return Ok(body);
    };
    stream.set_body(&renamed.body)?;
    if let Some(was) = renamed.was {
        // The model's name cannot be put back into a compressed answer.
        host::remove_header(Map::Request, b"accept-encoding")?;
        let edit = EventEdit::ModelName(was);
        stream.session().response.edit(edit);
    }
    Ok(renamed.body)
}

/// Carries out a plan.
pub fn carry_out(
    runtime: &Rc<PoolRuntime>,
    stream: &InStream,
    outcome: Result<Plan, Refusal>,
    body: Vec<u8>,
) -> Next {
    let done = match outcome {
        Ok(Plan::Forward(dispatch, assignment)) => {
            if let Some(fallback) = assignment.fallback {
                log::info!("[{}] runs whole: {}", stream.ids(), fallback.name());
                runtime.telemetry.fell_back(fallback);
            }
            stream.session().assignment = assignment;
            stream
                .forward(runtime, &dispatch, body, None)
                .map(|()| Next::GoesOn)
        }
        Ok(Plan::Prefill(phase, assignment)) => {
            {
                let session = &mut *stream.session();
                session.assignment = assignment;
                session.stage = Stage::Prefilling;
            }
            stream.keep_replay_buffer(runtime, body, None);
            let job = Job::new(runtime, phase, stream);
            let task = RootTask::Prefill(Box::new(job));
            runtime
                .calls
                .borrow_mut()
                .submit(task)
                .map(|()| Next::Stays)
        }
        Ok(Plan::Answer(answer)) => {
            let kind = (
                b"content-type".to_vec(),
                answer.content_type.as_bytes().to_vec(),
            );
            stream.answer(200, &[kind], answer.body.as_bytes());
            Ok(Next::Stays)
        }
        // Only a request that has been read can wait; `plan` queues it.
        Ok(Plan::Wait(_)) => Ok(Next::Stays),
        Err(refusal) => {
            log::info!("[{}] refused: {refusal}", stream.ids());
            stream.refuse(runtime, &refusal);
            Ok(Next::Stays)
        }
    };
    done.unwrap_or_else(|error| {
        log::error!(
            "[{}] the request could not be forwarded: {error}",
            stream.ids()
        );
        stream.refuse(runtime, &Refusal::Internal);
        Next::Stays
    })
}

/// Tries the waiting requests, in their order: a booking has ended, or the fleet has changed. If all of them could go, there may
/// be room for more.
pub fn call_waiting(runtime: &Rc<PoolRuntime>) -> EffectiveContext {
    let mut context = EffectiveContext::Unchanged;
    loop {
        let called = runtime.router().called();
        if called.is_empty() {
            return context;
        }
        context = EffectiveContext::Changed;
        let tried: Vec<Outcome> = called
            .into_iter()
            .map(|waiter| try_again(runtime, waiter))
            .collect();
        if tried.contains(&Outcome::Waits) {
            return context;
        }
    }
}

/// Outcome of trying a waiting request again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The request no longer waits.
    Decided,
    /// The request waits on.
    Waits,
}

fn try_again(runtime: &Rc<PoolRuntime>, waiter: Waiter) -> Outcome {
    let waits = runtime.waiting().remove(&waiter);
    let entered = waits.and_then(|waits| Some((InStream::enter(&waits.stream)?, waits)));
    let Some((stream, mut waits)) = entered else {
        runtime.router_mut().gives_up(waiter);
        return Outcome::Decided;
    };
    let outcome = {
        let explain = waits.stream.routing_headers.explain();
        let mut router = waits.runtime.router_mut();
        let outcome = router.plan_queued(&mut waits.queued, waits.runtime.tell_time(), explain);
        explained(&mut router, &stream, explain);
        outcome
    };
    let Some(outcome) = outcome else {
        runtime.waiting().insert(waiter, waits);
        return Outcome::Waits;
    };
    let Waits {
        queued,
        since,
        runtime,
        ..
    } = waits;
    runtime.has_waited(since);
    if carry_out(&runtime, &stream, outcome, queued.into_body()) == Next::GoesOn
        && let Err(error) = host::resume_request()
    {
        log::error!("[{}] could not go on: {error}", stream.ids());
        stream.refuse(&runtime, &Refusal::Internal);
    }
    Outcome::Decided
}

/// Refuses requests that have waited too long.
pub fn refuse_late(runtime: &Rc<PoolRuntime>) {
    let late = runtime.router_mut().late(runtime.now());
    for (waiter, refusal) in late {
        let waiting = runtime.waiting().remove(&waiter);
        if let Some(Waits {
            stream,
            since,
            runtime,
            ..
        }) = waiting
        {
            runtime.has_waited(since);
            let Some(stream) = InStream::enter(&stream) else {
                continue;
            };
            log::info!("[{}] refused: {refusal}", stream.ids());
            stream.refuse(&runtime, &refusal);
        }
    }
}
