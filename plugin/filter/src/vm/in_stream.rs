//! Owns what is done to a stream in its own context: the proxy carries it out on the effective context, whichever that is.

use std::ops::Deref;
use std::rc::Rc;

use proxy_wasm::types::Action;
use routing::budget::Share;
use routing::route::{Dispatch, Refusal};
use routing::session::{CompleteAnswer, NewBody, ReplayBuffer, Stage};

use super::stream::destination_headers;
use super::{PoolRuntime, Stream};
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};

/// A stream whose context is the effective one.
pub struct InStream(Rc<Stream>);

impl Deref for InStream {
    type Target = Rc<Stream>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl InStream {
    /// The stream of the present callback.
    pub fn of_callback(stream: &Rc<Stream>) -> Self {
        Self(Rc::clone(stream))
    }

    /// Makes the stream's context the effective one; none if the stream is gone.
    pub fn enter(stream: &Rc<Stream>) -> Option<Self> {
        host::enter_context(stream.id()).ok()?;
        Some(Self(Rc::clone(stream)))
    }

    /// Forwards a request that waited for its prefill.
    pub fn go_on(&self, runtime: &PoolRuntime, dispatch: &Dispatch) {
        let kept = self.bodies().replay.take();
        let (body, bound) = match kept {
            Some(ReplayBuffer { body, bound }) => (Ok(body), Some(bound)),
            None => (runtime.vm.copy_body(), None),
        };
        let forwarded = body
            .and_then(|body| self.forward(runtime, dispatch, body, bound))
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

    /// Answers a request with a refusal.
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

    /// Writes a dispatch into the request, which may then go on. The body is kept if the request may have to be routed again,
    /// within the `bound` that it was kept in before, if it was.
    pub fn forward(
        &self,
        runtime: &PoolRuntime,
        dispatch: &Dispatch,
        body: Vec<u8>,
        bound: Option<Share>,
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
        self.keep_replay_buffer(runtime, body, bound);
        self.bodies().forwarded();
        let is_watched = self.session().is_watched();
        if is_watched {
            runtime.watch_over(self);
        }
        Ok(())
    }

    /// Replaces the request's body.
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

    /// Passes the part of the answer that is held back, up to its end: the concurrent prefill was good. Only an edited answer is
    /// read.
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

    /// Writes a part of the answer as the client gets it.
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

    /// Resumes an answer that was held back.
    pub fn resume_response(&self) {
        if let Err(error) = host::resume_response() {
            log::error!("[{}] the answer could not go on: {error}", self.ids());
        }
    }

    /// Breaks off an answer that has begun, so that the client sees that it is incomplete.
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

    /// Sends the client the complete answer of a worker's, edited as a forwarded answer would have been.
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
}

fn write_document(document: &[u8]) -> Result<(), HostError> {
    host::set_buffer(Buffer::Response, document)?;
    let length = document.len().to_string();
    host::set_header(Map::Response, "content-length", length.as_bytes())
}
