//! Owns the calls that replace a decode leg: a request cannot be forwarded twice, so the root calls the worker that takes over.
//! Its answer goes to the client in one piece, event streams included.

use std::rc::Rc;
use std::time::Duration;

use routing::outcome::Came;
use routing::route::{CallEnd, Dispatch, Refusal};
use routing::session::{Due, Failure, LegEnd, Session, Stage, Takeover};

use super::calls::{self, ClientRequest};
use super::{effects, marks, prefill};
use crate::vm::{Call, DecodeCall, InStream, PoolRuntime, RootTask, Stream};

/// Timeout of an answer in one piece, if the dispatch has none.
const LONGEST: Duration = Duration::from_secs(600);

/// Hands a failed leg to the root, and holds everything back meanwhile.
pub fn begin(runtime: &PoolRuntime, client: &InStream, failure: Failure, end: LegEnd) {
    client.set_stage(Stage::Recovering);
    let task = RootTask::Recover(Rc::clone(client), failure, end);
    let submitted = runtime.calls.borrow_mut().submit(task);
    if let Err(error) = submitted {
        log::error!("[{}] cannot be recovered: {error}", client.ids());
        client.refuse(runtime, &Refusal::Internal);
    }
}

/// Routes the request again after this `end` of a leg. Called on the root.
pub fn recover(runtime: &PoolRuntime, client: &Rc<Stream>, failure: Failure, end: LegEnd) {
    effects::step(runtime, client, |session, with| {
        session.replace_leg(with, failure, end)
    });
}

/// Calls a decode worker in place of the one that failed; prefill, if any, is done or under way. Called on the root.
pub fn call_decode(
    runtime: &PoolRuntime,
    client: &Rc<Stream>,
    dispatch: &Dispatch,
    failure: Failure,
) {
    client.session().decode_called(dispatch);
    let call = DecodeCall::new(client, failure);
    match try_to_call(runtime, client, dispatch) {
        Ok(token) => runtime.calls.borrow_mut().run(token, Call::Decode(call)),
        Err(answer) => answered(runtime, call, answer),
    }
}

fn try_to_call(
    runtime: &PoolRuntime,
    client: &Stream,
    dispatch: &Dispatch,
) -> Result<u32, CallEnd<'static>> {
    let bodies = client.bodies();
    let asked = ClientRequest {
        id: client.request_id(),
        headers: &bodies.headers,
        body: &bodies.replay.as_ref().ok_or(CallEnd::NotSent)?.body,
    };
    let timeout = dispatch.patience.whole.unwrap_or(LONGEST);
    calls::call_decode(runtime, dispatch, &asked, timeout)
}

/// Handles the answer of a replacement worker. Called on the root.
pub fn answered(runtime: &PoolRuntime, call: DecodeCall, answer: CallEnd<'_>) {
    let DecodeCall {
        client,
        attempt,
        failure,
        ..
    } = call;
    effects::step(runtime, &client, |session, with| {
        session.replacement_answered(with, failure, attempt, effects::call_answer(answer))
    });
}

/// Acts on what is due for open streams: late workers, and pending resets. Called in each round.
pub fn see_to_due(runtime: &PoolRuntime) {
    for (client, due) in runtime.due() {
        let Some(entered) = InStream::enter(&client) else {
            continue;
        };
        match due {
            Due::NothingCame => {
                marks::note_tried(&entered);
                effects::step(runtime, &client, Session::timed_out);
            }
            Due::Stalled => {
                marks::note_tried(&entered);
                log::warn!("[{}] its worker fell silent", client.ids());
                let came = silence(runtime, &client);
                effects::step(runtime, &client, |session, with| {
                    session.stalled(with, came)
                });
            }
            Due::BreakOff(reason) => entered.break_off(runtime, reason),
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
    prefill::replace_left(runtime, &left);
    if !runtime.router().can_serve_any() {
        // No worker could take over, and an answer may still come.
        return;
    }
    for client in runtime.waiting_for(&left) {
        if client.takeover() == Takeover::Possible && InStream::enter(&client).is_some() {
            effects::step(runtime, &client, Session::worker_left);
        }
    }
}
