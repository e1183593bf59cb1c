//! Owns the state of a request that outlives a single callback: shared between its context and the root that makes its calls.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use proxy_wasm::types::Action;
use routing::admission::Waiter;
use routing::budget::Share;
use routing::fleet::{Worker, WorkerId};
use routing::ids::Ids;
use routing::outcome::Came;
use routing::request::Generation;
use routing::route::fate::Handed;
use routing::route::{AbortLeg, Assignment, Dispatch, Refusal};
use routing::session::{
    CompleteAnswer, ConcurrentPrefill, Due, Failure, LegEnd, NewBody, Response, Takeover, Tried,
};

use crate::cleanup;
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};
use crate::planning::RoutingHeaders;
use crate::pool_runtime::PoolRuntime;
use crate::recovery::HeldReply;
use crate::telemetry::Ended;

/// Stage of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The body is being buffered.
    Reading(Generation),
    /// The body is compressed, and is buffered only to be passed on as it is.
    ReadingEncoded,
    /// All eligible workers are too busy: the request waits for one of them.
    Waiting(Waiter),
    /// A prefill worker is being called, and the client waits for it.
    Prefilling,
    /// The proxy forwards the request.
    Forwarded,
    /// The decode leg has failed before the client read anything, and is replaced by calls.
    Recovering,
    /// The filter has answered the request.
    Answered,
    /// The stream has ended.
    Ended,
}

/// A request's body as its client sent it, kept for as long as the request may have to be routed again.
pub struct ReplayBuffer {
    /// The body.
    pub body: Vec<u8>,
    share: Rc<Share>,
}

/// A request that its client has left, kept for the clean-up leg.
pub struct CleanupRequest {
    /// Headers as the client sent them.
    pub headers: Rc<[Header]>,
    /// Body as the client sent it.
    pub body: Vec<u8>,
    _share: Share,
}

/// State of a request that outlives a single callback.
pub struct Stream {
    id: u32,
    ids: Ids,
    /// Whether the client sent the body's length: then the new length must be sent too.
    declared_length: bool,
    /// The request's headers as they came, kept as long as a call may be made: the proxy no longer shows them after forwarding.
    headers: RefCell<Rc<[Header]>>,
    /// Whether the request has trailers.
    pub trailers: Cell<bool>,
    /// Stage of the request.
    pub stage: Cell<Stage>,
    /// The answer on its way to the client.
    pub response: RefCell<Response>,
    /// Headers that matter to the router.
    pub routing_headers: RoutingHeaders,
    /// Terms of the selection, for a caller that asked for them.
    pub explanation: RefCell<Option<String>>,
    /// Workers and charges that the request occupies.
    pub assignment: RefCell<Assignment>,
    /// The hand-off from prefill to this request's decode, and the fate to report if the stream ended now.
    pub handed: Cell<Option<Handed>>,
    /// Destinations that the request was forwarded to.
    pub tried: RefCell<Tried>,
    /// What is needed to route the request again.
    pub replay_buffer: RefCell<Option<ReplayBuffer>>,
    /// Number of the present attempt: an answer to a call of an earlier attempt is no longer waited for.
    pub attempt: Cell<u32>,
    /// Prefill calls under way for the present attempt.
    pub racing: Cell<u32>,
    /// How the first decode leg failed, while that leg is being replaced.
    pub failure: RefCell<Option<Failure>>,
    /// The reply of a replacement decode worker, while the concurrent prefill runs.
    pub held_reply: RefCell<Option<HeldReply>>,
    /// Whether the model's name has been settled.
    pub is_named: Cell<bool>,
    /// When the request came.
    pub came: Duration,
    /// When the request began to wait for a worker.
    pub queued: Cell<Duration>,
    /// Share of the budget for buffered bodies.
    pub body: RefCell<Option<Rc<Share>>>,
    /// The call that aborts prefill, or makes it drop its blocks: kept until decode is known to have fetched them.
    pub abort: RefCell<Option<AbortLeg>>,
    /// The request, kept for the clean-up leg.
    pub cleanup_request: RefCell<Option<CleanupRequest>>,
}

impl Stream {
    /// State of a request that has just come.
    pub fn new(
        id: u32,
        ids: Ids,
        headers: Rc<[Header]>,
        routing_headers: RoutingHeaders,
        came: Duration,
    ) -> Self {
        let is_length = |(name, _): &Header| name == b"content-length";
        Self {
            id,
            ids,
            declared_length: headers.iter().any(is_length),
            headers: RefCell::new(headers),
            trailers: Cell::new(false),
            stage: Cell::new(Stage::Forwarded),
            response: RefCell::default(),
            routing_headers,
            explanation: RefCell::default(),
            assignment: RefCell::default(),
            handed: Cell::new(None),
            tried: RefCell::default(),
            replay_buffer: RefCell::default(),
            attempt: Cell::new(0),
            racing: Cell::new(0),
            failure: RefCell::default(),
            held_reply: RefCell::default(),
            is_named: Cell::new(false),
            came,
            queued: Cell::default(),
            body: RefCell::default(),
            abort: RefCell::default(),
            cleanup_request: RefCell::default(),
        }
    }

    /// Whether this answer has moved since another one of the same worker last did.
    pub fn has_moved_since(&self, other: &Self) -> bool {
        let is_same = |(one, other): (&Rc<Worker>, &Rc<Worker>)| one.id == other.id;
        let (assignment, others) = (self.assignment.borrow(), other.assignment.borrow());
        let is_same = assignment
            .decode
            .as_ref()
            .zip(others.decode.as_ref())
            .is_some_and(is_same);
        is_same
            && self.id != other.id
            && self
                .response
                .borrow()
                .has_moved_since(&other.response.borrow())
    }

    /// What is due in a round at `now`, while the answer is awaited or flows. To be called once a round.
    pub fn round(&self, now: Duration) -> Option<Due> {
        let is_forwarded = self.stage.get() == Stage::Forwarded;
        is_forwarded
            .then(|| self.response.borrow_mut().round(now))
            .flatten()
    }

    /// Whether the client has read nothing yet, and waits for one of these workers.
    pub fn awaits(&self, workers: &[WorkerId]) -> bool {
        let is_open = self.stage.get() == Stage::Forwarded && self.response.borrow().is_unread();
        let assignment = self.assignment.borrow();
        let is_among =
            |worker: &Option<Rc<Worker>>| worker.as_ref().is_some_and(|w| workers.contains(&w.id));
        is_open
            && (is_among(&assignment.decode)
                || self.prefill_runs() && is_among(&assignment.prefill))
    }

    /// Whether a concurrent prefill runs.
    pub fn prefill_runs(&self) -> bool {
        self.response.borrow().prefill_runs()
    }

    /// Notes a concurrent prefill that starts, or is given up.
    pub fn set_prefill(&self, prefill: ConcurrentPrefill) {
        self.response.borrow_mut().set_prefill(prefill);
    }

    /// The id that both legs carry: our own.
    pub fn request_id(&self) -> &str {
        self.ids.own()
    }

    /// The ids that a line of the log begins with: the client's, and our own.
    pub fn ids(&self) -> &str {
        self.ids.for_log()
    }

    /// The proxy's number of the stream.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The request's headers as they came.
    pub fn headers(&self) -> Rc<[Header]> {
        Rc::clone(&self.headers.borrow())
    }

    /// Whether the client still waits for this `attempt`.
    pub fn waits_for(&self, attempt: u32) -> bool {
        let is_open = matches!(
            self.stage.get(),
            Stage::Prefilling | Stage::Forwarded | Stage::Recovering
        );
        is_open && self.attempt.get() == attempt
    }

    /// Begins a new attempt: what was begun before no longer concerns the request.
    pub fn next_attempt(&self) {
        self.attempt.set(self.attempt.get().wrapping_add(1));
        self.racing.set(0);
        self.held_reply.replace(None);
    }

    /// Whether another worker may take the place of one that fails.
    pub fn may_recover(&self) -> bool {
        self.replay_buffer.borrow().is_some() && self.assignment.borrow().may_recover()
    }

    /// [`Self::may_recover`], for the answer that has come.
    pub fn takeover(&self) -> Takeover {
        match self.may_recover() {
            true => Takeover::Possible,
            false => Takeover::Impossible,
        }
    }

    /// Records how the leg that the client waits for has ended, and what that means.
    pub fn leg_ended(&self, runtime: &PoolRuntime, came: Came) -> LegEnd {
        let mut router = runtime.router.borrow_mut();
        LegEnd::record(&mut router, &mut self.assignment.borrow_mut(), came)
    }

    /// Whether the client has read any of an answer.
    pub fn answer_has_begun(&self) -> bool {
        self.response.borrow().has_begun()
    }

    /// The request's share of a budget for bodies. A call that carries the body holds the share too: the proxy keeps the body
    /// until the call has ended, also after the client has left.
    pub fn share(&self) -> Option<Rc<Share>> {
        let buffered = self.body.borrow().clone();
        buffered.or_else(|| Some(Rc::clone(&self.replay_buffer.borrow().as_ref()?.share)))
    }

    /// Makes this stream's context the effective one; false if the stream is gone.
    pub fn enter(&self) -> bool {
        host::enter_context(self.id).is_ok()
    }

    /// Notes that another prefill worker has taken over.
    pub fn prefill_moved(&self, worker: Rc<Worker>) {
        self.assignment.borrow_mut().prefill = Some(worker);
    }

    /// Forwards a request that waited for its prefill. The stream's context must be the effective one.
    pub fn go_on(self: &Rc<Self>, runtime: &PoolRuntime, dispatch: &Dispatch) {
        let forwarded = runtime
            .vm
            .copy_body()
            .and_then(|body| self.forward(runtime, dispatch, body))
            .and_then(|()| host::resume_request());
        if let Err(error) = forwarded {
            log::error!("[{}] decode could not be dispatched: {error}", self.ids());
            self.refuse(runtime, &Refusal::Internal);
        }
    }

    /// Sends the client an answer.
    pub fn answer(&self, status: u32, kept: &[Header], body: &[u8]) {
        self.stage.set(Stage::Answered);
        let class = usize::try_from(status / 100).unwrap_or_default();
        self.response.borrow_mut().set_status_class(class);
        let explanation = self.explanation.take();
        let mut sent: Vec<(&str, &[u8])> = kept
            .iter()
            .filter_map(|(name, value)| Some((std::str::from_utf8(name).ok()?, value.as_slice())))
            .collect();
        let explanation = explanation.as_ref();
        sent.extend(explanation.map(|json| (headers::EXPLAIN, json.as_bytes())));
        if let Err(error) = host::respond(status, &sent, body) {
            log::error!(
                "[{}] the answer {status} could not be sent: {error}",
                self.ids()
            );
        }
    }

    /// Answers a request with a refusal. The stream's context must be the effective one.
    pub fn refuse(&self, runtime: &PoolRuntime, refusal: &Refusal) {
        runtime.note_refusal(self.ids(), refusal);
        let retry_after = refusal.retry_after_s().map(|seconds| seconds.to_string());
        let mut sent = vec![(b"content-type".to_vec(), b"application/json".to_vec())];
        sent.extend(retry_after.map(|seconds| (b"retry-after".to_vec(), seconds.into_bytes())));
        let dropped = refusal.dropped_reason();
        sent.extend(dropped.map(|why| (headers::DROPPED.as_bytes().to_vec(), why.into())));
        self.answer(refusal.status(), &sent, refusal.to_json().as_bytes());
        self.assignment.borrow_mut().release();
    }

    /// Writes a dispatch into the request, which may then go on. The body is kept if the request may have to be routed again.
    pub fn forward(
        self: &Rc<Self>,
        runtime: &PoolRuntime,
        dispatch: &Dispatch,
        body: Vec<u8>,
    ) -> Result<(), HostError> {
        for (name, value) in destination_headers(dispatch) {
            host::set_header(Map::Request, name, value.as_bytes())?;
        }
        for (name, value) in &dispatch.headers {
            host::set_header(Map::Request, name, value.as_bytes())?;
        }
        if let Some(edits) = &dispatch.edits {
            self.set_body(&edits.apply(&body))?;
        }
        self.tried.replace(Tried::new(&dispatch.destinations));
        self.stage.set(Stage::Forwarded);
        self.body.replace(None);
        self.keep_replay_buffer(runtime, body);
        let mut response = self.response.borrow_mut();
        response.start(dispatch.patience, runtime.now());
        if response.has_deadline() || self.assignment.borrow().decode.is_some() {
            runtime.watch_over(self);
        }
        Ok(())
    }

    /// Replaces the request's body. The stream's context must be the effective one.
    pub fn set_body(&self, body: &[u8]) -> Result<(), HostError> {
        host::set_buffer(Buffer::Request, body)?;
        // The proxy never mends the length, and a wrong one makes the rest of the body another request. A request with trailers
        // has no length, unless the client sent one.
        if self.declared_length || !self.trailers.get() {
            let length = body.len().to_string();
            host::set_header(Map::Request, "content-length", length.as_bytes())?;
        }
        Ok(())
    }

    fn keep_replay_buffer(&self, runtime: &PoolRuntime, body: Vec<u8>) {
        if self.assignment.borrow().may_recover() {
            let share = runtime.hold_replay_buffer(body.len());
            let replay_buffer = share.map(|share| ReplayBuffer {
                body,
                share: Rc::new(share),
            });
            self.replay_buffer.replace(replay_buffer);
        }
    }

    /// Notes that the client has begun to read: no other worker can take over any more.
    pub fn answer_begins(&self, runtime: &PoolRuntime) {
        self.handed.set(self.handed.get().map(Handed::fetched));
        self.replay_buffer.replace(None);
        self.headers.replace(Rc::default());
        let mut router = runtime.router.borrow_mut();
        router.answer_begins(&mut self.assignment.borrow_mut());
        drop(router);
        // While a concurrent prefill runs, a client that leaves aborts it; afterwards decode has fetched its blocks.
        if !self.prefill_runs() {
            self.abort.replace(None);
        }
    }

    /// Ends a concurrent prefill that was good: what was held back of the answer goes on.
    pub fn prefill_is_good(&self, runtime: &PoolRuntime) {
        let is_held = self.response.borrow_mut().prefill_is_good();
        if self.answer_has_begun() {
            self.abort.replace(None);
        }
        if is_held && self.stage.get() == Stage::Forwarded && self.enter() {
            self.answer_begins(runtime);
            self.release_held(runtime);
            self.resume_response();
        }
    }

    /// Passes the part of the answer that is held back, up to its end. Only an edited one is read.
    fn release_held(&self, runtime: &PoolRuntime) {
        let is_edited = self.response.borrow().is_edited();
        let held = match is_edited {
            true => host::buffer(Buffer::Response).unwrap_or_else(|error| {
                log::error!("[{}] the answer could not be read: {error}", self.ids());
                Vec::new()
            }),
            false => Vec::new(),
        };
        let body = self.response.borrow_mut().release(&held);
        self.write(runtime, body);
    }

    /// Writes a part of the answer as the client gets it. The stream's context must be the effective one.
    pub fn write(&self, runtime: &PoolRuntime, body: NewBody) -> Action {
        let written = match body {
            NewBody::AsItCame => Ok(()),
            NewBody::Events(events) => host::set_buffer(Buffer::Response, &events),
            NewBody::Document(document) => write_document(&document),
            NewBody::Error { event, reason } => {
                let written = host::set_buffer(Buffer::Response, &event);
                if written.is_err() {
                    self.break_off(runtime, reason);
                    return Action::Pause;
                }
                written
            }
        };
        if let Err(error) = written {
            log::error!("[{}] the answer could not be edited: {error}", self.ids());
        }
        Action::Continue
    }

    /// Resumes an answer that was held back. The stream's context must be the effective one.
    pub fn resume_response(&self) {
        if let Err(error) = host::resume_response() {
            log::error!("[{}] the answer could not go on: {error}", self.ids());
        }
    }

    /// Breaks off an answer that has begun, so that the client sees that it is incomplete. The stream's context must be the
    /// effective one.
    pub fn break_off(&self, runtime: &PoolRuntime, reason: &'static str) {
        runtime.telemetry.reset(reason);
        self.stage.set(Stage::Answered);
        if let Err(error) = host::reset_response() {
            log::error!(
                "[{}] the answer could not be broken off: {error}",
                self.ids()
            );
        }
    }

    /// Ends the stream: the client has left, or was answered. Frees what the stream holds, and cleans up what its workers hold
    /// for it. Called in the stream's own context.
    pub fn settle(&self, runtime: &PoolRuntime) {
        let stage = self.stage.replace(Stage::Ended);
        runtime.vm.receiving.end(self.id);
        cleanup::tell_of_handed(runtime, self);
        match stage {
            Stage::Prefilling | Stage::Recovering => self.leave_cleanup_request(runtime),
            Stage::Waiting(waiter) => runtime.waits_no_more(waiter),
            _ => {}
        }
        self.set_prefill(ConcurrentPrefill::Nothing);
        self.abort_prefill(runtime);
        self.tell_of_end(runtime, stage);
        self.assignment.borrow_mut().release();
        let mut router = runtime.router.borrow_mut();
        router.request_ended(&self.assignment.borrow());
        drop(router);
        self.body.replace(None);
        self.replay_buffer.replace(None);
        self.held_reply.replace(None);
        runtime.watch_no_more(self);
        runtime.telemetry.stream_closed();
    }

    /// Sends the client the complete answer of a worker's, edited as a forwarded answer would have been. The stream's context
    /// must be the effective one.
    pub fn answer_complete(
        &self,
        runtime: &PoolRuntime,
        status: u16,
        headers: &[Header],
        body: &[u8],
    ) {
        let complete = CompleteAnswer { headers, body };
        let mut response = self.response.borrow_mut();
        if status < 300 {
            response.count(&complete.read());
            let took = runtime.vm.now().saturating_sub(self.came);
            runtime.metrics.first_token(took);
        }
        let body = response.edit_reply(body, complete.form());
        drop(response);
        self.answer(u32::from(status), headers, &body);
        self.assignment.borrow_mut().release();
    }

    fn tell_of_end(&self, runtime: &PoolRuntime, stage: Stage) {
        let response = self.response.borrow();
        // An answer that was held back did not reach the client.
        let is_answered = stage == Stage::Answered || response.has_begun();
        runtime.metrics.ended(&Ended {
            facts: &self.assignment.borrow().facts,
            output_tokens: response.tokens(),
            code: if is_answered {
                response.status_class()
            } else {
                0
            },
        });
        if let Some(time) = response.time_between_tokens(|| runtime.vm.now()) {
            runtime.metrics.between_tokens(time);
        }
    }

    /// Copies the request for the clean-up leg, while its client is still being served: more was computed than the client needs.
    pub fn leave_copy(&self, runtime: &PoolRuntime) {
        let replay_buffer = self.replay_buffer.borrow();
        let Some(replay_buffer) = replay_buffer
            .as_ref()
            .filter(|_| self.cleanup_request.borrow().is_none())
        else {
            return;
        };
        let share = runtime.hold_cleanup_request(replay_buffer.body.len());
        self.cleanup_request
            .replace(share.map(|share| CleanupRequest {
                headers: self.headers(),
                body: replay_buffer.body.clone(),
                _share: share,
            }));
    }

    /// Keeps the request for the clean-up leg, if the budget allows. Enters the stream's context.
    pub fn leave_cleanup_request(&self, runtime: &PoolRuntime) {
        self.enter();
        let replay_buffer = self
            .replay_buffer
            .take()
            .map(|replay_buffer| Ok(replay_buffer.body));
        let body = replay_buffer.unwrap_or_else(|| runtime.vm.copy_body());
        let Ok(body) = body else {
            return;
        };
        let Some(share) = runtime.hold_cleanup_request(body.len()) else {
            return;
        };
        self.cleanup_request.replace(Some(CleanupRequest {
            headers: self.headers(),
            body,
            _share: share,
        }));
    }

    /// Makes the prefill worker drop the request, if it can be aborted and holds anything. Returns the call's token, if one is
    /// made. An answer to a call made from a stream that is gone is dropped.
    pub fn abort_prefill(&self, runtime: &PoolRuntime) -> Option<u32> {
        let abort = self.abort.take()?;
        cleanup::send(runtime, self, &abort)
    }
}

fn write_document(document: &[u8]) -> Result<(), HostError> {
    host::set_buffer(Buffer::Response, document)?;
    let length = document.len().to_string();
    host::set_header(Map::Response, "content-length", length.as_bytes())
}

/// The headers that say where a leg goes: in order, with one retry for each destination after the first. One more would go to the
/// cluster's empty fallback, and replace the worker's own answer.
pub fn destination_headers(dispatch: &Dispatch) -> Vec<(&'static str, String)> {
    let list: Vec<String> = dispatch
        .destinations
        .iter()
        .map(SocketAddr::to_string)
        .collect();
    if list.is_empty() {
        return Vec::new();
    }
    let retries = list.len().saturating_sub(1);
    let mut headers = vec![(headers::DESTINATION, list.join(","))];
    if retries > 0 {
        headers.push((headers::RETRY_ON, headers::BEFORE_SENT.to_owned()));
        headers.push((headers::MAX_RETRIES, retries.to_string()));
    }
    headers
}
