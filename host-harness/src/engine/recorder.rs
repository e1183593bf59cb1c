//! Owns the record of the last requests as they arrived, for tests (`GET /__requests`).

use std::cell::RefCell;
use std::collections::VecDeque;

use bytes::Bytes;
use hyper::http::request::Parts;
use serde::Serialize;

/// Number of requests kept.
const KEPT: usize = 64;
/// Maximum bytes of a kept body.
const LONGEST_BODY: usize = 1024 * 1024;

#[derive(Clone, Serialize)]
struct Recorded {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Option<String>,
    body_bytes: usize,
}

/// The last requests to generation paths.
#[derive(Default)]
pub struct Recorder(RefCell<VecDeque<Recorded>>);

impl Recorder {
    /// Records one request.
    pub fn record(&self, head: &Parts, body: &Bytes) {
        let mut kept = self.0.borrow_mut();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(Recorded {
            method: head.method.to_string(),
            path: head
                .uri
                .path_and_query()
                .map_or_else(String::new, ToString::to_string),
            headers: head
                .headers
                .iter()
                .map(|(name, value)| (name.to_string(), lossy(value.as_bytes())))
                .collect(),
            body: text(body),
            body_bytes: body.len(),
        });
    }

    /// The requests kept, oldest first, as JSON.
    pub fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(&*self.0.borrow())
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn text(body: &Bytes) -> Option<String> {
    if body.len() > LONGEST_BODY {
        return None;
    }
    std::str::from_utf8(body).ok().map(str::to_owned)
}
