//! Owns the edits of an answer on its way to the client: the tokens that prefill had cached, the logprobs of the prompt that only
//! prefill knows, the client's name for the model.

use std::rc::Rc;

use routing::answer::PromptLogprobs;
use routing::answer::{EventEdit, Form, Rewriter};
use routing::route::PrefillAnswer;

use crate::host::{self, Buffer, HostError, Map};
use crate::pool_runtime::PoolRuntime;
use crate::stream::Stream;

/// The edits that an answer needs.
#[derive(Default)]
pub struct AnswerChange {
    events: Rewriter,
}

impl AnswerChange {
    /// An unstreamed answer, edited; `None` if there is nothing to edit.
    fn of_document(&self, document: &[u8]) -> Option<Vec<u8>> {
        let text = std::str::from_utf8(document).ok()?;
        self.events.of_document(text).map(String::into_bytes)
    }

    /// Reads a piece of an event stream; returns the edited events that may be passed on.
    fn of_events(&mut self, bytes: &[u8], is_end: bool) -> Vec<u8> {
        let mut changed = self.events.read(bytes);
        if is_end {
            changed.extend(self.events.finish());
        }
        changed
    }
}

/// Adds the number of tokens that the prefill worker had cached to the answer's edits, if clients get it.
pub fn report_cached(runtime: &PoolRuntime, client: &Rc<Stream>, cached: u64) {
    if runtime.router.borrow().pool().report_cached_tokens {
        client.change_by(EventEdit::CachedTokens(cached));
    }
}

/// Adds the prompt's logprobs to the answer's edits, if decode's answer lacks them.
pub fn add_logprobs(client: &Rc<Stream>, answer: PrefillAnswer<'_>) {
    let PrefillAnswer::Whole { body, .. } = answer else {
        return;
    };
    if client.wants_logprobs.replace(false)
        && let Some(logprobs) = PromptLogprobs::read(body)
    {
        client.change_by(EventEdit::PromptLogprobs(logprobs));
    }
}

impl Stream {
    /// Adds an edit for the rest of the answer.
    pub fn change_by(&self, edit: EventEdit) {
        let mut change = self.change.borrow_mut();
        change.get_or_insert_default().events.add(edit);
    }

    /// Edits the received part of the answer, if there are edits: events as they come, an unstreamed answer when it is complete.
    /// The stream's context must be the effective one.
    pub fn rewrite(&self, bytes: &[u8], is_end: bool) {
        let rewritten = match self.form.get() {
            Form::Events => self.rewrite_events(bytes, is_end),
            Form::Whole if is_end => self.rewrite_document(bytes),
            Form::Whole => Ok(()),
        };
        if let Err(error) = rewritten {
            log::error!("[{}] the answer could not be changed: {error}", self.ids());
        }
    }

    fn rewrite_events(&self, bytes: &[u8], is_end: bool) -> Result<(), HostError> {
        let mut change = self.change.borrow_mut();
        let Some(change) = change.as_mut() else {
            return Ok(());
        };
        let changed = change.of_events(bytes, is_end);
        match (bytes, changed.as_slice()) {
            // Trailers come without a body.
            ([], []) => Ok(()),
            _ => host::set_buffer(Buffer::Response, &changed),
        }
    }

    fn rewrite_document(&self, bytes: &[u8]) -> Result<(), HostError> {
        let change = self.change.borrow();
        let Some(changed) = change.as_ref().and_then(|change| change.of_document(bytes)) else {
            return Ok(());
        };
        host::set_buffer(Buffer::Response, &changed)?;
        let length = changed.len().to_string();
        host::set_header(Map::Response, "content-length", length.as_bytes())
    }

    /// The answer to a call, edited as a forwarded answer would have been.
    pub fn rewritten(&self, answer: &[u8], form: Form) -> Vec<u8> {
        let mut change = self.change.borrow_mut();
        let Some(change) = change.as_mut() else {
            return answer.to_vec();
        };
        match form {
            Form::Events => change.of_events(answer, true),
            Form::Whole => change
                .of_document(answer)
                .unwrap_or_else(|| answer.to_vec()),
        }
    }
}
