//! Owns the recovery of a decode leg that has failed before its client has read anything: other workers are called in its place,
//! and their answer goes to the client in one piece, event streams included. A request cannot be forwarded twice, so the root
//! makes these calls.

use std::rc::Rc;
use std::time::Duration;

use routing::outcome::{Came, Follows, Leg};
use routing::route::{Assignment, Dispatch, Failed, Plan, PrefillAnswer, Refusal};
use routing::session::{
    self, ConcurrentPrefill, Due, Failure, HeldReply, LastAnswer, LegEnd, Stage, Tried,
};

use super::calls::{self, ClientRequest, headers_for_client};
use super::{cleanup, marks, prefill};
use crate::host::{self, Header};
use crate::telemetry;
use crate::vm::{Call, DecodeCall, Job, PoolRuntime, RootTask, Stream};

/// Timeout of an answer in one piece, if the dispatch has none.
const LONGEST: Duration = Duration::from_secs(600);

/// Hands a failed decode leg to the root, and holds everything back meanwhile. Called from the stream's own callback.
pub fn begin(runtime: &PoolRuntime, client: &Rc<Stream>, failure: Failure, end: LegEnd) {
    client.set_stage(Stage::Recovering);
    let task = RootTask::Recover(Rc::clone(client), failure, end);
    let submitted = runtime.calls.borrow_mut().submit(task);
    if let Err(error) = submitted {
        log::error!("[{}] cannot be recovered: {error}", client.ids());
        client.refuse(runtime, &Refusal::Internal);
    }
}

/// Routes the request again after this `end` of a leg. If that is not possible, the client gets the `failure`. Called on the
/// root.
pub fn recover(runtime: &PoolRuntime, client: &Rc<Stream>, failure: Failure, end: LegEnd) {
    if client.stage() == Stage::Ended {
        return;
    }
    client.set_stage(Stage::Recovering);
    client.leave_pair(runtime);
    if !client.enter() {
        return;
    }
    let had_prefill = client.session().assignment.prefill.is_some();
    if end.leg != Leg::Prefill && had_prefill {
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
            client.assign(runtime, assignment);
            client.session().failure = Some(failure);
            prefill::start(runtime, Job::new(runtime, phase, client));
        }
        Plan::Forward(dispatch, assignment) => {
            client.assign(runtime, assignment);
            call_decode(runtime, client, &dispatch, failure);
        }
        Plan::Answer(_) | Plan::Wait(_) => give_up(runtime, client, &failure),
    }
}

fn plan(runtime: &PoolRuntime, client: &Stream, end: LegEnd) -> Option<Plan> {
    let bodies = client.bodies();
    let body = &bodies.replay.as_ref()?.body;
    let session = &mut *client.session();
    let mut router = runtime.router_mut();
    let failed = Failed {
        leg: end.leg,
        meaning: end.meaning,
        workers: &end.asked(&router, &session.assignment, &session.tried),
        frontends: session.tried.all(),
    };
    router.recover(&mut session.assignment, &failed, body, runtime.vm.now())
}

/// Calls a decode worker in place of the one that failed; prefill, if any, is done or under way. Called on the root.
pub fn call_decode(
    runtime: &PoolRuntime,
    client: &Rc<Stream>,
    dispatch: &Dispatch,
    failure: Failure,
) {
    client.session().tried = Tried::new(&dispatch.destinations);
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
) -> Result<u32, PrefillAnswer<'static>> {
    let bodies = client.bodies();
    let asked = ClientRequest {
        id: client.request_id(),
        headers: &bodies.headers,
        body: &bodies.replay.as_ref().ok_or(PrefillAnswer::NotSent)?.body,
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
        ..
    } = call;
    let is_waited_for = client.session().waits_for(attempt);
    if !is_waited_for {
        return;
    }
    let kept = headers_for_client();
    let end = client.leg_ended(runtime, session::came_of_call(answer, &kept));
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
            let failure = failure.then(end.came, answer, kept);
            recover(runtime, &client, failure, end);
        }
    }
}

/// Delivers an answer; a good one not before the concurrent prefill is known to be good.
fn reply(
    runtime: &PoolRuntime,
    client: &Rc<Stream>,
    status: u16,
    headers: Vec<Header>,
    body: &[u8],
) {
    let prefill_runs = client.session().response.prefill_runs();
    if status >= 300 || !prefill_runs {
        return deliver(runtime, client, status, headers, body);
    }
    let Some(share) = runtime.hold_replay_buffer(body.len()) else {
        client.leave_pair(runtime);
        return give_up(runtime, client, &Failure::Refused(Refusal::Busy));
    };
    client.session().held_reply = Some(HeldReply {
        status,
        headers,
        body: body.to_vec(),
        share,
    });
}

/// Delivers the held answer, if there is one: the concurrent prefill is good.
pub fn deliver_held(runtime: &PoolRuntime, client: &Rc<Stream>) {
    let held = client.session().held_reply.take();
    if let Some(held) = held {
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
    client.session().next_attempt();
    {
        let session = client.session();
        kept.extend(marks::names(runtime, &session.assignment));
        // Of several destinations, the one that the call has reached is not known.
        if runtime.config.response_headers
            && let [address] = session.tried.all()
        {
            kept.push(marks::served(*address));
        }
    }
    if client.enter() {
        client.answer_complete(runtime, status, &kept, body);
    }
}

/// Ends a request that no other worker can take: the failure is the client's answer. Called on the root.
pub fn give_up(runtime: &PoolRuntime, client: &Rc<Stream>, failure: &Failure) {
    if client.stage() == Stage::Ended || !client.enter() {
        return;
    }
    client.session().next_attempt();
    let tried = client.tried();
    match failure.answer(tried) {
        LastAnswer::Held => {
            {
                let session = &mut *client.session();
                session.stage = Stage::Forwarded;
                session.response.pass_held();
                session.assignment.release();
            }
            client.resume_response();
        }
        LastAnswer::Error {
            status,
            headers,
            body,
        } => {
            client.answer(u32::from(status), headers, body);
            client.session().assignment.release();
        }
        LastAnswer::Refused(refusal) => client.refuse(runtime, &refusal),
    }
    cleanup::give_up(runtime, client);
}

/// Acts on what is due for open streams: late workers, and pending resets. Called in each round.
pub fn see_to_due(runtime: &PoolRuntime) {
    for (client, due) in runtime.due() {
        if !client.enter() {
            continue;
        }
        match due {
            Due::NothingCame => {
                marks::note_tried(&client);
                let end = client.leg_ended(runtime, Came::TimedOut);
                recover(runtime, &client, Failure::Silent, end);
            }
            Due::Stalled => {
                marks::note_tried(&client);
                client.leg_ended(runtime, silence(runtime, &client));
                log::warn!("[{}] its worker fell silent", client.ids());
                client.break_off(runtime, "silent");
            }
            Due::Reset(reason) => client.break_off(runtime, reason),
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
        if client.may_recover() && client.enter() {
            let end = client.leg_ended(runtime, Came::Left);
            recover(runtime, &client, Failure::Left, end);
        }
    }
}

impl Stream {
    /// Assigns the request anew; the facts that it is counted under stay.
    fn assign(&self, runtime: &PoolRuntime, assignment: Assignment) {
        let unfetched = self.session().reassign(assignment);
        cleanup::report(runtime, self, unfetched);
    }

    /// Leaves the present workers, and calls off what they are doing for the request. Changes the effective context.
    fn leave_pair(&self, runtime: &PoolRuntime) {
        let has_abort = {
            let mut session = self.session();
            session.next_attempt();
            session.response.set_prefill(ConcurrentPrefill::Nothing);
            session.abort.is_some()
        };
        // The root makes the call, so that the answer finds its caller.
        if has_abort
            && host::enter_context(runtime.root_id).is_ok()
            && let Some(token) = cleanup::abort(runtime, self)
        {
            runtime.calls.borrow_mut().run(token, Call::Abort);
        }
    }
}
