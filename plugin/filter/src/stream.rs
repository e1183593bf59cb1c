//! Owns one request's callbacks: what the proxy says of it becomes a question to `routing`, the answer becomes host calls.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;
use routing::config::Protocol;
use routing::fleet::Worker;
use routing::request::{Generation, Head, Kind};
use routing::route::{Dispatch, Plan, Refusal, Seat};

use crate::endpoints;
use crate::gateway::{Gateway, HeldBody};
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};
use crate::prefill_call;

/// What of a request outlives a single callback, shared with the root while a prefill call is under way.
pub struct Stream {
    id: u32,
    request_id: String,
    /// Whether the client told its body's length: then the new length must be told too.
    told_length: bool,
    trailers: Cell<bool>,
    stage: Cell<Stage>,
    seat: RefCell<Seat>,
    /// Blocks that a prefill worker holds for a decode that is not known to have begun.
    staged: Cell<Option<u64>>,
    destinations: Cell<usize>,
    body: RefCell<Option<HeldBody>>,
}

/// How far a request has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its body is being buffered.
    Reading(Generation),
    /// Its body is compressed, and is buffered only to be let through whole.
    ReadingEncoded,
    /// A prefill worker is being called.
    Prefilling,
    /// The proxy forwards it.
    Forwarded,
    /// It was answered from here.
    Answered,
    /// Its stream has ended.
    Ended,
}

impl Stream {
    /// The stream's context.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The id that both legs carry.
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Whether the client still waits for a prefill.
    pub fn waits(&self) -> bool {
        self.stage.get() == Stage::Prefilling
    }

    /// Another prefill worker has taken over.
    pub fn prefill_moved(&self, worker: Rc<Worker>) {
        self.seat.borrow_mut().prefill = Some(worker);
    }

    /// Forwards the decode leg. The stream's context must be the effective one.
    pub fn decode(&self, gateway: &Gateway, dispatch: &Dispatch, blocks: u64) {
        self.staged.set(Some(blocks));
        let forwarded = host::buffer(Buffer::Request)
            .and_then(|body| self.forward(dispatch, &body))
            .and_then(|()| host::resume_request());
        if let Err(error) = forwarded {
            log::error!(
                "[{}] decode could not be dispatched: {error}",
                self.request_id
            );
            refuse(gateway, self, &Refusal::Internal);
        }
    }

    /// Answers the client with what a worker said.
    pub fn answer(&self, status: u32, headers: &[Header], body: &[u8]) {
        self.stage.set(Stage::Answered);
        let headers: Vec<(&str, &[u8])> = headers
            .iter()
            .filter_map(|(name, value)| Some((std::str::from_utf8(name).ok()?, value.as_slice())))
            .collect();
        if let Err(error) = host::respond(status, &headers, body) {
            log::error!(
                "[{}] the answer {status} could not be sent: {error}",
                self.request_id
            );
        }
    }

    /// Writes what was decided into the request, which may then go on.
    fn forward(&self, dispatch: &Dispatch, body: &[u8]) -> Result<(), HostError> {
        let list: Vec<String> = dispatch
            .destinations
            .iter()
            .map(SocketAddr::to_string)
            .collect();
        host::set_header(
            Map::Request,
            headers::DESTINATION,
            list.join(",").as_bytes(),
        )?;
        // One retry for each destination behind the first: one more would go to the cluster's empty fallback and replace
        // the worker's own answer.
        let retries = list.len().saturating_sub(1);
        if retries > 0 {
            host::set_header(Map::Request, headers::RETRY_ON, headers::BEFORE_SENT)?;
            host::set_header(
                Map::Request,
                headers::MAX_RETRIES,
                retries.to_string().as_bytes(),
            )?;
        }
        for (name, value) in &dispatch.headers {
            host::set_header(Map::Request, name, value.as_bytes())?;
        }
        if let Some(edits) = &dispatch.edits {
            let edited = edits.apply(body);
            host::set_buffer(Buffer::Request, &edited)?;
            // The proxy never mends the length, and a wrong one makes the rest of the body another request. A request with
            // trailers has none, unless the client told one.
            if self.told_length || !self.trailers.get() {
                host::set_header(
                    Map::Request,
                    "content-length",
                    edited.len().to_string().as_bytes(),
                )?;
            }
        }
        self.destinations.set(list.len());
        self.stage.set(Stage::Forwarded);
        self.body.replace(None);
        Ok(())
    }
}

/// Answers a request with a refusal. The stream's context must be the effective one.
pub fn refuse(gateway: &Gateway, stream: &Stream, refusal: &Refusal) {
    gateway.telemetry.refused(refusal.code());
    let retry_after = refusal.retry_after_s().map(|seconds| seconds.to_string());
    let mut sent = vec![(b"content-type".to_vec(), b"application/json".to_vec())];
    sent.extend(retry_after.map(|seconds| (b"retry-after".to_vec(), seconds.into_bytes())));
    stream.answer(refusal.status(), &sent, refusal.to_json().as_bytes());
    stream.seat.borrow_mut().release();
    gateway.report_load();
}

/// The filter's part in one stream.
pub struct StreamContext {
    id: u32,
    gateway: Rc<Gateway>,
    stream: Option<Rc<Stream>>,
    /// What the client reads instead of the proxy's own words.
    replacement: Option<String>,
    token_seen: bool,
}

impl StreamContext {
    /// A stream that has just begun.
    pub fn new(id: u32, gateway: Rc<Gateway>) -> Self {
        Self {
            id,
            gateway,
            stream: None,
            replacement: None,
            token_seen: false,
        }
    }

    /// Takes up a request: what a client must not set is removed, and its id is made sure of.
    fn open(&self, received: &[Header]) -> Result<Rc<Stream>, HostError> {
        for (name, _) in received
            .iter()
            .filter(|(name, _)| headers::is_not_a_clients(name))
        {
            host::remove_header(Map::Request, name)?;
        }
        let sent_id =
            find(received, headers::REQUEST_ID).and_then(|id| std::str::from_utf8(id).ok());
        let request_id = match sent_id.filter(|id| !id.is_empty()) {
            Some(id) => id.to_owned(),
            None => {
                let mut router = self.gateway.router.borrow_mut();
                let id = format!("{:016x}{:016x}", router.random(), router.random());
                host::set_header(Map::Request, headers::REQUEST_ID, id.as_bytes())?;
                id
            }
        };
        self.gateway.telemetry.stream_opened();
        Ok(Rc::new(Stream {
            id: self.id,
            request_id,
            told_length: find(received, "content-length").is_some(),
            trailers: Cell::new(false),
            stage: Cell::new(Stage::Forwarded),
            seat: RefCell::default(),
            staged: Cell::new(None),
            destinations: Cell::new(0),
            body: RefCell::default(),
        }))
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
        let outcome = match stream.stage.get() {
            Stage::Reading(generation) => self.gateway.router.borrow_mut().plan(generation, &body),
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
                stream.seat.replace(seat);
                stream.forward(&dispatch, body).map(|()| Action::Continue)
            }
            Ok(Plan::PrefillFirst(phase, seat)) => {
                stream.seat.replace(seat);
                stream.stage.set(Stage::Prefilling);
                prefill_call::submit(&self.gateway, phase, stream).map(|()| Action::Pause)
            }
            Err(refusal) => {
                log::info!("[{}] refused: {refusal}", stream.request_id);
                refuse(&self.gateway, stream, &refusal);
                Ok(Action::Pause)
            }
        };
        self.gateway.report_load();
        done.unwrap_or_else(|error| {
            log::error!(
                "[{}] the request could not be forwarded: {error}",
                stream.request_id
            );
            refuse(&self.gateway, stream, &Refusal::Internal);
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
            let served = host::property(&["upstream", "address"])
                .and_then(|address| std::str::from_utf8(&address).ok()?.parse().ok());
            if let Some(address) = served {
                let mut router = self.gateway.router.borrow_mut();
                router.served_by(&mut stream.seat.borrow_mut(), address);
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

    /// The proxy could not reach anybody: the client is told so in the shape of other errors.
    fn nobody_reached(&mut self, stream: &Stream) {
        let what = match self.gateway.router.borrow().pool().protocol {
            Protocol::Direct => "frontend",
            Protocol::Nixl => "decode worker",
        };
        let refusal = Refusal::Unreachable {
            what,
            tried: stream.destinations.get(),
        };
        self.gateway.telemetry.refused(refusal.code());
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

    /// Frees what the stream holds, once.
    fn settle(&mut self) {
        let Some(stream) = self.stream.take() else {
            return;
        };
        stream.stage.set(Stage::Ended);
        if let Some(blocks) = stream.staged.take() {
            self.gateway.telemetry.leaked(blocks);
            log::info!(
                "[{}] ended before decode answered: {blocks} blocks may stay until their lease ends",
                stream.request_id
            );
        }
        stream.seat.borrow_mut().release();
        stream.body.replace(None);
        self.gateway.telemetry.stream_closed();
        self.gateway.report_load();
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
        if endpoints::is_own(path) {
            endpoints::answer(&self.gateway, head);
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
            refuse(&self.gateway, &stream, &Refusal::Busy);
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
        if size > 0 && !self.token_seen {
            self.token_seen = true;
            if let Some(stream) = &self.stream {
                stream.seat.borrow_mut().first_token();
                self.gateway.report_load();
            }
        }
        Action::Continue
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

/// The first value of a header.
fn find<'h>(headers: &'h [Header], name: &str) -> Option<&'h [u8]> {
    headers
        .iter()
        .find(|(known, _)| known.as_slice() == name.as_bytes())
        .map(|(_, value)| value.as_slice())
}
