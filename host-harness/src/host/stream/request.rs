//! Owns the request's path through the plugin: received parts, held parts, and their release to a worker.

use bytes::Bytes;
use hyper::Version;
use hyper::body::{Body, Frame, Incoming};
use hyper::http::request::Parts;

use super::{Halt, RequestOrigin, Source, Step, Stream};
use crate::host::body::{BodyError, Outgoing};
use crate::host::maps::Headers;
use crate::host::state::{LocalReply, MapSlot};
use crate::host::upstream::{DESTINATION, OutgoingRequest, is_hop_by_hop};
use crate::host::vm::Action;

/// State of the request.
pub struct RequestSide {
    /// The part still to be received from the client.
    pub body: Option<Incoming>,
    /// The body sent upstream.
    pub outgoing: Outgoing,
    /// Paused by the plugin.
    held: bool,
    /// The plugin buffers the body.
    buffering: bool,
    /// The plugin has seen the end.
    ended: bool,
    /// The headers were sent upstream.
    started: bool,
    /// Data and end come in one callback, as with HTTP/2 frames; Envoy's HTTP/1 codec reports the end separately.
    ends_with_data: bool,
    /// A response without upstream has begun: the rest of the request is ignored.
    closed: bool,
}

impl RequestSide {
    /// A request whose body is still to be received.
    pub fn new(body: Incoming, version: Version) -> RequestSide {
        RequestSide {
            body: Some(body),
            outgoing: Outgoing::new(None),
            held: false,
            buffering: false,
            ended: false,
            started: false,
            ends_with_data: version == Version::HTTP_2,
            closed: false,
        }
    }

    /// True while more may be read from the client.
    pub fn has_room(&self) -> bool {
        !self.started || self.outgoing.has_room()
    }
}

/// The headers as Envoy would present them: pseudo-headers first, without the headers of the client's connection, and without
/// those by which a client could choose a worker or control the proxy.
pub fn intake(parts: &Parts, origin: RequestOrigin) -> Headers {
    let authority = parts
        .uri
        .authority()
        .map(|authority| authority.as_str().as_bytes())
        .or_else(|| parts.headers.get("host").map(|host| host.as_bytes()));
    let local = origin.local.to_string();
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let scheme = parts.uri.scheme_str().unwrap_or("http");
    let mut headers = Headers::default();
    // HTTP/1.0 needs no host; Envoy uses a default.
    headers.add(b":authority", authority.unwrap_or(local.as_bytes()));
    headers.add(b":path", path.as_bytes());
    headers.add(b":method", parts.method.as_str().as_bytes());
    headers.add(b":scheme", scheme.as_bytes());
    headers.extend(&parts.headers);
    let chunked = parts.headers.contains_key("transfer-encoding");
    let nominated = nominated(parts);
    headers.remove_where(|name| {
        is_hop_by_hop(name)
            || name == b"host"
            || name == DESTINATION
            || name.starts_with(b"x-envoy-")
            || (chunked && name == b"content-length")
            || nominated.iter().any(|it| it.as_bytes() == name)
    });
    headers.set(b"x-forwarded-proto", scheme.as_bytes());
    if headers.get(b"x-request-id").is_none() {
        headers.add(b"x-request-id", request_id().as_bytes());
    }
    headers
}

/// Headers that the client declared as hop-by-hop.
fn nominated(parts: &Parts) -> Vec<String> {
    if parts.version >= Version::HTTP_2 {
        return Vec::new();
    }
    let connection = parts.headers.get_all("connection");
    connection
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect()
}

/// A random UUID, version 4.
fn request_id() -> String {
    let mut bytes: [u8; 16] = rand::random();
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = |range: &[u8]| -> String { range.iter().map(|byte| format!("{byte:02x}")).collect() };
    format!(
        "{}-{}-{}-{}-{}",
        hex(&bytes[..4]),
        hex(&bytes[4..6]),
        hex(&bytes[6..8]),
        hex(&bytes[8..10]),
        hex(&bytes[10..])
    )
}

impl Stream {
    pub(super) fn start_request(&mut self) -> Step {
        let end = self.request.body.as_ref().is_none_or(Body::is_end_stream);
        if end {
            self.request.body = None;
        }
        let action = self.vm.request_headers(self.id, end)?;
        if action == Action::Continue {
            let _ = self
                .vm
                .stream(self.id, |stream| stream.request_headers.release());
        }
        self.request.ended = end;
        self.settle_request(action)
    }

    pub(super) fn on_request_frame(
        &mut self,
        frame: Option<Result<Frame<Bytes>, hyper::Error>>,
    ) -> Step {
        let frame = match frame {
            Some(Ok(frame)) => frame,
            Some(Err(_)) => return Err(Halt::ClientGone),
            None => {
                self.request.body = None;
                return self.on_request_data(Bytes::new());
            }
        };
        let last = self.request.body.as_ref().is_none_or(Body::is_end_stream);
        if last && self.request.ends_with_data {
            self.request.body = None;
        }
        match frame.into_data() {
            Ok(data) => self.on_request_data(data),
            Err(frame) => match frame.into_trailers() {
                Ok(trailers) => self.on_request_trailers(&trailers),
                Err(_) => Ok(()),
            },
        }
    }

    fn on_request_data(&mut self, data: Bytes) -> Step {
        if self.request.closed || self.request.ended {
            return Ok(());
        }
        let end = self.request.body.is_none();
        let size = self
            .vm
            .stream(self.id, |stream| stream.request_body.append(&data))
            .ok_or(Halt::VmFailed)?;
        // Envoy adds to the buffer before it calls the plugin while buffering, and only afterwards otherwise.
        if self.request.buffering && size >= self.process.buffer_limit {
            return self.refuse_large_request();
        }
        let action = self.vm.request_body(self.id, size, end)?;
        self.request.ended = end;
        self.request.buffering = action == Action::Pause;
        let size = self
            .vm
            .stream(self.id, |stream| stream.request_body.bytes.len())
            .unwrap_or(0);
        if self.request.buffering && size >= self.process.buffer_limit {
            return self.refuse_large_request();
        }
        self.settle_request(action)
    }

    fn on_request_trailers(&mut self, trailers: &hyper::HeaderMap) -> Step {
        // hyper has no frames after trailers, but reports the end only when polled again.
        self.request.body = None;
        if self.request.closed || self.request.ended {
            return Ok(());
        }
        let trailers = trailers.iter().collect();
        let _ = self.vm.stream(self.id, |stream| {
            stream.request_trailers = MapSlot::Open(trailers);
        });
        let action = self.vm.request_trailers(self.id)?;
        self.request.ended = true;
        self.settle_request(action)
    }

    fn settle_request(&mut self, action: Action) -> Step {
        let Some(commands) = self.after_call()? else {
            return Ok(());
        };
        self.request.held = action == Action::Pause;
        if !self.request.held {
            self.release_request()?;
        }
        for command in commands {
            self.obey(command)?;
        }
        Ok(())
    }

    pub(super) fn continue_request(&mut self) -> Step {
        if !self.request.held {
            return Ok(());
        }
        self.request.held = false;
        self.request.buffering = false;
        self.release_request()
    }

    /// Sends all that the plugin held back: headers, buffered body, end.
    fn release_request(&mut self) -> Step {
        if self.request.closed {
            return Ok(());
        }
        let released = self.vm.stream(self.id, |stream| {
            let headers = stream.request_headers.headers().cloned();
            (headers.unwrap_or_default(), stream.request_body.take())
        });
        let (headers, data) = released.ok_or(Halt::VmFailed)?;
        let first = !self.request.started;
        if first {
            self.request.started = true;
            self.request.outgoing = Outgoing::new(headers.content_length());
        }
        let outgoing = &self.request.outgoing;
        let mut pushed = outgoing.push(data);
        if self.request.ended && !outgoing.is_complete() {
            pushed = pushed.and_then(|()| outgoing.end());
        }
        if let Err(error) = pushed {
            return self.break_request(error);
        }
        if first {
            return self.send_upstream(&headers);
        }
        if outgoing.retained() > self.process.buffer_limit as u64 {
            outgoing.forget_sent();
        }
        Ok(())
    }

    fn send_upstream(&mut self, headers: &Headers) -> Step {
        let route = self.vm.stream(self.id, |stream| stream.info.route.clone());
        let cluster = route.and_then(|route| self.process.clusters.get(&route.cluster));
        let Some(request) = OutgoingRequest::route(headers, cluster.map(AsRef::as_ref)) else {
            tracing::error!(
                "the plugin let a request go without a usable method, path or authority"
            );
            return self.local_reply(LocalReply {
                status: 502,
                details: "invalid_request_headers".to_owned(),
                ..LocalReply::default()
            });
        };
        if !request.may_retry() {
            self.request.outgoing.forget_sent();
        }
        let upstreams = std::rc::Rc::clone(self.vm.upstreams());
        let outgoing = self.request.outgoing.clone();
        let sending = upstreams.send(request, outgoing, std::rc::Rc::clone(&self.attempts));
        self.source = Source::Sending(Box::pin(sending));
        Ok(())
    }

    /// Rejects a body whose length differs from its content-length: it would be truncated, or smuggled into the next request.
    fn break_request(&mut self, error: BodyError) -> Step {
        tracing::error!(
            "request body: {error}; the plugin must set content-length when it changes a body"
        );
        self.local_reply(LocalReply {
            status: 502,
            details: "request_content_length_mismatch".to_owned(),
            body: "the request's content-length does not match its body".into(),
            ..LocalReply::default()
        })
    }

    fn refuse_large_request(&mut self) -> Step {
        self.local_reply(LocalReply {
            status: 413,
            details: "request_payload_too_large".to_owned(),
            body: "Payload Too Large".into(),
            ..LocalReply::default()
        })
    }

    /// Ends the request for the plugin and for upstream; further bytes from the client are read and dropped.
    pub(super) fn close_request(&mut self) {
        self.request.closed = true;
        self.source = Source::None;
    }
}
