//! Owns one response's callbacks: what of the answer is held back, read and edited.
//!
//! Headers are held back until the answer has content: as long as the client has read nothing, another worker can take the place
//! of one that fails.

use std::rc::Rc;

use proxy_wasm::types::Action;
use routing::outcome::Came;
use routing::route::Refusal;
use routing::session::{
    AfterError, AnswerStep, ContentLength, ErrorOrigin, Passed, Piece, Stage, SuccessHead,
};

use crate::host::{self, Buffer, Headers, Map};
use crate::legs::{cleanup, effects, marks, recovery};
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
            _ => self.error(runtime, stream, status),
        }
    }

    fn error(&mut self, runtime: &PoolRuntime, stream: &InStream, status: &[u8]) -> Action {
        let details = host::property(&["response", "code_details"]).unwrap_or_default();
        let origin = match details.as_slice() {
            b"via_upstream" => {
                marks::mark(runtime, stream);
                ErrorOrigin::Worker
            }
            details => ErrorOrigin::Proxy {
                details,
                last: marks::last_tried(),
            },
        };
        let after = effects::lent(runtime, stream, |session, with| {
            session.error_came(with, code(status), origin)
        });
        match after {
            AfterError::Recover(failure, end) => {
                recovery::begin(runtime, stream, failure, end);
                return Action::Pause;
            }
            AfterError::Pass(effects) => cleanup::submit(runtime, stream, effects),
            AfterError::Rewrite(refusal) => self.rewrite(runtime, stream, &refusal),
        }
        stream.free_answered();
        Action::Continue
    }

    /// The proxy reached no worker: the error gets the shape of the filter's other errors.
    fn rewrite(&mut self, runtime: &PoolRuntime, stream: &InStream, refusal: &Refusal) {
        runtime.note_refusal(stream.ids(), refusal);
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

/// Reads the new bytes. The first token ends the prefill charge, which may make room for a request that waits.
fn read(runtime: &Rc<PoolRuntime>, stream: &InStream, piece: Piece<'_>) {
    if !stream.session().read(piece) {
        return;
    }
    let now = runtime.vm.now();
    stream.session().first_token(now);
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
            let (failure, end) = effects::lent(runtime, stream, |session, with| {
                session.success_failed(with, came)
            });
            recovery::begin(runtime, stream, failure, end);
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
