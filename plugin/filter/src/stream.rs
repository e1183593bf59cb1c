//! Owns what of a request outlives a single callback: shared between its context and the root that makes its calls.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use routing::admission::Waiter;
use routing::fleet::Worker;
use routing::request::Generation;
use routing::route::{AbortLeg, Dispatch, Refusal, Seat};

use crate::gateway::{Gateway, Share};
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};
use crate::planning::Spoken;

/// How far a request has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Its body is being buffered.
    Reading(Generation),
    /// Its body is compressed, and is buffered only to be let through whole.
    ReadingEncoded,
    /// All who could take it are too busy: it waits for one of them.
    Waiting(Waiter),
    /// A prefill worker is being called, and the client waits for it.
    Prefilling,
    /// The proxy forwards it.
    Forwarded,
    /// It was answered from here.
    Answered,
    /// Its stream has ended.
    Ended,
}

/// A prefill that runs beside its decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// There is none, or it has done its part.
    Nothing,
    /// It is under way: decode's answer must not end well before it is known to be good.
    Running,
}

/// How far the response has come, and what of it is held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Response {
    /// Nothing of it has come.
    Awaited,
    /// All of it is held back, its headers included.
    Held,
    /// It flows.
    Flowing,
    /// It flowed; its end is held back.
    EndHeld,
}

/// A request that its client has left, kept for the leg that cleans up.
pub struct Estate {
    /// As the client sent them.
    pub headers: Vec<Header>,
    /// As the client sent it.
    pub body: Vec<u8>,
    _share: Share,
}

/// What of a request outlives a single callback.
pub struct Stream {
    id: u32,
    request_id: String,
    /// Whether the client told its body's length: then the new length must be told too.
    told_length: bool,
    /// Set when the request has trailers.
    pub trailers: Cell<bool>,
    /// How far the request has come.
    pub stage: Cell<Stage>,
    /// How far the response has come.
    pub response: Cell<Response>,
    /// The prefill beside decode.
    pub beside: Cell<Beside>,
    /// What its headers say to the router.
    pub spoken: RefCell<Spoken>,
    /// The terms of its choice, for a caller who asked for them.
    pub explanation: RefCell<Option<String>>,
    /// What it occupies.
    pub seat: RefCell<Seat>,
    /// Blocks that a prefill worker holds for a decode that is not known to have begun.
    pub staged: Cell<Option<u64>>,
    /// How many destinations it was forwarded to, one after the other.
    pub destinations: Cell<usize>,
    /// Its share of the buffered bodies.
    pub body: RefCell<Option<Share>>,
    /// How its prefill can be called off.
    pub abort: RefCell<Option<AbortLeg>>,
    /// What its client has left behind.
    pub estate: RefCell<Option<Estate>>,
}

impl Stream {
    /// A request that has just come.
    pub fn new(id: u32, request_id: String, told_length: bool) -> Self {
        Self {
            id,
            request_id,
            told_length,
            trailers: Cell::new(false),
            stage: Cell::new(Stage::Forwarded),
            response: Cell::new(Response::Awaited),
            beside: Cell::new(Beside::Nothing),
            spoken: RefCell::default(),
            explanation: RefCell::default(),
            seat: RefCell::default(),
            staged: Cell::new(None),
            destinations: Cell::new(0),
            body: RefCell::default(),
            abort: RefCell::default(),
            estate: RefCell::default(),
        }
    }

    /// The id that both legs carry.
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Whether the client still waits, for a prefill or for the end of its answer.
    pub fn is_open(&self) -> bool {
        matches!(self.stage.get(), Stage::Prefilling | Stage::Forwarded)
    }

    /// Whether the client has read something of an answer.
    pub fn answer_has_begun(&self) -> bool {
        matches!(self.response.get(), Response::Flowing | Response::EndHeld)
    }

    /// Makes this stream the one that host calls are about; false when it is gone.
    pub fn enter(&self) -> bool {
        host::enter_context(self.id).is_ok()
    }

    /// Another prefill worker has taken over.
    pub fn prefill_moved(&self, worker: Rc<Worker>) {
        self.seat.borrow_mut().prefill = Some(worker);
    }

    /// Forwards a leg of a request that waited for its prefill. The stream's context must be the effective one.
    pub fn go_on(&self, gateway: &Gateway, dispatch: &Dispatch) {
        let forwarded = host::buffer(Buffer::Request)
            .and_then(|body| self.forward(dispatch, &body))
            .and_then(|()| host::resume_request());
        if let Err(error) = forwarded {
            log::error!(
                "[{}] decode could not be dispatched: {error}",
                self.request_id
            );
            self.refuse(gateway, &Refusal::Internal);
        }
    }

    /// Answers the client with what a worker said.
    pub fn answer(&self, status: u32, kept: &[Header], body: &[u8]) {
        self.stage.set(Stage::Answered);
        let explanation = self.explanation.take();
        let mut sent: Vec<(&str, &[u8])> = kept
            .iter()
            .filter_map(|(name, value)| Some((std::str::from_utf8(name).ok()?, value.as_slice())))
            .collect();
        let told = explanation.as_ref();
        sent.extend(told.map(|json| (headers::EXPLAIN, json.as_bytes())));
        if let Err(error) = host::respond(status, &sent, body) {
            log::error!(
                "[{}] the answer {status} could not be sent: {error}",
                self.request_id
            );
        }
    }

    /// Answers a request with a refusal. The stream's context must be the effective one.
    pub fn refuse(&self, gateway: &Gateway, refusal: &Refusal) {
        gateway.telemetry.refused(refusal.code());
        let retry_after = refusal.retry_after_s().map(|seconds| seconds.to_string());
        let mut sent = vec![(b"content-type".to_vec(), b"application/json".to_vec())];
        sent.extend(retry_after.map(|seconds| (b"retry-after".to_vec(), seconds.into_bytes())));
        self.answer(refusal.status(), &sent, refusal.to_json().as_bytes());
        self.seat.borrow_mut().release();
        gateway.report_load();
    }

    /// Writes what was decided into the request, which may then go on.
    pub fn forward(&self, dispatch: &Dispatch, body: &[u8]) -> Result<(), HostError> {
        for (name, value) in destination_headers(dispatch) {
            host::set_header(Map::Request, name, value.as_bytes())?;
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
        self.destinations.set(dispatch.destinations.len());
        self.stage.set(Stage::Forwarded);
        self.body.replace(None);
        Ok(())
    }

    /// The prefill beside decode has done its part: what was held back of the answer goes on.
    pub fn prefill_is_good(&self) {
        self.beside.set(Beside::Nothing);
        self.abort.replace(None);
        let held = matches!(self.response.get(), Response::Held | Response::EndHeld);
        if held && self.enter() {
            self.response.set(Response::Flowing);
            if let Err(error) = host::resume_response() {
                log::error!("[{}] the answer could not go on: {error}", self.request_id);
            }
        }
    }

    /// The prefill beside decode has failed: a client that has read nothing yet is told so, one that has reads no good end.
    pub fn prefill_has_failed(&self, gateway: &Gateway, refusal: &Refusal) {
        self.beside.set(Beside::Nothing);
        self.abort.replace(None);
        if !self.enter() {
            return;
        }
        match self.response.get() {
            Response::Awaited | Response::Held => self.refuse(gateway, refusal),
            Response::Flowing | Response::EndHeld => self.break_off(gateway, refusal),
        }
    }

    fn break_off(&self, gateway: &Gateway, refusal: &Refusal) {
        gateway.telemetry.refused(refusal.code());
        self.stage.set(Stage::Answered);
        if let Err(error) = host::reset_response() {
            log::error!(
                "[{}] the answer could not be broken off: {error}",
                self.request_id
            );
        }
    }

    /// The client has left, or was answered. Frees what the stream holds, and sees to what its workers hold for it. To be
    /// called in the stream's own context.
    pub fn settle(&self, gateway: &Gateway) {
        let stage = self.stage.replace(Stage::Ended);
        if let Some(blocks) = self.staged.take() {
            gateway.telemetry.leaked(blocks);
            log::info!(
                "[{}] ended before decode answered: {blocks} blocks may stay until their lease ends",
                self.request_id
            );
        }
        match stage {
            Stage::Prefilling => self.leave_estate(gateway),
            Stage::Waiting(waiter) => gateway.waits_no_more(waiter),
            _ => {}
        }
        if self.beside.replace(Beside::Nothing) == Beside::Running {
            self.call_off(gateway);
        }
        self.seat.borrow_mut().release();
        self.body.replace(None);
        gateway.telemetry.stream_closed();
        gateway.report_load();
    }

    /// Keeps the request for the leg that cleans up, as far as the budget goes.
    fn leave_estate(&self, gateway: &Gateway) {
        let (Ok(body), Ok(headers)) = (host::buffer(Buffer::Request), host::headers(Map::Request))
        else {
            return;
        };
        let Some(share) = gateway.hold_estate(body.len()) else {
            return;
        };
        self.estate.replace(Some(Estate {
            headers,
            body,
            _share: share,
        }));
    }

    /// Tells the prefill worker to drop the request. Its answer, made from a stream that is gone, reaches nobody.
    fn call_off(&self, gateway: &Gateway) {
        const PATIENCE: Duration = Duration::from_secs(5);
        let Some(abort) = self.abort.take() else {
            return;
        };
        let cluster = gateway.router.borrow().pool().clusters.prefill.clone();
        let destination = abort.destination.to_string();
        let headers = vec![
            (":method", "POST"),
            (":path", abort.path),
            (":authority", destination.as_str()),
            ("content-type", "application/json"),
            (headers::DESTINATION, &destination),
            (headers::REQUEST_ID, &self.request_id),
        ];
        if let Err(status) = host::call(&cluster, headers, Some(abort.body.as_bytes()), PATIENCE) {
            log::warn!(
                "[{}] prefill could not be called off: {status:?}",
                self.request_id
            );
        }
    }
}

/// The headers that say where a leg goes: in order, with one retry for each destination behind the first. One more would go
/// to the cluster's empty fallback, and replace the worker's own answer.
pub fn destination_headers(dispatch: &Dispatch) -> Vec<(&'static str, String)> {
    let list: Vec<String> = dispatch
        .destinations
        .iter()
        .map(SocketAddr::to_string)
        .collect();
    let retries = list.len().saturating_sub(1);
    let mut headers = vec![(headers::DESTINATION, list.join(","))];
    if retries > 0 {
        headers.push((headers::RETRY_ON, headers::BEFORE_SENT.to_owned()));
        headers.push((headers::MAX_RETRIES, retries.to_string()));
    }
    headers
}
