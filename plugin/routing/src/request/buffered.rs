//! Owns a parsed request together with its body: kept while a request waits, so that nothing is read twice.

use std::sync::Arc;

use super::{Fault, Generation, Request, Sequences};
use crate::json::ObjectSpans;

/// A request with its body.
#[derive(Debug)]
pub struct BufferedRequest {
    body: String,
    parsed: ParsedRequest,
}

/// The parsed parts of a request, without its body.
#[derive(Debug, Clone)]
pub struct ParsedRequest {
    generation: Generation,
    model: Arc<str>,
    prompt_tokens: u64,
    spans: ObjectSpans,
    sequences: Sequences,
    max_tokens: Option<u64>,
    known_tokens: Option<u64>,
    hands_off_itself: bool,
    fault: Fault,
}

impl Request<'_> {
    /// The parsed parts.
    pub fn parsed(&self) -> ParsedRequest {
        ParsedRequest {
            generation: self.generation,
            model: Arc::clone(&self.model),
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
    /// Joins the parts with the body that they were read from; none where `body` is no text, and therefore another body.
    pub fn with(self, body: Vec<u8>) -> Option<BufferedRequest> {
        let body = String::from_utf8(body).ok()?;
        Some(BufferedRequest { body, parsed: self })
    }
}

impl BufferedRequest {
    /// The parsed request. Cost does not grow with the body.
    pub fn request(&self) -> Request<'_> {
        let parsed = &self.parsed;
        Request {
            generation: parsed.generation,
            model: Arc::clone(&parsed.model),
            prompt_tokens: parsed.prompt_tokens,
            body: parsed.spans.over(&self.body),
            sequences: parsed.sequences,
            max_tokens: parsed.max_tokens,
            known_tokens: parsed.known_tokens,
            hands_off_itself: parsed.hands_off_itself,
            fault: parsed.fault.clone(),
        }
    }

    /// The body alone.
    pub fn into_body(self) -> Vec<u8> {
        self.body.into_bytes()
    }
}
