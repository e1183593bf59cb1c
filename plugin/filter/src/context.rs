//! Owns one request's callbacks: what the proxy says of it becomes a question to `routing`, the answer becomes host calls.

use std::net::SocketAddr;
use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;
use routing::config::Protocol;
use routing::request::{Head, Kind};
use routing::route::{Plan, Refusal, Told};

use crate::endpoints;
use crate::gateway::Gateway;
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};
use crate::prefill_call;
use crate::stream::{Beside, Response, Stage, Stream};

/// The event that ends a stream of events well.
const DONE: &[u8] = b"[DONE]";

/// The filter's part in one stream.
pub struct StreamContext {
    id: u32,
    gateway: Rc<Gateway>,
    stream: Option<Rc<Stream>>,
    /// The headers that steer, of a caller who is trusted.
    steering: Vec<Header>,
    /// What the client reads instead of the proxy's own words.
    replacement: Option<String>,
    token_seen: bool,
    /// The last bytes of the chunk before, in which the end of a stream may have begun.
    tail: Vec<u8>,
}

impl StreamContext {
    /// A stream that has just begun.
    pub fn new(id: u32, gateway: Rc<Gateway>) -> Self {
        Self {
            id,
            gateway,
            stream: None,
            steering: Vec::new(),
            replacement: None,
            token_seen: false,
            tail: Vec::new(),
        }
    }

    /// Takes up a request: what a client must not set is removed, and its id is made sure of.
    fn open(&mut self, received: &[Header]) -> Result<Rc<Stream>, HostError> {
        let steering = received
            .iter()
            .filter(|(name, _)| headers::is_not_a_clients(name));
        for (name, _) in steering.clone() {
            host::remove_header(Map::Request, name)?;
        }
        if self.gateway.router.borrow().pool().trust_clients {
            self.steering = steering.cloned().collect();
        }
        let sent_id =
            find(received, headers::REQUEST_ID).and_then(|id| std::str::from_utf8(id).ok());
        let request_id = match sent_id.filter(|id| !id.is_empty()) {
            Some(id) => id.to_owned(),
            None => self.give_id()?,
        };
        self.gateway.telemetry.stream_opened();
        let told_length = find(received, "content-length").is_some();
        Ok(Rc::new(Stream::new(self.id, request_id, told_length)))
    }

    fn give_id(&self) -> Result<String, HostError> {
        let mut router = self.gateway.router.borrow_mut();
        let id = format!("{:016x}{:016x}", router.random(), router.random());
        host::set_header(Map::Request, headers::REQUEST_ID, id.as_bytes())?;
        Ok(id)
    }

    /// What a request's head leads to, once it is taken up.
    fn begin(&self, stream: &Rc<Stream>, head: Head<'_>, has_body: bool) -> Action {
        let Kind::Generation(generation) = head.kind() else {
            let outcome = self.gateway.router.borrow_mut().plain();
            return self.finish(
                stream,
                outcome.map(|(dispatch, seat)| Plan::Forward(dispatch, seat)),
                &[],
            );
        };
        stream.stage.set(match head.is_encoded() {
            true => Stage::ReadingEncoded,
            false => Stage::Reading(generation),
        });
        match has_body {
            true => Action::Pause,
            false => self.route(stream),
        }
    }

    /// The body is complete: the request is routed.
    fn route(&self, stream: &Rc<Stream>) -> Action {
        let body = host::buffer(Buffer::Request).unwrap_or_default();
        let told = Told {
            headers: &self.steering,
            now_s: host::now_ns() / 1_000_000_000,
        };
        let outcome = match stream.stage.get() {
            Stage::Reading(generation) => self
                .gateway
                .router
                .borrow_mut()
                .plan(generation, &body, told),
            _ => self
                .gateway
                .router
                .borrow_mut()
                .plan_unread(Refusal::Encoded),
        };
        self.finish(stream, outcome, &body)
    }

    /// Carries out what was decided.
    fn finish(&self, stream: &Rc<Stream>, outcome: Result<Plan, Refusal>, body: &[u8]) -> Action {
        let done = match outcome {
            Ok(Plan::Forward(dispatch, seat)) => {
                if let Some(fallback) = seat.fallback {
                    log::info!("[{}] runs whole: {}", stream.request_id(), fallback.name());
                    self.gateway.telemetry.fell_back(fallback.name());
                }
                stream.seat.replace(seat);
                stream.forward(&dispatch, body).map(|()| Action::Continue)
            }
            Ok(Plan::Prefill(phase, seat)) => {
                stream.seat.replace(seat);
                stream.stage.set(Stage::Prefilling);
                prefill_call::submit(&self.gateway, phase, stream).map(|()| Action::Pause)
            }
            Ok(Plan::Answer(answer)) => {
                let kind = (
                    b"content-type".to_vec(),
                    answer.content_type.as_bytes().to_vec(),
                );
                stream.answer(200, &[kind], answer.body.as_bytes());
                Ok(Action::Pause)
            }
            Err(refusal) => {
                log::info!("[{}] refused: {refusal}", stream.request_id());
                stream.refuse(&self.gateway, &refusal);
                Ok(Action::Pause)
            }
        };
        self.gateway.report_load();
        done.unwrap_or_else(|error| {
            log::error!(
                "[{}] the request could not be forwarded: {error}",
                stream.request_id()
            );
            stream.refuse(&self.gateway, &Refusal::Internal);
            Action::Pause
        })
    }

    /// The response of a worker has begun.
    fn worker_answered(&self, stream: &Stream, is_error: bool) {
        if !is_error {
            stream.staged.set(None);
        }
        let names_wanted = self.gateway.config.response_headers;
        if stream.destinations.get() > 1 || names_wanted {
            let served: Option<SocketAddr> = host::property(&["upstream", "address"])
                .and_then(|address| std::str::from_utf8(&address).ok()?.parse().ok());
            if let Some(address) = served {
                self.served_by(stream, address);
            }
        }
        if names_wanted {
            let seat = stream.seat.borrow();
            for (name, worker) in [
                (headers::PREFILL, &seat.prefill),
                (headers::DECODE, &seat.decode),
            ] {
                // For people only: a response that cannot be marked is still a response.
                let _ = worker
                    .as_ref()
                    .map(|worker| host::set_header(Map::Response, name, worker.name.as_bytes()));
            }
        }
    }

    /// Writes down who really answers. Where that is another one than was picked, the one that was picked refused the
    /// connection.
    fn served_by(&self, stream: &Stream, address: SocketAddr) {
        let picked = stream.seat.borrow().decode.clone();
        let mut router = self.gateway.router.borrow_mut();
        router.served_by(&mut stream.seat.borrow_mut(), address);
        let serves = stream.seat.borrow().decode.clone();
        if let (Some(picked), Some(serves)) = (picked, serves)
            && picked.id != serves.id
        {
            let id = stream.request_id();
            log::warn!(
                "[{id}] decode worker {} took no connection, {} answers",
                picked.name,
                serves.name
            );
            self.gateway.telemetry.decode_retried();
        }
    }

    /// The proxy could not reach anybody: the client is told so in the shape of other errors.
    fn nobody_reached(&mut self, stream: &Stream) {
        let what = match self.gateway.router.borrow().pool().protocol {
            Protocol::Direct => "frontend",
            Protocol::Nixl | Protocol::Sglang => "decode worker",
        };
        let refusal = Refusal::Unreachable {
            what,
            tried: stream.destinations.get(),
        };
        self.gateway.telemetry.refused(refusal.code());
        log::warn!("[{}] {refusal}", stream.request_id());
        let json = refusal.to_json();
        let length = json.len().to_string();
        let told = [
            ("content-type", "application/json"),
            ("content-length", length.as_str()),
            ("retry-after", "1"),
        ];
        let mut written = told
            .iter()
            .map(|(name, value)| host::set_header(Map::Response, name, value.as_bytes()));
        if written.all(|outcome| outcome.is_ok()) {
            self.replacement = Some(json);
        }
    }

    /// Whether this chunk must wait until the prefill beside is known to be good: it ends the answer well.
    fn ends_well(&mut self, end_of_stream: bool) -> bool {
        if end_of_stream {
            return true;
        }
        let chunk = host::buffer(Buffer::Response).unwrap_or_default();
        let mut seen = std::mem::take(&mut self.tail);
        seen.extend_from_slice(&chunk);
        let found = seen.windows(DONE.len()).any(|window| window == DONE);
        let kept = seen.len().saturating_sub(DONE.len().saturating_sub(1));
        self.tail = seen.split_off(kept);
        found
    }

    /// The response's body while a prefill runs beside it.
    fn body_beside(&mut self, stream: &Stream, end_of_stream: bool) -> Action {
        match stream.response.get() {
            Response::Held | Response::EndHeld => Action::Pause,
            Response::Awaited | Response::Flowing => match self.ends_well(end_of_stream) {
                true => {
                    stream.response.set(Response::EndHeld);
                    Action::Pause
                }
                false => Action::Continue,
            },
        }
    }

    fn settle(&mut self) {
        if let Some(stream) = self.stream.take() {
            stream.settle(&self.gateway);
        }
    }
}

impl Context for StreamContext {}

impl HttpContext for StreamContext {
    fn on_http_request_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        let Ok(received) = host::headers(Map::Request) else {
            return Action::Continue;
        };
        let path = find(&received, ":path").unwrap_or_default();
        let head = Head {
            method: find(&received, ":method").unwrap_or_default(),
            path,
            encoding: find(&received, "content-encoding"),
        };
        self.gateway.request_came();
        if endpoints::answer(&self.gateway, head) {
            return Action::Pause;
        }
        let stream = match self.open(&received) {
            Ok(stream) => stream,
            Err(error) => {
                log::error!("a request's headers could not be changed: {error}");
                return Action::Continue;
            }
        };
        self.stream = Some(Rc::clone(&stream));
        self.begin(&stream, head, !end_of_stream)
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        let Some(stream) = self.stream.clone() else {
            return Action::Pause;
        };
        match stream.stage.get() {
            Stage::Reading(_) | Stage::ReadingEncoded => {}
            Stage::Forwarded => return Action::Continue,
            Stage::Prefilling | Stage::Answered | Stage::Ended => return Action::Pause,
        }
        stream.body.replace(None);
        let Some(held) = self.gateway.hold_body(size) else {
            stream.refuse(&self.gateway, &Refusal::Busy);
            return Action::Pause;
        };
        stream.body.replace(Some(held));
        match end_of_stream {
            true => self.route(&stream),
            false => Action::Pause,
        }
    }

    /// A request with trailers never shows the end of its stream with its body: this is the second edge.
    fn on_http_request_trailers(&mut self, _count: usize) -> Action {
        let Some(stream) = self.stream.clone() else {
            return Action::Pause;
        };
        stream.trailers.set(true);
        match stream.stage.get() {
            Stage::Reading(_) | Stage::ReadingEncoded => self.route(&stream),
            Stage::Forwarded => Action::Continue,
            Stage::Prefilling | Stage::Answered | Stage::Ended => Action::Pause,
        }
    }

    fn on_http_response_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        let Some(stream) = self
            .stream
            .clone()
            .filter(|stream| stream.stage.get() == Stage::Forwarded)
        else {
            return Action::Continue;
        };
        stream.response.set(Response::Flowing);
        let status = host::header(Map::Response, ":status").unwrap_or_default();
        let is_error = matches!(status.first(), Some(b'4' | b'5'));
        let by_worker = !is_error
            || host::property(&["response", "code_details"]).as_deref() == Some(b"via_upstream");
        if by_worker {
            self.worker_answered(&stream, is_error);
        } else if status == b"503" && !end_of_stream {
            self.nobody_reached(&stream);
        }
        self.gateway.report_load();
        if stream.beside.get() == Beside::Running && !is_error && !is_event_stream() {
            // Nobody reads half a document: all of it waits, so that a failure can still be told as an error.
            stream.response.set(Response::Held);
            return Action::Pause;
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        if self.replacement.is_some() && !end_of_stream {
            return Action::Pause;
        }
        if let Some(json) = self.replacement.take() {
            // The length has been told already; if the body cannot be set the proxy breaks the response off.
            if let Err(error) = host::set_buffer(Buffer::Response, json.as_bytes()) {
                log::error!("an error's body could not be written: {error}");
            }
            return Action::Continue;
        }
        let Some(stream) = self.stream.clone() else {
            return Action::Continue;
        };
        if size > 0 && !self.token_seen {
            self.token_seen = true;
            stream.seat.borrow_mut().first_token();
            self.gateway.report_load();
        }
        match stream.beside.get() {
            Beside::Nothing => Action::Continue,
            Beside::Running => self.body_beside(&stream, end_of_stream),
        }
    }

    fn on_log(&mut self) {
        self.settle();
    }
}

impl Drop for StreamContext {
    /// Runs on every way a stream can end, even where `on_log` did not.
    fn drop(&mut self) {
        self.settle();
    }
}

fn is_event_stream() -> bool {
    host::header(Map::Response, "content-type")
        .is_some_and(|kind| kind.starts_with(b"text/event-stream"))
}

/// The first value of a header.
fn find<'h>(headers: &'h [Header], name: &str) -> Option<&'h [u8]> {
    headers
        .iter()
        .find(|(known, _)| known.as_slice() == name.as_bytes())
        .map(|(_, value)| value.as_slice())
}
