//! Owns the state of a request that outlives a single callback: shared between its context and the root that makes its calls.

use std::cell::{RefCell, RefMut};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use proxy_wasm::types::Action;
use routing::ids::Ids;
use routing::outcome::Came;
use routing::route::{Dispatch, Refusal};
use routing::session::{
    Bodies, CleanupRequest, CompleteAnswer, LegEnd, NewBody, ReplayBuffer, Session, Stage, Takeover,
};

use super::PoolRuntime;
use super::RoutingHeaders;
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};

/// A request, shared between its context and the root that makes its calls.
pub struct Stream {
    id: u32,
    ids: Ids,
    /// Whether the client sent the body's length: then the new length must be sent too.
    declared_length: bool,
    /// Headers that matter to the router.
    pub routing_headers: RoutingHeaders,
    /// When the request came.
    pub came: Duration,
    session: RefCell<Session>,
    bodies: RefCell<Bodies>,
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
            routing_headers,
            came,
            session: RefCell::default(),
            bodies: RefCell::new(Bodies::new(headers)),
        }
    }

    /// The request's life. No other borrow of it may be open: callers bind what they need of it, and let go.
    pub fn session(&self) -> RefMut<'_, Session> {
        self.session.borrow_mut()
    }

    /// What is kept of the request. As with [`Self::session`], no other borrow of it may be open.
    pub fn bodies(&self) -> RefMut<'_, Bodies> {
        self.bodies.borrow_mut()
    }

    /// Stage of the request.
    pub fn stage(&self) -> Stage {
        self.session().stage
    }

    /// Changes the stage of the request.
    pub fn set_stage(&self, stage: Stage) {
        self.session().stage = stage;
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
        Rc::clone(&self.bodies().headers)
    }

    /// Whether another worker may take the place of one that fails.
    pub fn may_recover(&self) -> bool {
        self.bodies().replay.is_some() && self.session().assignment.may_recover()
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
        self.session().leg_ended(&mut runtime.router_mut(), came)
    }

    /// The number of destinations that were tried.
    pub fn tried(&self) -> usize {
        self.session().tried.all().len()
    }

    /// Makes this stream's context the effective one; false if the stream is gone.
    pub fn enter(&self) -> bool {
        host::enter_context(self.id).is_ok()
    }

    /// Forwards a request that waited for its prefill. The stream's context must be the effective one.
    pub fn go_on(self: &Rc<Self>, runtime: &PoolRuntime, dispatch: &Dispatch) {
        let kept = self.bodies().replay.take();
        let body = match kept {
            Some(replay) => Ok(replay.body),
            None => runtime.vm.copy_body(),
        };
        let forwarded = body
            .and_then(|body| self.forward(runtime, dispatch, body))
            .and_then(|()| host::resume_request());
        if let Err(error) = forwarded {
            log::error!("[{}] decode could not be dispatched: {error}", self.ids());
            self.refuse(runtime, &Refusal::Internal);
        }
    }

    /// Sends the client an answer.
    pub fn answer(&self, status: u32, kept: &[Header], body: &[u8]) {
        let class = usize::try_from(status / 100).unwrap_or_default();
        let explanation = {
            let mut session = self.session();
            session.stage = Stage::Answered;
            session.response.set_status_class(class);
            session.explanation.take()
        };
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
        self.session().assignment.release();
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
        self.session().dispatched(dispatch, runtime.now());
        self.bodies().received = None;
        self.keep_replay_buffer(runtime, body);
        let is_watched = self.session().is_watched();
        if is_watched {
            runtime.watch_over(self);
        }
        Ok(())
    }

    /// Replaces the request's body. The stream's context must be the effective one.
    pub fn set_body(&self, body: &[u8]) -> Result<(), HostError> {
        host::set_buffer(Buffer::Request, body)?;
        // The proxy never mends the length, and a wrong one makes the rest of the body another request. A request with trailers
        // has no length, unless the client sent one.
        let has_trailers = self.session().has_trailers;
        if self.declared_length || !has_trailers {
            let length = body.len().to_string();
            host::set_header(Map::Request, "content-length", length.as_bytes())?;
        }
        Ok(())
    }

    /// Keeps the body if the request may have to be routed again, and the budget allows. Both legs are made from what is kept, so
    /// that the body is read from the proxy once.
    pub fn keep_replay_buffer(&self, runtime: &PoolRuntime, body: Vec<u8>) {
        let may_recover = self.session().assignment.may_recover();
        if may_recover {
            let share = runtime.hold_replay_buffer(body.len()).map(Rc::new);
            self.bodies().replay = share.map(|share| ReplayBuffer { body, share });
        }
    }

    /// Notes that the client has begun to read: no other worker can take over any more.
    pub fn answer_begins(&self, runtime: &PoolRuntime) {
        self.bodies().answer_begins();
        self.session().answer_begins(&mut runtime.router_mut());
    }

    /// Passes the part of the answer that is held back, up to its end: the concurrent prefill was good. Only an edited answer is
    /// read. The stream's context must be the effective one.
    pub fn release_held(&self, runtime: &PoolRuntime) {
        self.answer_begins(runtime);
        let is_edited = self.session().response.is_edited();
        let held = match is_edited {
            true => host::buffer(Buffer::Response).unwrap_or_else(|error| {
                log::error!("[{}] the answer could not be read: {error}", self.ids());
                Vec::new()
            }),
            false => Vec::new(),
        };
        let body = self.session().response.release(&held);
        self.write(runtime, body);
        self.resume_response();
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
        self.set_stage(Stage::Answered);
        if let Err(error) = host::reset_response() {
            log::error!(
                "[{}] the answer could not be broken off: {error}",
                self.ids()
            );
        }
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
        if status < 300 {
            self.session().response.count(&complete.read());
            let took = runtime.vm.now().saturating_sub(self.came);
            runtime.metrics.first_token(took);
        }
        let body = self.session().response.edit_reply(body, complete.form());
        self.answer(u32::from(status), headers, &body);
        self.session().assignment.release();
    }

    /// Copies the request for the clean-up leg, while its client is still being served: more was computed than the client needs.
    pub fn leave_copy(&self, runtime: &PoolRuntime) {
        let bodies = &mut *self.bodies();
        let Some(replay) = bodies.replay.as_ref().filter(|_| bodies.cleanup.is_none()) else {
            return;
        };
        let share = runtime.hold_cleanup_request(replay.body.len());
        bodies.cleanup = share.map(|share| CleanupRequest {
            headers: Rc::clone(&bodies.headers),
            body: replay.body.clone(),
            share,
        });
    }

    /// Keeps the request for the clean-up leg, if the budget allows. Enters the stream's context.
    pub fn leave_cleanup_request(&self, runtime: &PoolRuntime) {
        self.enter();
        let replay = self.bodies().replay.take();
        let body = match replay {
            Some(replay) => Ok(replay.body),
            None => runtime.vm.copy_body(),
        };
        let Ok(body) = body else {
            return;
        };
        let share = runtime.hold_cleanup_request(body.len());
        let bodies = &mut self.bodies();
        if let Some(share) = share {
            bodies.cleanup = Some(CleanupRequest {
                headers: Rc::clone(&bodies.headers),
                body,
                share,
            });
        }
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
