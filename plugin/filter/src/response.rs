//! Owns one response's callbacks: what of the answer is held back, read and edited.
//!
//! Headers are held back until the answer has content: as long as the client has read nothing, another worker can take the place
//! of one that fails.

use std::net::SocketAddr;
use std::rc::Rc;

use proxy_wasm::types::Action;
use routing::answer::{Form, Reader, Verdict};
use routing::outcome::{Came, Follows, of_words};
use routing::route::{Assignment, Refusal};

use crate::cleanup;
use crate::headers;
use crate::host::{self, Buffer, Header, Headers, Map};
use crate::planning;
use crate::pool_runtime::PoolRuntime;
use crate::recovery::{self, Failure, LegEnd};
use crate::stream::{ConcurrentPrefill, Response, Stage, Stream};

/// Bytes that count as content, whatever they are: no engine's first event is longer.
const MOST_HELD: usize = 64 * 1024;

/// Longest unstreamed answer that is held to be edited, in bytes: half of what the proxy buffers, as a rule.
const MOST_CHANGED: usize = 512 * 1024;

/// State of one response.
#[derive(Default)]
pub struct Reading {
    /// Body sent to the client in place of the proxy's own error text.
    replacement: Option<String>,
    /// Reader of an answer that is charged to a worker.
    reader: Option<Reader>,
    /// Bytes of the held body that have been read already.
    read: usize,
    /// Whether the response's end has been seen.
    has_ended: bool,
    /// Whether the client has been sent the error event of a pending reset.
    has_told_reset: bool,
}

impl Reading {
    /// Handles the response's headers.
    pub fn headers(&mut self, runtime: &PoolRuntime, stream: &Rc<Stream>, end: bool) -> Action {
        match stream.stage.get() {
            Stage::Forwarded => {}
            // A late answer of a worker that is being replaced.
            Stage::Recovering => return Action::Pause,
            _ => return Action::Continue,
        }
        self.has_ended = end;
        stream.response.set(Response::Held);
        let received = Headers::of(Map::Response).unwrap_or_default();
        let status = received.first(":status").unwrap_or_default();
        stream.code.set(first_digit(status));
        let action = match status.first() {
            Some(b'2') => self.success(runtime, stream, &received, end),
            _ => self.error(runtime, stream, status, end),
        };
        if action == Action::Continue {
            stream.response.set(Response::Flowing);
            stream.clock.mark_activity();
        }
        action
    }

    fn success(
        &mut self,
        runtime: &PoolRuntime,
        stream: &Rc<Stream>,
        received: &Headers,
        end: bool,
    ) -> Action {
        mark(runtime, stream);
        let is_changed = stream.change.borrow().is_some();
        if stream.assignment.borrow().decode.is_none() && !is_changed {
            stream.answer_begins(runtime);
            return Action::Continue;
        }
        let kind = received.first("content-type").unwrap_or_default();
        let form = Form::of(kind);
        stream.form.set(form);
        let is_edited = stream.change.borrow().is_some() || stream.wants_logprobs.get();
        if is_edited && form == Form::Events {
            // The length after the edits is not known yet.
            let _ = host::remove_header(Map::Response, b"content-length");
        }
        self.reader = Some(Reader::new(kind, received.first("content-encoding")));
        // An unknown path may well answer nothing.
        let expects_tokens = stream.assignment.borrow().expects_tokens();
        match (expects_tokens, end) {
            // The headers contain the length, which the edits change.
            (false, false) if is_changed && form == Form::Whole => {
                hold_to_change(runtime, stream, received)
            }
            (false, _) => Action::Continue,
            (true, true) => self.empty(runtime, stream),
            (true, false) => Action::Pause,
        }
    }

    /// Recovers from an answer that has ended without content.
    fn empty(&mut self, runtime: &PoolRuntime, stream: &Rc<Stream>) -> Action {
        log::warn!("[{}] its worker answered nothing", stream.ids());
        let end = ended(runtime, stream, Came::Empty);
        recovery::begin(runtime, stream, Failure::Empty, end);
        Action::Pause
    }

    fn error(
        &mut self,
        runtime: &PoolRuntime,
        stream: &Rc<Stream>,
        status: &[u8],
        end: bool,
    ) -> Action {
        let details = host::property(&["response", "code_details"]).unwrap_or_default();
        if details == b"via_upstream" {
            mark(runtime, stream);
            let code = code(status);
            let ended = ended(runtime, stream, Came::Status(code));
            // Neither a redirect nor a switch of protocols is an answer to a request for text.
            let is_unusable = code < 400 && stream.assignment.borrow().expects_tokens();
            let failure = match is_unusable {
                true => Failure::Unusable { status: code },
                false => Failure::Status,
            };
            let is_to_be_replaced =
                ended.meaning.follows != Follows::PassedOn && stream.may_recover();
            if is_unusable || is_to_be_replaced {
                recovery::begin(runtime, stream, failure, ended);
                return Action::Pause;
            }
            cleanup::give_up(runtime, stream);
        } else if status.first() == Some(&b'5') {
            let (failure, ended) = blame(runtime, stream, &details);
            if stream.may_recover() {
                recovery::begin(runtime, stream, failure, ended);
                return Action::Pause;
            }
            if status == b"503" && !end {
                self.nobody_reached(runtime, stream);
            }
        }
        // An error says nothing about the worker's speed.
        stream.assignment.borrow_mut().release();
        Action::Continue
    }

    /// The proxy reached no worker: the error gets the shape of the filter's other errors.
    fn nobody_reached(&mut self, runtime: &PoolRuntime, stream: &Stream) {
        let what = match runtime.router.borrow().pool().rules().reaches_workers {
            false => "frontend",
            true => "decode worker",
        };
        let refusal = Refusal::Unreachable {
            what,
            tried: stream.destinations.borrow().len(),
        };
        runtime.note_refusal(stream.ids(), &refusal);
        log::warn!("[{}] {refusal}", stream.ids());
        let json = refusal.to_json();
        let length = json.len().to_string();
        let replaced = [
            ("content-type", "application/json"),
            ("content-length", length.as_str()),
            ("retry-after", "1"),
        ];
        let mut written = replaced
            .iter()
            .map(|(name, value)| host::set_header(Map::Response, name, value.as_bytes()));
        if written.all(|outcome| outcome.is_ok()) {
            self.replacement = Some(json);
        }
    }

    /// Handles a piece of the body; while pieces are held back, all of them together.
    pub fn body(
        &mut self,
        runtime: &Rc<PoolRuntime>,
        stream: &Rc<Stream>,
        size: usize,
        end: bool,
    ) -> Action {
        if self.replacement.is_some() {
            return self.replace(end);
        }
        match stream.stage.get() {
            Stage::Forwarded => {}
            Stage::Recovering => return Action::Pause,
            _ => return Action::Continue,
        }
        self.has_ended |= end;
        if self.reader.is_none() {
            stream.clock.mark_activity();
            return Action::Continue;
        }
        if passes_unread(runtime, stream) {
            stream.clock.mark_activity();
            // Any piece renews a booking, whatever it contains.
            stream
                .assignment
                .borrow_mut()
                .generated(stream.tokens.get());
            return Action::Continue;
        }
        let bytes = match size {
            0 => Vec::new(),
            _ => host::buffer(Buffer::Response).unwrap_or_default(),
        };
        self.read(runtime, stream, &bytes, end);
        match stream.response.get() {
            Response::Awaited | Response::Held => self.held(runtime, stream, bytes, end),
            Response::Flowing => self.flowing(runtime, stream, bytes, end),
            Response::Complete | Response::EndHeld => Action::Pause,
        }
    }

    fn replace(&mut self, end: bool) -> Action {
        if !end {
            return Action::Pause;
        }
        let json = self.replacement.take().unwrap_or_default();
        // The length has been set already; if the body cannot be set the proxy breaks the response off.
        if let Err(error) = host::set_buffer(Buffer::Response, json.as_bytes()) {
            log::error!("an error's body could not be written: {error}");
        }
        Action::Continue
    }

    /// Reads the new bytes: the first token ends the prefill charge, further tokens let the decode charge grow.
    fn read(&mut self, runtime: &Rc<PoolRuntime>, stream: &Rc<Stream>, bytes: &[u8], end: bool) {
        let Some(reader) = &mut self.reader else {
            return;
        };
        let new = bytes.get(self.read..).unwrap_or_default();
        self.read = bytes.len();
        if !new.is_empty() {
            stream.clock.mark_activity();
        }
        let had_begun = reader.has_begun();
        reader.read(new);
        if end {
            reader.finish();
        }
        let has_begun_now = reader.has_begun() && !had_begun;
        let mut assignment = stream.assignment.borrow_mut();
        stream.tokens.set(reader.tokens());
        assignment.generated(reader.tokens());
        if has_begun_now {
            let now = runtime.vm.now();
            assignment.first_token(now);
            drop(assignment);
            stream.first_token.set(now);
            runtime
                .metrics
                .first_token(now.saturating_sub(stream.came.get()));
            planning::call_waiting(runtime);
            stream.enter();
        }
    }

    /// Handles a piece while nothing of the answer has reached the client.
    fn held(
        &mut self,
        runtime: &Rc<PoolRuntime>,
        stream: &Rc<Stream>,
        bytes: Vec<u8>,
        end: bool,
    ) -> Action {
        match self.verdict() {
            Verdict::Empty if stream.assignment.borrow().expects_tokens() => {
                return self.empty(runtime, stream);
            }
            Verdict::Nothing if !end && bytes.len() < MOST_HELD => return Action::Pause,
            // The worker reports a failure in its answer in place of a status.
            Verdict::Failed(_) if stream.may_recover() => {
                let end = ended(runtime, stream, Came::FailedInside);
                // The outcome is recorded above: `settle` must not judge the worker again.
                self.reader = None;
                recovery::begin(runtime, stream, Failure::Status, end);
                return Action::Pause;
            }
            _ => {}
        }
        let is_concurrent = stream.concurrent_prefill.get() == ConcurrentPrefill::Running;
        if is_concurrent && (end || self.is_over()) {
            stream.response.set(Response::Complete);
            return Action::Pause;
        }
        let is_whole = stream.form.get() == Form::Whole;
        let waits_for_prefill = is_concurrent && (is_whole || stream.wants_logprobs.get());
        let waits_for_end = is_whole && stream.change.borrow().is_some();
        if !end && (waits_for_prefill || waits_for_end || self.must_wait(stream)) {
            return Action::Pause;
        }
        stream.answer_begins(runtime);
        stream.response.set(Response::Flowing);
        self.pass(stream, &bytes, end)
    }

    fn flowing(
        &mut self,
        runtime: &PoolRuntime,
        stream: &Rc<Stream>,
        bytes: Vec<u8>,
        end: bool,
    ) -> Action {
        if stream.pending_reset.borrow().is_some() {
            return self.reset_pending(runtime, stream, end);
        }
        if stream.concurrent_prefill.get() == ConcurrentPrefill::Running && (end || self.is_over())
        {
            stream.response.set(Response::EndHeld);
            return Action::Pause;
        }
        if !end && self.must_wait(stream) {
            return Action::Pause;
        }
        self.pass(stream, &bytes, end)
    }

    /// Passes the received bytes on.
    fn pass(&mut self, stream: &Stream, bytes: &[u8], end: bool) -> Action {
        self.read = 0;
        stream.rewrite(bytes, end);
        Action::Continue
    }

    /// Carries out a pending reset: an error event replaces one that would pass; the connection breaks with the next, or in a
    /// later round. An event that is written together with the break would be lost.
    fn reset_pending(&mut self, runtime: &PoolRuntime, stream: &Stream, end: bool) -> Action {
        let pending_reset = stream.pending_reset.borrow();
        let Some(refusal) = pending_reset
            .as_ref()
            .map(|pending_reset| &pending_reset.refusal)
        else {
            return Action::Pause;
        };
        let may_tell = stream.form.get() == Form::Events && !self.has_told_reset && !end;
        // The piece passed last may have ended in the middle of a line.
        let event = format!("\n\ndata: {}\n\n", refusal.to_json());
        if may_tell && host::set_buffer(Buffer::Response, event.as_bytes()).is_ok() {
            self.has_told_reset = true;
            return Action::Continue;
        }
        let reason = refusal.code();
        drop(pending_reset);
        stream.break_off(runtime, reason);
        Action::Pause
    }

    /// Handles trailers, which end the answer in place of a last piece of its body.
    pub fn trailers(&mut self, runtime: &Rc<PoolRuntime>, stream: &Rc<Stream>) -> Action {
        // The held part of the body is still in the proxy's buffer.
        self.body(runtime, stream, self.read, true)
    }

    fn verdict(&self) -> Verdict {
        self.reader
            .as_ref()
            .map_or(Verdict::Content, Reader::verdict)
    }

    /// Whether the answer's final event has come.
    fn is_over(&self) -> bool {
        self.reader.as_ref().is_some_and(Reader::is_over)
    }

    /// Whether the bytes received wait for the next ones: they may look like a good end while the concurrent prefill is not known
    /// to be good, or they are to be edited and end amid a line.
    fn must_wait(&self, stream: &Stream) -> bool {
        let is_concurrent = stream.concurrent_prefill.get() == ConcurrentPrefill::Running;
        let is_changed = stream.change.borrow().is_some();
        self.reader.as_ref().is_some_and(|reader| {
            is_concurrent && reader.may_have_ended() || is_changed && reader.is_amid_line()
        })
    }

    /// Judges the worker by the ended answer. Not earlier: a worker that breaks every answer off begins all of them well.
    pub fn settle(&self, runtime: &PoolRuntime, stream: &Stream) {
        let has_begun = self.reader.as_ref().map(Reader::has_begun);
        match (stream.stage.get(), has_begun) {
            (Stage::Forwarded, Some(_)) if matches!(self.verdict(), Verdict::Failed(_)) => {
                ended(runtime, stream, Came::FailedInside);
            }
            (Stage::Forwarded, Some(_)) if self.has_ended => {
                ended(runtime, stream, Came::Good);
            }
            (Stage::Forwarded, Some(_)) if is_broken_off(runtime, stream) => {
                ended(runtime, stream, Came::Cut);
            }
            (Stage::Forwarded, Some(true)) => {
                ended(runtime, stream, Came::Good);
            }
            // The worker at fault is known already.
            (Stage::Recovering, _) => {
                is_broken_off(runtime, stream);
            }
            _ => {}
        }
    }
}

/// Whether the rest of an answer can pass unread: the client reads already, nothing is edited, nothing else is under way for the
/// request, and its tokens are not counted.
fn passes_unread(runtime: &PoolRuntime, stream: &Stream) -> bool {
    !runtime.pool.output.accounting
        && stream.response.get() == Response::Flowing
        && stream.concurrent_prefill.get() == ConcurrentPrefill::Nothing
        && stream.pending_reset.borrow().is_none()
        && stream.change.borrow().is_none()
        && !stream.wants_logprobs.get()
}

/// Whether the stream has ended because its worker broke the answer off; counted if so.
fn is_broken_off(runtime: &PoolRuntime, stream: &Stream) -> bool {
    let details = host::property(&["response", "code_details"]).unwrap_or_default();
    let is_so = details.starts_with(b"upstream_reset_after_response_started");
    if is_so {
        log::warn!("[{}] its worker broke the answer off", stream.ids());
        runtime.telemetry.reset("broken_off");
    }
    is_so
}

/// Records how the leg that the client waits for has ended, and what that means.
pub fn ended(runtime: &PoolRuntime, stream: &Stream, came: Came) -> LegEnd {
    let mut router = runtime.router.borrow_mut();
    let mut assignment = stream.assignment.borrow_mut();
    let leg = assignment.leg(router.pool().rules());
    let meaning = router.leg_ended(&mut assignment, came);
    LegEnd { leg, came, meaning }
}

/// Holds an unstreamed answer that generates nothing, such as embeddings, until it can be edited; an answer that may be too long
/// to be held passes unedited.
fn hold_to_change(runtime: &PoolRuntime, stream: &Stream, received: &Headers) -> Action {
    let length = received.first("content-length");
    let length = length.and_then(|length| std::str::from_utf8(length).ok()?.parse::<usize>().ok());
    if length.is_some_and(|length| length <= MOST_CHANGED) {
        return Action::Pause;
    }
    stream.change.replace(None);
    stream.answer_begins(runtime);
    Action::Continue
}

fn first_digit(status: &[u8]) -> usize {
    let digit = status.first().map_or(0, |digit| digit.wrapping_sub(b'0'));
    usize::from(digit)
}

/// A status as a number; 0 if it is not one.
fn code(status: &[u8]) -> u16 {
    let text = std::str::from_utf8(status);
    text.ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_default()
}

/// Adds headers for people to a worker's answer, and notes which worker gave it.
fn mark(runtime: &PoolRuntime, stream: &Stream) {
    if let Some(explanation) = stream.explanation.take() {
        // For people only, as the names are: a response without the header is still a response.
        let _ = host::set_header(Map::Response, headers::EXPLAIN, explanation.as_bytes());
    }
    if stream.destinations.borrow().len() > 1 || runtime.config.response_headers {
        note_server(runtime, stream);
    }
    let mut extra = names(runtime, &stream.assignment.borrow());
    if runtime.config.response_headers
        && let Some(address) = last_tried()
    {
        extra.push(served(address));
    }
    for (name, value) in extra {
        let name = std::str::from_utf8(&name).unwrap_or_default();
        let _ = host::set_header(Map::Response, name, &value);
    }
}

/// The header that names the endpoint which answered.
pub fn served(address: SocketAddr) -> Header {
    (
        headers::SERVED.as_bytes().to_vec(),
        address.to_string().into_bytes(),
    )
}

/// The headers that name the workers, if configured.
pub fn names(runtime: &PoolRuntime, assignment: &Assignment) -> Vec<Header> {
    let pair = [
        (headers::PREFILL, &assignment.prefill),
        (headers::DECODE, &assignment.decode),
    ];
    let wanted = pair.iter().filter(|_| runtime.config.response_headers);
    let named = wanted.filter_map(|(name, worker)| {
        let worker = worker.as_ref()?;
        Some((name.as_bytes().to_vec(), worker.name.as_bytes().to_vec()))
    });
    named.collect()
}

/// The worker that the proxy tried last.
fn last_tried() -> Option<SocketAddr> {
    let address = host::property(&["upstream", "address"])?;
    std::str::from_utf8(&address).ok()?.parse().ok()
}

/// Notes which destinations have been tried so far. If the proxy does not say, only the first has: it took the connection.
pub fn note_asked(stream: &Stream) {
    match last_tried() {
        Some(last) => note_asked_until(stream, last),
        None => stream.destinations.borrow_mut().truncate(1),
    }
}

fn note_asked_until(stream: &Stream, last: SocketAddr) {
    let mut asked = stream.tried_before(last);
    asked.push(last);
    stream.destinations.replace(asked);
}

/// Notes the destination that answered. Those before it in the list took no connection.
fn note_server(runtime: &PoolRuntime, stream: &Stream) {
    let Some(address) = last_tried() else {
        return;
    };
    let refused = stream.tried_before(address);
    note_asked_until(stream, address);
    if refused.is_empty() {
        return;
    }
    let mut router = runtime.router.borrow_mut();
    router.took_no_connection(&refused);
    router.served_by(&mut stream.assignment.borrow_mut(), address);
    let id = stream.ids();
    log::warn!("[{id}] {refused:?} took no connection, {address} answers");
    runtime.telemetry.decode_retried();
}

/// Judges a request without an answer from a worker: destinations before the last tried took no connection; the proxy's details
/// say what became of the last.
fn blame(runtime: &PoolRuntime, stream: &Stream, details: &[u8]) -> (Failure, LegEnd) {
    let last = last_tried();
    if let Some(last) = last {
        let mut router = runtime.router.borrow_mut();
        if router.pool().rules().reaches_workers {
            router.took_no_connection(&stream.tried_before(last));
            router.served_by(&mut stream.assignment.borrow_mut(), last);
        }
    }
    // Destinations behind it in the list have not been tried.
    note_asked(stream);
    let unknown = match last {
        Some(_) => Came::Cut,
        None => Came::NotSent,
    };
    let came = of_words(details).unwrap_or(unknown);
    let failure = match came {
        Came::NotSent | Came::Refused => Failure::Unreached,
        Came::TimedOut => Failure::Silent,
        _ => Failure::Broken,
    };
    (failure, ended(runtime, stream, came))
}
