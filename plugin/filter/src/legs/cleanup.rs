//! Owns the clean-up leg: fetches KV blocks that a client has left behind, so that the prefill worker can free them.

use std::rc::Rc;
use std::time::Duration;

use routing::fleet::Worker;
use routing::route::fate::{Fate, Handed};
use routing::route::{AbortLeg, CleanUpLeg, PrefillAnswer};

use super::calls::{self, ClientRequest};
use crate::headers;
use crate::host;
use crate::vm::{Call, CleanUpCall, PoolRuntime, RootTask, Stream};

/// Timeout of the call that makes a worker drop a request.
const PATIENCE: Duration = Duration::from_secs(5);

/// Makes a prefill worker drop what it has computed for a request that was given up. Called on the root.
pub fn abort_prefill(runtime: &PoolRuntime, client: &Stream, leg: &AbortLeg, blocks: u64) {
    let called = host::enter_context(runtime.root_id)
        .ok()
        .and_then(|()| send(runtime, client, leg));
    match called {
        Some(token) => {
            let call = Call::CleanUp(CleanUpCall::new(client, blocks, None));
            runtime.calls.borrow_mut().run(token, call);
        }
        None => runtime.telemetry.handed_off(Fate::Leaked, blocks),
    }
}

/// Makes the prefill worker drop a request, if it can be aborted and holds anything. Returns the call's token, if one is made. An
/// answer to a call made from a stream that is gone is dropped.
pub fn abort(runtime: &PoolRuntime, client: &Stream) -> Option<u32> {
    let abort = client.session().abort.take()?;
    send(runtime, client, &abort)
}

/// Makes a worker drop a request, by a call from the present effective context.
fn send(runtime: &PoolRuntime, client: &Stream, leg: &AbortLeg) -> Option<u32> {
    let cluster = runtime.router().pool().clusters.prefill.clone();
    let destination = leg.destination.to_string();
    let own = [
        (":method", "POST".to_owned()),
        (":path", leg.call.path.to_owned()),
        (":authority", destination.clone()),
        (headers::DESTINATION, destination),
        (headers::REQUEST_ID, client.request_id().to_owned()),
    ];
    let clients = client.headers();
    let sent = calls::head(&runtime.pool, &clients, &own);
    host::call(&cluster, sent, Some(leg.call.body.as_bytes()), PATIENCE)
        .inspect_err(|status| {
            let ids = client.ids();
            log::warn!("[{ids}] prefill could not be called off: {status:?}");
        })
        .ok()
}

/// Fetches blocks that are no longer needed. Called on the root.
pub fn start(runtime: &PoolRuntime, client: &Stream, leg: &CleanUpLeg, prefill: &Worker) {
    let Some(cleanup_request) = client.bodies().cleanup.take() else {
        leaked(runtime, client, leg.blocks, prefill);
        return;
    };
    let timeout_ms = runtime.router().pool().cleanup.timeout_ms;
    let timeout = Duration::from_millis(u64::from(timeout_ms));
    // Decode may run under the request's own id at the same time, at the same worker.
    let id = format!("{}-left", client.request_id());
    let asked = ClientRequest {
        id: &id,
        headers: &cleanup_request.headers,
        body: &cleanup_request.body,
    };
    let called = calls::call_decode(runtime, &leg.dispatch, &asked, timeout);
    match called {
        Ok(token) => {
            runtime.telemetry.cleaning_up();
            let call = CleanUpCall::new(client, leg.blocks, Some(cleanup_request));
            let call = Call::CleanUp(call);
            runtime.calls.borrow_mut().run(token, call);
        }
        Err(_) => leaked(runtime, client, leg.blocks, prefill),
    }
}

/// Fetches and drops what prefill has computed for a decode leg that did not begin with it. Called from any effective context.
pub fn give_up(runtime: &PoolRuntime, client: &Rc<Stream>) {
    let Some(Handed { blocks, fate }) = client.session().handed.take() else {
        return;
    };
    let (is_unbegun, leg, prefill) = {
        let assignment = &mut client.session().assignment;
        let is_unbegun = assignment.staged_blocks().is_some();
        let leg = runtime.router_mut().give_up_handoff(assignment);
        (is_unbegun, leg, assignment.prefill.clone())
    };
    let (Some(leg), Some(prefill)) = (leg, prefill) else {
        let fate = if is_unbegun { Fate::Leaked } else { fate };
        runtime.telemetry.handed_off(fate, blocks);
        return;
    };
    client.leave_copy(runtime);
    let task = RootTask::CleanUp(Rc::clone(client), Box::new(leg), prefill);
    let submitted = runtime.calls.borrow_mut().submit(task);
    if submitted.is_err() {
        runtime.telemetry.handed_off(Fate::Leaked, blocks);
    }
}

/// Handles the answer to a clean-up leg.
pub fn answered(runtime: &PoolRuntime, leg: &CleanUpCall, answer: PrefillAnswer<'_>) {
    let fate = Fate::after_a_call(answer);
    runtime.telemetry.handed_off(fate, leg.blocks);
    if fate == Fate::Fetched {
        return;
    }
    log::warn!(
        "[{}] {} blocks that were left behind could not be fetched: {answer}",
        leg.ids,
        leg.blocks
    );
}

/// Counts and logs blocks that cannot be fetched.
pub fn leaked(runtime: &PoolRuntime, client: &Stream, blocks: u64, prefill: &Worker) {
    runtime.telemetry.handed_off(Fate::Leaked, blocks);
    log::info!(
        "[{}] nobody fetches what prefill computed: {blocks} blocks stay on {} until its lease ends",
        client.ids(),
        prefill.name
    );
}

/// Counts the fate of the hand-off to a client's decode. Called when decode has ended.
pub fn tell_of_handed(runtime: &PoolRuntime, client: &Stream) {
    let handed = client.session().handed.take();
    report(runtime, client, handed);
}

/// Counts the fate of a hand-off, if there is one.
pub fn report(runtime: &PoolRuntime, client: &Stream, handed: Option<Handed>) {
    let Some(Handed { blocks, fate }) = handed else {
        return;
    };
    runtime.telemetry.handed_off(fate, blocks);
    if fate == Fate::Unknown {
        log::info!(
            "[{}] its decode ended before it answered: {blocks} blocks may stay until their lease ends",
            client.ids()
        );
    }
}
