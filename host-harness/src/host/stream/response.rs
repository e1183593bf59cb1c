//! Owns the response's path through the plugin: upstream's or the host's own, held parts, and their release to the client.

use bytes::Bytes;
use hyper::Response;
use hyper::body::{Body, Frame, Incoming};

use super::client::Client;
use super::{Halt, Source, Step, Stream};
use crate::host::body::BodyError;
use crate::host::maps::Headers;
use crate::host::state::{LocalReply, MapSlot};
use crate::host::upstream::{Failure, is_hop_by_hop};
use crate::host::vm::Action;

/// The answer of Envoy, with the shipped bootstrap, to a client whose response broke before any of it was sent on.
const BROKEN_OFF: &str = r#"{"error":{"code":"broken_off","message":"the worker broke its answer off before its first token","param":null,"type":"service_unavailable"}}"#;

/// State of the response.
#[derive(Default)]
pub struct ResponseSide {
    /// Everything was sent to the client.
    pub finished: bool,
    /// The plugin has seen the headers.
    begun: bool,
    /// Paused by the plugin.
    held: bool,
    /// The plugin buffers the body.
    buffering: bool,
    /// The plugin has seen the end.
    ended: bool,
}

/// Answers 503 without the plugin.
pub fn refuse(client: &mut Client) {
    client.send_head(&head_of(&failed_vm()), true);
}

fn failed_vm() -> LocalReply {
    LocalReply {
        status: 503,
        details: "wasm_fail_stream".to_owned(),
        ..LocalReply::default()
    }
}

fn head_of(reply: &LocalReply) -> Headers {
    let mut headers = reply.headers.clone();
    headers.remove(b"content-length");
    headers.set(b":status", reply.status.to_string().as_bytes());
    if !reply.body.is_empty() {
        headers.set(b"content-length", reply.body.len().to_string().as_bytes());
        if headers.get(b"content-type").is_none() {
            headers.add(b"content-type", b"text/plain");
        }
    }
    headers
}

impl Stream {
    pub(super) fn on_head(&mut self, head: Result<Response<Incoming>, Failure>) -> Step {
        self.note_attempts();
        let response = match head {
            Ok(response) => response,
            Err(failure) => {
                let reply = failure.reply(self.attempts.count.get());
                return self.local_reply(reply);
            }
        };
        self.note("via_upstream", 0);
        let (parts, body) = response.into_parts();
        let mut headers = Headers::default();
        headers.add(b":status", parts.status.as_str().as_bytes());
        headers.extend(&parts.headers);
        headers.remove_where(is_hop_by_hop);
        let end = body.is_end_stream();
        self.source = if end {
            Source::None
        } else {
            Source::Body(body)
        };
        self.begin_response(headers, end)
    }

    pub(super) fn on_response_frame(
        &mut self,
        frame: Option<Result<Frame<Bytes>, hyper::Error>>,
    ) -> Step {
        let frame = match frame {
            Some(Ok(frame)) => frame,
            Some(Err(_)) => return self.on_broken_off(),
            None => {
                self.source = Source::None;
                return self.on_response_data(Bytes::new(), End::Here);
            }
        };
        match frame.into_data() {
            // The end comes separately, as in Envoy's HTTP/1 codec.
            Ok(data) => self.on_response_data(data, End::Later),
            Err(frame) => match frame.into_trailers() {
                Ok(trailers) => self.on_response_trailers(&trailers),
                Err(_) => Ok(()),
            },
        }
    }

    /// Handles a response that upstream broke off. A client that has received nothing of it gets an error without a plugin
    /// callback, as in Envoy, in the form that `local_reply_config` of its bootstrap gives; otherwise the client's connection
    /// breaks.
    fn on_broken_off(&mut self) -> Step {
        const DETAILS: &str = "upstream_reset_after_response_started{connection_termination}";
        const FLAGS: i64 = 0x40;
        if self.client.has_head() {
            return Err(Halt::Abort(DETAILS, FLAGS));
        }
        self.note(DETAILS, FLAGS);
        self.close_request();
        self.source = Source::None;
        let mut headers = Headers::default();
        headers.set(b":status", b"503");
        headers.set(b"content-type", b"application/json");
        headers.set(b"retry-after", b"1");
        headers.set(b"content-length", BROKEN_OFF.len().to_string().as_bytes());
        self.direct_reply(&headers, Bytes::from_static(BROKEN_OFF.as_bytes()))
    }

    /// A response that does not come from upstream. It passes through the plugin's response callbacks, the plugin's own replies
    /// too, unless a response has passed through them already.
    pub(super) fn local_reply(&mut self, reply: LocalReply) -> Step {
        if self.response.finished {
            return Ok(());
        }
        self.close_request();
        if self.client.has_head() {
            return Err(Halt::Abort("", 0));
        }
        self.note(&reply.details, reply.flags);
        let headers = head_of(&reply);
        if self.response.begun {
            return self.direct_reply(&headers, reply.body);
        }
        let end = reply.body.is_empty();
        self.begin_response(headers, end)?;
        if end || self.response.finished {
            return Ok(());
        }
        self.on_response_data(reply.body, End::Here)
    }

    fn direct_reply(&mut self, headers: &Headers, body: Bytes) -> Step {
        let status = self.note_status(headers);
        let _ = self
            .vm
            .stream(self.id, |stream| stream.response_body.take());
        tracing::debug!(
            ?status,
            "a reply replaces a response that the plugin has seen"
        );
        self.response.ended = true;
        self.response.finished = true;
        self.client.send_head(headers, body.is_empty());
        let mut sent = self.client.send_data(body);
        sent = sent.and_then(|()| self.client.send_end(None));
        self.check_length(sent)
    }

    fn begin_response(&mut self, headers: Headers, end: bool) -> Step {
        self.response.begun = true;
        self.response.ended = end;
        self.note_status(&headers);
        let _ = self.vm.stream(self.id, |stream| {
            stream.response_headers = MapSlot::Open(headers);
        });
        let action = self.vm.response_headers(self.id, end)?;
        let released = self.settle_response(action);
        if action == Action::Continue {
            let _ = self
                .vm
                .stream(self.id, |stream| stream.response_headers.release());
        }
        released
    }

    fn on_response_data(&mut self, data: Bytes, end: End) -> Step {
        if self.response.ended {
            return Ok(());
        }
        let size = self
            .vm
            .stream(self.id, |stream| stream.response_body.append(&data))
            .ok_or(Halt::VmFailed)?;
        if self.response.buffering && size >= self.process.buffer_limit {
            return self.refuse_large_response();
        }
        self.response.ended = end == End::Here;
        let action = self.vm.response_body(self.id, size, end == End::Here)?;
        self.response.buffering = action == Action::Pause;
        self.settle_response(action)
    }

    fn on_response_trailers(&mut self, trailers: &hyper::HeaderMap) -> Step {
        self.source = Source::None;
        if self.response.ended {
            return Ok(());
        }
        let trailers = trailers.iter().collect();
        let _ = self.vm.stream(self.id, |stream| {
            stream.response_trailers = MapSlot::Open(trailers);
        });
        self.response.ended = true;
        let action = self.vm.response_trailers(self.id)?;
        self.settle_response(action)
    }

    fn settle_response(&mut self, action: Action) -> Step {
        let Some(commands) = self.after_call()? else {
            return Ok(());
        };
        self.response.held = action == Action::Pause;
        if !self.response.held {
            self.release_response()?;
        }
        for command in commands {
            self.obey(command)?;
        }
        Ok(())
    }

    pub(super) fn continue_response(&mut self) -> Step {
        if !self.response.held {
            return Ok(());
        }
        self.response.held = false;
        self.response.buffering = false;
        self.release_response()
    }

    /// Sends all that the plugin held back: headers, buffered body, trailers, end.
    fn release_response(&mut self) -> Step {
        let released = self.vm.stream(self.id, |stream| {
            let headers = stream.response_headers.headers().cloned();
            let trailers = stream.response_trailers.headers().cloned();
            (headers, stream.response_body.take(), trailers)
        });
        let (headers, data, trailers) = released.ok_or(Halt::VmFailed)?;
        let Some(headers) = headers.filter(|_| self.response.begun) else {
            return Ok(());
        };
        let ended = self.response.ended;
        if !self.client.has_head() {
            self.note_status(&headers);
            let bodiless = ended && data.is_empty() && trailers.is_none();
            self.client.send_head(&headers, bodiless);
        }
        let mut sent = self.client.send_data(data);
        if ended {
            self.response.finished = true;
            sent = sent.and_then(|()| self.client.send_end(trailers.as_ref()));
        }
        self.check_length(sent)
    }

    fn check_length(&mut self, sent: Result<(), BodyError>) -> Step {
        sent.map_err(|error| {
            tracing::error!(
                "response body: {error}; the plugin must set content-length when it changes a body"
            );
            Halt::Abort("response_content_length_mismatch", 0)
        })
    }

    fn refuse_large_response(&mut self) -> Step {
        self.local_reply(LocalReply {
            status: 500,
            details: "response_payload_too_large".to_owned(),
            body: "Internal Server Error".into(),
            ..LocalReply::default()
        })
    }

    fn note_status(&mut self, headers: &Headers) -> Option<u16> {
        let status = std::str::from_utf8(headers.get(b":status")?).ok()?;
        let status = status.parse().ok()?;
        let _ = self.vm.stream(self.id, |stream| {
            stream.info.response_code = Some(status);
        });
        Some(status)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Here,
    Later,
}
