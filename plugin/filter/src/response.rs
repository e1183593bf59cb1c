//! Owns one response's callbacks: what of the answer is held back, read and edited.
//!
//! Headers are held back until the answer has content: as long as the client has read nothing, another worker can take the place
//! of one that fails.

use std::rc::Rc;

use proxy_wasm::types::Action;
use routing::outcome::Came;
use routing::route::Refusal;
use routing::session::{
    AnswerStep, ContentLength, Failure, LegEnd, Passed, Piece, Stage, SuccessHead,
};

use crate::host::{self, Buffer, Headers, Map};
use crate::legs::{cleanup, marks, recovery};
use crate::planning::{self, EffectiveContext};
use crate::vm::{InStream, PoolRuntime};

/// State of one response's callbacks.
#[derive(Default)]
pub struct Reading {
    /// Body sent to the client in place of the proxy's own error text.
    replacement: Option<String>,
}

impl Reading {
    /// Handles the response's headers.
    pub fn headers(&mut self, runtime: &PoolRuntime, stream: &InStream, end: bool) -> Action {
        match stream.stage() {
            Stage::Forwarded => {}
            // A late answer of a worker that is being replaced.
            Stage::Recovering => return Action::Pause,
            _ => return Action::Continue,
        }
        let received = Headers::of(Map::Response).unwrap_or_default();
        let status = received.first(":status").unwrap_or_default();
        {
            let response = &mut stream.session().response;
            response.hold();
            response.set_status_class(first_digit(status));
            if end {
                response.end();
            }
        }
        match status.first() {
            Some(b'2') => success(runtime, stream, &received),
            _ => self.error(runtime, stream, status, end),
        }
    }

    fn error(
        &mut self,
        runtime: &PoolRuntime,
        stream: &InStream,
        status: &[u8],
        end: bool,
    ) -> Action {
        let details = host::property(&["response", "code_details"]).unwrap_or_default();
        let outcome = match status.first() {
            _ if details == b"via_upstream" => answered_with_error(runtime, stream, code(status)),
            Some(b'5') => unanswered(runtime, stream, &details),
            _ => None,
        };
        if let Some((failure, end)) = outcome {
            recovery::begin(runtime, stream, failure, end);
            return Action::Pause;
        }
        if status == b"503" && details != b"via_upstream" && !end {
            self.nobody_reached(runtime, stream);
        }
        // An error says nothing about the worker's speed.
        let session = &mut *stream.session();
        session.assignment.release();
        session.response.pass_held();
        Action::Continue
    }

    /// The proxy reached no worker: the error gets the shape of the filter's other errors.
    fn nobody_reached(&mut self, runtime: &PoolRuntime, stream: &InStream) {
        let what = match runtime.router().pool().rules().reaches_workers {
            false => "frontend",
            true => "decode worker",
        };
        let refusal = Refusal::Unreachable {
            what,
            tried: stream.tried(),
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
        stream: &InStream,
        size: usize,
        end: bool,
    ) -> Action {
        if self.replacement.is_some() {
            return self.replace(end);
        }
        match stream.stage() {
            Stage::Forwarded => {}
            Stage::Recovering => return Action::Pause,
            _ => return Action::Continue,
        }
        if end {
            stream.session().response.end();
        }
        if stream.session().passes_unread() {
            return Action::Continue;
        }
        let bytes = match size {
            0 => Vec::new(),
            _ => host::buffer(Buffer::Response).unwrap_or_default(),
        };
        let piece = match end {
            true => Piece::Last(&bytes),
            false => Piece::Part(&bytes),
        };
        read(runtime, stream, piece);
        let takeover = stream.takeover();
        let step = stream.session().response.step(piece, takeover);
        carry_out(runtime, stream, step)
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

    /// Handles trailers, which end the answer in place of a last piece of its body.
    pub fn trailers(&mut self, runtime: &Rc<PoolRuntime>, stream: &InStream) -> Action {
        // The held part of the body is still in the proxy's buffer.
        let held = stream.session().response.held_bytes();
        self.body(runtime, stream, held, true)
    }
}

fn success(runtime: &PoolRuntime, stream: &InStream, received: &Headers) -> Action {
    marks::mark(runtime, stream);
    let mut session = stream.session();
    let head = SuccessHead {
        content_type: received.first("content-type").unwrap_or_default(),
        encoding: received.first("content-encoding"),
        length: received.first("content-length").and_then(number),
        is_charged: session.assignment.decode.is_some(),
        is_counted: runtime.pool.output.accounting,
        expects_tokens: session.assignment.expects_tokens(),
    };
    let (step, length) = session.response.success(head);
    drop(session);
    if length == ContentLength::Removed {
        let _ = host::remove_header(Map::Response, b"content-length");
    }
    carry_out(runtime, stream, step)
}

/// Records a worker's error; the failure, if another worker is to be asked.
fn answered_with_error(
    runtime: &PoolRuntime,
    stream: &InStream,
    status: u16,
) -> Option<(Failure, LegEnd)> {
    marks::mark(runtime, stream);
    let takeover = stream.takeover();
    let failed = stream
        .session()
        .answered_with_error(&mut runtime.router_mut(), status, takeover);
    if failed.is_none() {
        cleanup::give_up(runtime, stream);
    }
    failed
}

/// Records that no worker answered; the failure, if another worker is to be asked.
fn unanswered(
    runtime: &PoolRuntime,
    stream: &InStream,
    details: &[u8],
) -> Option<(Failure, LegEnd)> {
    let last = marks::last_tried();
    let outcome = stream
        .session()
        .unanswered(&mut runtime.router_mut(), last, details);
    stream.may_recover().then_some(outcome)
}

/// Reads the new bytes: the first token ends the prefill charge, further tokens let the decode charge grow.
fn read(runtime: &Rc<PoolRuntime>, stream: &InStream, piece: Piece<'_>) {
    let mut session = stream.session();
    let is_first_token = session.response.read(piece);
    let tokens = session.response.tokens();
    session.assignment.generated(tokens);
    if !is_first_token {
        return;
    }
    let now = runtime.vm.now();
    session.assignment.first_token(now);
    session.response.first_token_at(now);
    drop(session);
    runtime.metrics.first_token(now.saturating_sub(stream.came));
    if planning::call_waiting(runtime) == EffectiveContext::Changed {
        InStream::enter(stream);
    }
}

/// Carries out what follows from a part of the answer.
fn carry_out(runtime: &PoolRuntime, stream: &InStream, step: AnswerStep) -> Action {
    match step {
        AnswerStep::Hold => Action::Pause,
        AnswerStep::Pass(Passed { is_first, body }) => {
            if is_first {
                stream.answer_begins(runtime);
            }
            stream.write(runtime, body)
        }
        AnswerStep::Fail(came) => {
            if came == Came::Empty {
                log::warn!("[{}] its worker answered nothing", stream.ids());
            }
            let end = stream.leg_ended(runtime, came);
            recovery::begin(runtime, stream, Failure::of_answer(came), end);
            Action::Pause
        }
        AnswerStep::BreakOff(reason) => {
            stream.break_off(runtime, reason);
            Action::Pause
        }
    }
}

fn first_digit(status: &[u8]) -> usize {
    let digit = status.first().map_or(0, |digit| digit.wrapping_sub(b'0'));
    usize::from(digit)
}

/// A status as a number; 0 if it is not one.
fn code(status: &[u8]) -> u16 {
    number(status).unwrap_or_default()
}

fn number<N: std::str::FromStr>(text: &[u8]) -> Option<N> {
    std::str::from_utf8(text).ok()?.parse().ok()
}
