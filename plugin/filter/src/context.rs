//! Owns one request's callbacks: what the proxy says of it becomes a question to `routing`, the answer becomes host calls.

use std::net::SocketAddr;
use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;
use routing::answer::{Form, Watch};
use routing::config::Protocol;
use routing::request::{Head, Kind};
use routing::route::{Plan, Refusal, Turn};

use crate::endpoints;
use crate::gateway::Gateway;
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};
use crate::planning::{self, Next};
use crate::stream::{Beside, Response, Stage, Stream};

/// The filter's part in one stream.
pub struct StreamContext {
    id: u32,
    gateway: Rc<Gateway>,
    stream: Option<Rc<Stream>>,
    /// What the client reads instead of the proxy's own words.
    replacement: Option<String>,
    /// Reads an answer that is charged to a worker.
    watch: Option<Watch>,
}

impl StreamContext {
    /// A stream that has just begun.
    pub fn new(id: u32, gateway: Rc<Gateway>) -> Self {
        Self {
            id,
            gateway,
            stream: None,
            replacement: None,
            watch: None,
        }
    }

    /// Takes up a request: what a client must not set is removed, and its id is made sure of.
    fn open(&self, received: &[Header]) -> Result<Rc<Stream>, HostError> {
        let steering = received
            .iter()
            .filter(|(name, _)| headers::is_not_a_clients(name));
        for (name, _) in steering.clone() {
            host::remove_header(Map::Request, name)?;
        }
        let sent_id =
            find(received, headers::REQUEST_ID).and_then(|id| std::str::from_utf8(id).ok());
        let request_id = match sent_id.filter(|id| !id.is_empty()) {
            Some(id) => id.to_owned(),
            None => self.give_id()?,
        };
        self.gateway.telemetry.stream_opened();
        let told_length = find(received, "content-length").is_some();
        let stream = Stream::new(self.id, request_id, told_length);
        let mut spoken = stream.spoken.borrow_mut();
        if self.gateway.router.borrow().pool().trust_clients {
            spoken.steering = steering.cloned().collect();
        }
        let value = |name: &str| find(received, name).map(<[u8]>::to_vec);
        spoken.tenant = value(headers::TENANT);
        spoken.session = self
            .gateway
            .session_headers
            .iter()
            .find_map(|name| value(name));
        drop(spoken);
        Ok(Rc::new(stream))
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
            let outcome = {
                let subset = stream.spoken.borrow().subset();
                self.gateway.router.borrow_mut().plain(subset.as_ref())
            };
            let plan = outcome.map(|(dispatch, seat)| Plan::Forward(dispatch, seat));
            return action(planning::carry_out(&self.gateway, stream, plan, &[]));
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
        let next = match stream.stage.get() {
            Stage::Reading(generation) => {
                planning::plan(&self.gateway, stream, generation, Turn::New)
            }
            _ => {
                let mut router = self.gateway.router.borrow_mut();
                router.advance(host::now());
                let subset = stream.spoken.borrow().subset();
                let outcome = router.plan_unread(Refusal::Encoded, subset.as_ref());
                drop(router);
                let body = host::buffer(Buffer::Request).unwrap_or_default();
                planning::carry_out(&self.gateway, stream, outcome, &body)
            }
        };
        action(next)
    }

    /// The response of a worker has begun.
    fn worker_answered(&self, stream: &Stream, is_error: bool) {
        if !is_error {
            stream.staged.set(None);
        }
        if let Some(explanation) = stream.explanation.take() {
            // For people only, as the names are: a response that cannot be marked is still a response.
            let _ = host::set_header(Map::Response, headers::EXPLAIN, explanation.as_bytes());
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
        let protocol = self.gateway.router.borrow().pool().protocol;
        let what = match protocol {
            Protocol::Direct => "frontend",
            Protocol::Nixl | Protocol::Sglang => "decode worker",
        };
        let refusal = Refusal::Unreachable {
            what,
            tried: stream.destinations.get(),
        };
        if protocol != Protocol::Direct {
            let mut router = self.gateway.router.borrow_mut();
            router.unreachable(&stream.seat.borrow());
        }
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

    /// Begins to read an answer that is charged to a worker, and says in which form it comes. An error is none: it tells
    /// nothing of the worker's speed.
    fn begin_watch(&mut self, stream: &Stream, is_error: bool) -> Option<Form> {
        let mut seat = stream.seat.borrow_mut();
        if is_error || seat.decode.is_none() {
            seat.release();
            return None;
        }
        let kind = host::header(Map::Response, "content-type").unwrap_or_default();
        let told = Form::of(&kind);
        // Events that are compressed cannot be told apart: the first byte must do.
        let form = match host::header(Map::Response, "content-encoding") {
            None => told,
            Some(_) => Form::Whole,
        };
        self.watch = Some(Watch::new(form));
        Some(told)
    }

    /// Reads a chunk of the answer: its first token ends the prefill charge, the others let decode's grow.
    fn read_chunk(&mut self, stream: &Stream) {
        let Some(watch) = &mut self.watch else {
            return;
        };
        let had_begun = watch.has_begun();
        watch.read(&host::buffer(Buffer::Response).unwrap_or_default());
        let has_begun_now = watch.has_begun() && !had_begun;
        let mut seat = stream.seat.borrow_mut();
        seat.generated(watch.tokens());
        if has_begun_now {
            seat.first_token(host::now());
            drop(seat);
            self.gateway.report_load();
            planning::call_waiting(&self.gateway);
            stream.enter();
        }
    }

    /// The response's body while a prefill runs beside it.
    fn body_beside(&mut self, stream: &Stream, end_of_stream: bool) -> Action {
        match stream.response.get() {
            Response::Held | Response::EndHeld => Action::Pause,
            Response::Awaited | Response::Flowing => match end_of_stream || self.is_done() {
                true => {
                    stream.response.set(Response::EndHeld);
                    Action::Pause
                }
                false => Action::Continue,
            },
        }
    }

    /// Whether the event that ends the answer well has come. It must wait until the prefill beside is known to be good.
    fn is_done(&self) -> bool {
        self.watch.as_ref().is_some_and(Watch::is_done)
    }

    fn settle(&mut self) {
        if let Some(stream) = self.stream.take() {
            stream.settle(&self.gateway);
            planning::call_waiting(&self.gateway);
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
            Stage::Waiting(_) | Stage::Prefilling | Stage::Answered | Stage::Ended => {
                return Action::Pause;
            }
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
            Stage::Waiting(_) | Stage::Prefilling | Stage::Answered | Stage::Ended => Action::Pause,
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
        let form = self.begin_watch(&stream, is_error);
        self.gateway.report_load();
        if stream.beside.get() == Beside::Running && form == Some(Form::Whole) {
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
        if size > 0 {
            self.read_chunk(&stream);
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

fn action(next: Next) -> Action {
    match next {
        Next::GoesOn => Action::Continue,
        Next::Stays => Action::Pause,
    }
}

/// The first value of a header.
fn find<'h>(headers: &'h [Header], name: &str) -> Option<&'h [u8]> {
    headers
        .iter()
        .find(|(known, _)| known.as_slice() == name.as_bytes())
        .map(|(_, value)| value.as_slice())
}
