//! Owns the calls that free what workers hold for a request that was given up: the clean-up leg, which fetches KV blocks and
//! drops them, and the abort of a prefill.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use routing::fleet::Worker;
use routing::route::fate::Fate;
use routing::route::{AbortLeg, CallEnd, CleanUpLeg};
use routing::session::{Effect, Note};

use super::calls::{self, ClientRequest};
use super::effects;
use crate::headers;
use crate::host;
use crate::vm::{Call, CleanUpCall, PoolRuntime, RootTask, Stream};

/// Timeout of the call that makes a worker drop a request.
const PATIENCE: Duration = Duration::from_secs(5);

/// Makes a prefill worker drop the `blocks` that it has computed: they leak if the call fails. Called on the root.
pub fn call_off(runtime: &PoolRuntime, client: &Stream, leg: &AbortLeg, blocks: u64) {
    match send(runtime, client, leg) {
        Some(token) => {
            let call = Call::CleanUp(CleanUpCall::new(client, blocks, None));
            runtime.calls.borrow_mut().run(token, call);
        }
        None => runtime.telemetry.handed_off(Fate::Leaked, blocks),
    }
}

/// Makes a prefill worker drop a request. Called on the root.
pub fn abort(runtime: &PoolRuntime, client: &Stream, leg: &AbortLeg) {
    if let Some(token) = send(runtime, client, leg) {
        runtime.calls.borrow_mut().run(token, Call::Abort);
    }
}

/// Sends an abort from the root, so that the answer finds its caller.
fn send(runtime: &PoolRuntime, client: &Stream, leg: &AbortLeg) -> Option<u32> {
    host::enter_context(runtime.root_id).ok()?;
    send_here(runtime, client, leg)
}

/// Makes the prefill worker drop a request whose stream ends, by a call from the present context: its answer is dropped.
pub fn abort_at_the_end(runtime: &PoolRuntime, client: &Stream, leg: &AbortLeg) {
    send_here(runtime, client, leg);
}

fn send_here(runtime: &PoolRuntime, client: &Stream, leg: &AbortLeg) -> Option<u32> {
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
pub fn start(runtime: &PoolRuntime, client: &Rc<Stream>, leg: &CleanUpLeg, prefill: &Arc<Worker>) {
    let cleanup_request = client.bodies().cleanup.take();
    let called = cleanup_request.and_then(|request| {
        let timeout_ms = runtime.router().pool().cleanup.timeout_ms;
        let timeout = Duration::from_millis(u64::from(timeout_ms));
        // Decode may run under the request's own id at the same time, at the same worker.
        let id = format!("{}-left", client.request_id());
        let asked = ClientRequest {
            id: &id,
            headers: &request.headers,
            body: &request.body,
        };
        let token = calls::call_decode(runtime, &leg.dispatch, &asked, timeout).ok()?;
        Some((token, request))
    });
    let blocks = leg.blocks;
    let Some((token, request)) = called else {
        let worker = Arc::clone(prefill);
        let note = Note::Leaked { blocks, worker };
        return effects::take_note(runtime, client, note);
    };
    runtime.telemetry.cleaning_up();
    let call = Call::CleanUp(CleanUpCall::new(client, blocks, Some(request)));
    runtime.calls.borrow_mut().run(token, call);
}

/// Carries out the effects of a hand-off that is given up. Called from the stream's own callback, so that calls are left to the
/// root.
pub fn submit(runtime: &PoolRuntime, client: &Rc<Stream>, effects: Vec<Effect<'static>>) {
    for effect in effects {
        match effect {
            Effect::CleanUp(leg, prefill) => {
                let blocks = leg.blocks;
                let task = RootTask::CleanUp(Rc::clone(client), leg, prefill);
                let submitted = runtime.calls.borrow_mut().submit(task);
                if submitted.is_err() {
                    runtime.telemetry.handed_off(Fate::Leaked, blocks);
                }
            }
            other => effects::carry_out(runtime, client, other),
        }
    }
}

/// Handles the answer to a clean-up leg.
pub fn answered(runtime: &PoolRuntime, leg: &CleanUpCall, answer: CallEnd<'_>) {
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
