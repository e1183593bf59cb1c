//! Owns the changes that an answer undergoes on its way: the tokens that prefill had cached, the logprobs of the prompt that
//! only prefill knows, the name that the client used for the model.

use std::rc::Rc;

use routing::answer::{EventEdit, Form, Rewriter};
use routing::handoff::sglang::PromptLogprobs;
use routing::route::PrefillAnswer;

use crate::gateway::PoolRuntime;
use crate::host::{self, Buffer, HostError, Map};
use crate::stream::Stream;

/// What is to be changed in an answer.
#[derive(Default)]
pub struct Change {
    events: Rewriter,
}

impl Change {
    /// The whole answer, changed; none where there is nothing to change.
    fn of_document(&self, document: &[u8]) -> Option<Vec<u8>> {
        let text = std::str::from_utf8(document).ok()?;
        self.events.of_document(text).map(String::into_bytes)
    }

    /// What may be handed on of a stream of events once these bytes of it have come.
    fn of_events(&mut self, bytes: &[u8], is_end: bool) -> Vec<u8> {
        let mut changed = self.events.read(bytes);
        if is_end {
            changed.extend(self.events.finish());
        }
        changed
    }
}

/// Notes how many tokens the prefill worker had cached, where the client is to be told.
pub fn report_cached(gateway: &PoolRuntime, client: &Rc<Stream>, cached: u64) {
    if gateway.router.borrow().pool().report_cached_tokens {
        client.change_by(EventEdit::CachedTokens(cached));
    }
}

/// Notes the prompt's logprobs, where decode's answer lacks them.
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
    /// From now on the answer is changed by this too.
    pub fn change_by(&self, edit: EventEdit) {
        let mut change = self.change.borrow_mut();
        change.get_or_insert_default().events.add(edit);
    }

    /// Changes what is there of the answer, where it must be changed: events as they come, an answer in one piece when its end is
    /// there. The stream's context must be the effective one.
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
            // Trailers come with no body in hand.
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

    /// An answer that a call has brought, changed as it would have been on its way.
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
