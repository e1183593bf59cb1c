//! Owns what of a request outlives a single callback: shared between its context and the root that makes its calls.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use routing::admission::Waiter;
use routing::answer::{Form, Reader};
use routing::budget::Share;
use routing::fleet::{Worker, WorkerId};
use routing::handoff::fate::Handed;
use routing::ids::Ids;
use routing::request::Generation;
use routing::route::{AbortLeg, Assignment, Dispatch, Refusal};

use crate::cleanup;
use crate::clock::Clock;
use crate::gateway::PoolRuntime;
use crate::headers;
use crate::host::{self, Buffer, Header, HostError, Map};
use crate::planning::RoutingHeaders;
use crate::recovery::{Failure, HeldReply};
use crate::rewrite::Change;
use crate::telemetry::Ended;

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
    /// Its decode leg has failed before the client read anything, and is replaced by calls.
    Recovering,
    /// It was answered from here.
    Answered,
    /// Its stream has ended.
    Ended,
}

/// A prefill that runs beside its decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConcurrentPrefill {
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
    /// Its headers have come, and are held back until it says something.
    Held,
    /// All of it has come, and is held back until the prefill beside is known to be good.
    Complete,
    /// It flows.
    Flowing,
    /// It flowed; its end is held back.
    EndHeld,
}

/// A request's body as its client sent it, kept for as long as the request may have to be placed again.
pub struct ReplayBuffer {
    /// The body.
    pub body: Vec<u8>,
    share: Rc<Share>,
}

/// A request that its client has left, kept for the leg that cleans up.
pub struct CleanupRequest {
    /// As the client sent them.
    pub headers: Rc<[Header]>,
    /// As the client sent it.
    pub body: Vec<u8>,
    _share: Share,
}

/// An answer that must end badly.
pub struct PendingReset {
    /// Why.
    pub refusal: Refusal,
    /// Ticks until it ends: an event that tells why may pass before.
    pub ticks: u8,
}

/// What of a request outlives a single callback.
pub struct Stream {
    id: u32,
    ids: Ids,
    /// Whether the client told its body's length: then the new length must be told too.
    told_length: bool,
    /// Its headers as they came, for as long as a call may be made for it: once it was forwarded the proxy shows them no more.
    headers: RefCell<Rc<[Header]>>,
    /// Set when the request has trailers.
    pub trailers: Cell<bool>,
    /// How far the request has come.
    pub stage: Cell<Stage>,
    /// How far the response has come.
    pub response: Cell<Response>,
    /// The prefill beside decode.
    pub beside: Cell<ConcurrentPrefill>,
    /// What its headers say to the router.
    pub spoken: RefCell<RoutingHeaders>,
    /// The terms of its choice, for a caller who asked for them.
    pub explanation: RefCell<Option<String>>,
    /// What it occupies.
    pub seat: RefCell<Assignment>,
    /// What a prefill worker has handed over to its decode, and what would be told of it if the stream ended now.
    pub handed: Cell<Option<Handed>>,
    /// Where it was forwarded to, one after the other.
    pub destinations: RefCell<Vec<SocketAddr>>,
    /// What it takes to place it again.
    pub spare: RefCell<Option<ReplayBuffer>>,
    /// Counts how often it was placed: an answer to a call of an earlier time is nobody's any more.
    pub attempt: Cell<u32>,
    /// Prefill calls under way for the present attempt.
    pub racing: Cell<u32>,
    /// How long its answer may take.
    pub clock: Clock,
    /// How the first of its decode legs failed, while it is being replaced.
    pub failure: RefCell<Option<Failure>>,
    /// The reply of a decode worker that was called in place of another, while the prefill beside it runs.
    pub held_reply: RefCell<Option<HeldReply>>,
    /// Whether the name of its model has been settled.
    pub is_named: Cell<bool>,
    /// The change that its answer needs.
    pub change: RefCell<Option<Change>>,
    /// Whether the prompt's logprobs, which only prefill knows, are wanted in the answer and not known yet.
    pub wants_logprobs: Cell<bool>,
    /// When it came.
    pub came: Cell<Duration>,
    /// When it began to wait for a worker.
    pub queued: Cell<Duration>,
    /// When its first token came; 0: none has.
    pub first_token: Cell<Duration>,
    /// Tokens of its answer, as far as it has told of them.
    pub tokens: Cell<u64>,
    /// The first digit of the status that it got; 0: none.
    pub code: Cell<usize>,
    /// In which form the answer comes.
    pub form: Cell<Form>,
    /// Why its answer must end badly, though it has begun.
    pub doom: RefCell<Option<PendingReset>>,
    /// Its share of the buffered bodies.
    pub body: RefCell<Option<Rc<Share>>>,
    /// How its prefill can be called off, or made to drop what it has computed: until decode is known to have fetched that.
    pub abort: RefCell<Option<AbortLeg>>,
    /// What its client has left behind.
    pub estate: RefCell<Option<CleanupRequest>>,
}

impl Stream {
    /// A request that has just come.
    pub fn new(id: u32, ids: Ids, headers: Rc<[Header]>) -> Self {
        let is_length = |(name, _): &Header| name == b"content-length";
        Self {
            id,
            ids,
            told_length: headers.iter().any(is_length),
            headers: RefCell::new(headers),
            trailers: Cell::new(false),
            stage: Cell::new(Stage::Forwarded),
            response: Cell::new(Response::Awaited),
            beside: Cell::new(ConcurrentPrefill::Nothing),
            spoken: RefCell::default(),
            explanation: RefCell::default(),
            seat: RefCell::default(),
            handed: Cell::new(None),
            destinations: RefCell::default(),
            spare: RefCell::default(),
            attempt: Cell::new(0),
            racing: Cell::new(0),
            clock: Clock::default(),
            failure: RefCell::default(),
            held_reply: RefCell::default(),
            is_named: Cell::new(false),
            change: RefCell::default(),
            wants_logprobs: Cell::new(false),
            came: Cell::default(),
            queued: Cell::default(),
            first_token: Cell::default(),
            tokens: Cell::default(),
            code: Cell::default(),
            form: Cell::new(Form::Whole),
            doom: RefCell::default(),
            body: RefCell::default(),
            abort: RefCell::default(),
            estate: RefCell::default(),
        }
    }

    /// Whether something of its answer has come since another one's came last, and from the same worker.
    pub fn has_moved_since(&self, other: &Self) -> bool {
        let is_same = |(one, other): (&Rc<Worker>, &Rc<Worker>)| one.id == other.id;
        let (seat, others) = (self.seat.borrow(), other.seat.borrow());
        let is_same = seat
            .decode
            .as_ref()
            .zip(others.decode.as_ref())
            .is_some_and(is_same);
        is_same && self.id != other.id && self.clock.moved_after(&other.clock)
    }

    /// Whether its worker is late with the answer.
    pub fn is_late(&self, now: Duration) -> bool {
        self.stage.get() == Stage::Forwarded && self.clock.has_run_out(self.response.get(), now)
    }

    /// Whether its client has read nothing yet, and waits for a worker that is among these.
    pub fn awaits(&self, workers: &[WorkerId]) -> bool {
        let is_open = self.stage.get() == Stage::Forwarded
            && matches!(self.response.get(), Response::Awaited | Response::Held);
        let seat = self.seat.borrow();
        let is_among =
            |worker: &Option<Rc<Worker>>| worker.as_ref().is_some_and(|w| workers.contains(&w.id));
        is_open && (is_among(&seat.decode) || self.prefills_beside() && is_among(&seat.prefill))
    }

    fn prefills_beside(&self) -> bool {
        self.beside.get() == ConcurrentPrefill::Running
    }

    /// The id that both legs carry: our own.
    pub fn request_id(&self) -> &str {
        self.ids.own()
    }

    /// The ids that a line of the log begins with: the client's, and our own.
    pub fn ids(&self) -> &str {
        self.ids.told()
    }

    /// The number that the proxy knows it by.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Its headers as they came.
    pub fn headers(&self) -> Rc<[Header]> {
        Rc::clone(&self.headers.borrow())
    }

    /// Whether the client still waits for what is done in this `attempt`.
    pub fn waits_for(&self, attempt: u32) -> bool {
        let is_open = matches!(
            self.stage.get(),
            Stage::Prefilling | Stage::Forwarded | Stage::Recovering
        );
        is_open && self.attempt.get() == attempt
    }

    /// What has been begun for it so far concerns it no more.
    pub fn next_attempt(&self) {
        self.attempt.set(self.attempt.get().wrapping_add(1));
        self.racing.set(0);
        self.held_reply.replace(None);
    }

    /// Whether another worker may take the place of one that fails.
    pub fn may_recover(&self) -> bool {
        self.spare.borrow().is_some() && self.seat.borrow().may_recover()
    }

    /// Where it was sent before the proxy tried this address.
    pub fn tried_before(&self, address: SocketAddr) -> Vec<SocketAddr> {
        let destinations = self.destinations.borrow();
        let at = destinations.iter().position(|tried| *tried == address);
        destinations.iter().take(at.unwrap_or(0)).copied().collect()
    }

    /// Whether the client has read something of an answer.
    pub fn answer_has_begun(&self) -> bool {
        matches!(self.response.get(), Response::Flowing | Response::EndHeld)
    }

    /// Its share of what may be held of bodies. A call that carries the body holds it too: the proxy keeps what it was given until
    /// the call has ended, also where the client has left.
    pub fn share(&self) -> Option<Rc<Share>> {
        let buffered = self.body.borrow().clone();
        buffered.or_else(|| Some(Rc::clone(&self.spare.borrow().as_ref()?.share)))
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
    pub fn go_on(self: &Rc<Self>, gateway: &PoolRuntime, dispatch: &Dispatch) {
        let forwarded = gateway
            .vm
            .copy_body()
            .and_then(|body| self.forward(gateway, dispatch, body))
            .and_then(|()| host::resume_request());
        if let Err(error) = forwarded {
            log::error!("[{}] decode could not be dispatched: {error}", self.ids());
            self.refuse(gateway, &Refusal::Internal);
        }
    }

    /// Answers the client with what a worker said.
    pub fn answer(&self, status: u32, kept: &[Header], body: &[u8]) {
        self.stage.set(Stage::Answered);
        self.code
            .set(usize::try_from(status / 100).unwrap_or_default());
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
                self.ids()
            );
        }
    }

    /// Answers a request with a refusal. The stream's context must be the effective one.
    pub fn refuse(&self, gateway: &PoolRuntime, refusal: &Refusal) {
        gateway.note_refusal(self.ids(), refusal);
        let retry_after = refusal.retry_after_s().map(|seconds| seconds.to_string());
        let mut sent = vec![(b"content-type".to_vec(), b"application/json".to_vec())];
        sent.extend(retry_after.map(|seconds| (b"retry-after".to_vec(), seconds.into_bytes())));
        let dropped = refusal.dropped_reason();
        sent.extend(dropped.map(|why| (headers::DROPPED.as_bytes().to_vec(), why.into())));
        self.answer(refusal.status(), &sent, refusal.to_json().as_bytes());
        self.seat.borrow_mut().release();
    }

    /// Writes what was decided into the request, which may then go on. Its body is kept where it may have to be placed again.
    pub fn forward(
        self: &Rc<Self>,
        gateway: &PoolRuntime,
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
        self.destinations.replace(dispatch.destinations.clone());
        self.stage.set(Stage::Forwarded);
        self.body.replace(None);
        self.keep_spare(gateway, body);
        self.clock.start(dispatch.patience, gateway.now());
        if self.clock.runs() || self.seat.borrow().decode.is_some() {
            gateway.watch_over(self);
        }
        Ok(())
    }

    /// Puts another body in the place of the request's. The stream's context must be the effective one.
    pub fn set_body(&self, body: &[u8]) -> Result<(), HostError> {
        host::set_buffer(Buffer::Request, body)?;
        // The proxy never mends the length, and a wrong one makes the rest of the body another request. A request with trailers
        // has none, unless the client told one.
        if self.told_length || !self.trailers.get() {
            let length = body.len().to_string();
            host::set_header(Map::Request, "content-length", length.as_bytes())?;
        }
        Ok(())
    }

    fn keep_spare(&self, gateway: &PoolRuntime, body: Vec<u8>) {
        if self.seat.borrow().may_recover() {
            let share = gateway.hold_spare(body.len());
            let spare = share.map(|share| ReplayBuffer {
                body,
                share: Rc::new(share),
            });
            self.spare.replace(spare);
        }
    }

    /// The client has begun to read: there is no way back.
    pub fn answer_begins(&self, gateway: &PoolRuntime) {
        self.handed.set(self.handed.get().map(Handed::fetched));
        self.spare.replace(None);
        self.headers.replace(Rc::default());
        let mut router = gateway.router.borrow_mut();
        router.answer_begins(&mut self.seat.borrow_mut());
        drop(router);
        // While prefill runs beside, a client that leaves calls it off; then decode has fetched what it computed.
        if self.beside.get() == ConcurrentPrefill::Nothing {
            self.abort.replace(None);
        }
    }

    /// The prefill beside decode has done its part: what was held back of the answer goes on.
    pub fn prefill_is_good(&self, gateway: &PoolRuntime) {
        self.beside.set(ConcurrentPrefill::Nothing);
        if self.answer_has_begun() {
            self.abort.replace(None);
        }
        let is_there = match self.response.get() {
            Response::Complete | Response::EndHeld => self.stage.get() == Stage::Forwarded,
            Response::Awaited | Response::Held | Response::Flowing => false,
        };
        if is_there && self.enter() {
            self.answer_begins(gateway);
            self.rewrite_rest();
            self.response.set(Response::Flowing);
            self.resume_response();
        }
    }

    /// Changes what is held back of the answer: its end is there.
    fn rewrite_rest(&self) {
        if self.change.borrow().is_none() {
            return;
        }
        match host::buffer(Buffer::Response) {
            Ok(bytes) => self.rewrite(&bytes, true),
            Err(error) => log::error!("[{}] the answer could not be changed: {error}", self.ids()),
        }
    }

    /// Lets what was held back of the answer go on. The stream's context must be the effective one.
    pub fn resume_response(&self) {
        if let Err(error) = host::resume_response() {
            log::error!("[{}] the answer could not go on: {error}", self.ids());
        }
    }

    /// Ends an answer that has begun so that its client sees that it is not whole. The stream's context must be the effective
    /// one.
    pub fn break_off(&self, gateway: &PoolRuntime, reason: &'static str) {
        gateway.telemetry.reset(reason);
        self.stage.set(Stage::Answered);
        if let Err(error) = host::reset_response() {
            log::error!(
                "[{}] the answer could not be broken off: {error}",
                self.ids()
            );
        }
    }

    /// The client has left, or was answered. Frees what the stream holds, and sees to what its workers hold for it. To be
    /// called in the stream's own context.
    pub fn settle(&self, gateway: &PoolRuntime) {
        let stage = self.stage.replace(Stage::Ended);
        gateway.vm.receiving.end(self.id);
        cleanup::tell_of_handed(gateway, self);
        match stage {
            Stage::Prefilling | Stage::Recovering => self.leave_estate(gateway),
            Stage::Waiting(waiter) => gateway.waits_no_more(waiter),
            _ => {}
        }
        self.beside.set(ConcurrentPrefill::Nothing);
        self.call_off(gateway);
        self.tell_of_end(gateway, stage);
        self.seat.borrow_mut().release();
        let mut router = gateway.router.borrow_mut();
        router.request_ended(&self.seat.borrow());
        drop(router);
        self.body.replace(None);
        self.spare.replace(None);
        self.held_reply.replace(None);
        gateway.watch_no_more(self);
        gateway.telemetry.stream_closed();
    }

    /// All of an answer is there at once: its tokens are counted.
    pub fn answered_whole(&self, gateway: &PoolRuntime, reader: &Reader) {
        self.tokens.set(reader.tokens());
        let took = gateway.vm.now().saturating_sub(self.came.get());
        gateway.metrics.first_token(took);
    }

    fn tell_of_end(&self, gateway: &PoolRuntime, stage: Stage) {
        let tokens = self.tokens.get();
        // What was held back reached nobody.
        let is_answered = stage == Stage::Answered || self.answer_has_begun();
        gateway.metrics.ended(&Ended {
            facts: &self.seat.borrow().facts,
            output_tokens: tokens,
            code: if is_answered { self.code.get() } else { 0 },
        });
        let begun = self.first_token.get();
        let further = u32::try_from(tokens.saturating_sub(1)).unwrap_or(u32::MAX);
        // An answer in one piece has all of its tokens at once.
        if self.form.get() == Form::Events && further > 0 && !begun.is_zero() {
            let lasted = gateway.vm.now().saturating_sub(begun);
            gateway
                .metrics
                .between_tokens(lasted.checked_div(further).unwrap_or_default());
        }
    }

    /// Keeps a copy of the request for the leg that cleans up, of a client who is still being served: more was computed for it
    /// than it needs.
    pub fn leave_copy(&self, gateway: &PoolRuntime) {
        let spare = self.spare.borrow();
        let Some(spare) = spare.as_ref().filter(|_| self.estate.borrow().is_none()) else {
            return;
        };
        let share = gateway.hold_estate(spare.body.len());
        self.estate.replace(share.map(|share| CleanupRequest {
            headers: self.headers(),
            body: spare.body.clone(),
            _share: share,
        }));
    }

    /// Keeps the request for the leg that cleans up, as far as the budget goes. The stream's context is entered.
    pub fn leave_estate(&self, gateway: &PoolRuntime) {
        self.enter();
        let spare = self.spare.take().map(|spare| Ok(spare.body));
        let body = spare.unwrap_or_else(|| gateway.vm.copy_body());
        let Ok(body) = body else {
            return;
        };
        let Some(share) = gateway.hold_estate(body.len()) else {
            return;
        };
        self.estate.replace(Some(CleanupRequest {
            headers: self.headers(),
            body,
            _share: share,
        }));
    }

    /// Tells the prefill worker to drop the request, where it can be told and holds anything. Its answer, made from a stream that
    /// is gone, reaches nobody. The call's token, where one is made.
    pub fn call_off(&self, gateway: &PoolRuntime) -> Option<u32> {
        let abort = self.abort.take()?;
        cleanup::send(gateway, self, &abort)
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
