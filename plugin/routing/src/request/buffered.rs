//! Owns a request that has been read, together with its body: what is kept of one that waits, so that nothing is read twice.

use std::rc::Rc;

use super::{Fault, Generation, Request, Sequences};
use crate::json::ObjectSpans;

/// A request with its body.
#[derive(Debug)]
pub struct BufferedRequest {
    body: String,
    parsed: ParsedRequest,
}

/// What was read of a request, apart from its body.
#[derive(Debug, Clone)]
pub struct ParsedRequest {
    generation: Generation,
    model: Rc<str>,
    prompt_tokens: u64,
    spans: ObjectSpans,
    sequences: Sequences,
    max_tokens: Option<u64>,
    known_tokens: Option<u64>,
    hands_off_itself: bool,
    fault: Fault,
}

impl Request<'_> {
    /// What was read of it.
    pub fn parsed(&self) -> ParsedRequest {
        ParsedRequest {
            generation: self.generation,
            model: Rc::clone(&self.model),
            prompt_tokens: self.prompt_tokens,
            spans: self.body.spans(),
            sequences: self.sequences,
            max_tokens: self.max_tokens,
            known_tokens: self.known_tokens,
            hands_off_itself: self.hands_off_itself,
            fault: self.fault.clone(),
        }
    }
}

impl ParsedRequest {
    /// Together with the body that it was read from; none where that is another one, which is no text.
    pub fn with(self, body: Vec<u8>) -> Option<BufferedRequest> {
        let body = String::from_utf8(body).ok()?;
        Some(BufferedRequest { body, parsed: self })
    }
}

impl BufferedRequest {
    /// The request as it was read. The work does not grow with the body.
    pub fn request(&self) -> Request<'_> {
        let parsed = &self.parsed;
        Request {
            generation: parsed.generation,
            model: Rc::clone(&parsed.model),
            prompt_tokens: parsed.prompt_tokens,
            body: parsed.spans.over(&self.body),
            sequences: parsed.sequences,
            max_tokens: parsed.max_tokens,
            known_tokens: parsed.known_tokens,
            hands_off_itself: parsed.hands_off_itself,
            fault: parsed.fault.clone(),
        }
    }

    /// Its body, which is kept no longer.
    pub fn into_body(self) -> Vec<u8> {
        self.body.into_bytes()
    }
}
