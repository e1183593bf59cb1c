//! Owns one connection: a request over it, and the times of its answer's start and end.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::StatusCode;
use memchr::memmem;
use pd_harness_common::connection::{self, Connection, Failure};
use tokio::time::Instant;

/// Outcome of a request.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    /// Arrival of the first piece of the answer's body.
    pub begun: Instant,
    /// Arrival of the last piece.
    pub ended: Instant,
    /// Whether the answer is 200 and complete.
    pub is_good: bool,
}

/// A connection, made when first needed and kept for many requests.
pub struct LoadConnection {
    to: SocketAddr,
    open: Option<Connection>,
}

/// The end of a complete stream.
const DONE: &[u8] = b"[DONE]";

impl LoadConnection {
    /// A connection not yet made.
    pub fn new(to: SocketAddr) -> Self {
        Self { to, open: None }
    }

    /// Sends a chat completion and reads its answer; `expected` defines a complete one.
    ///
    /// # Errors
    /// When there is no complete answer. The next request uses a new connection.
    pub async fn send(&mut self, body: Bytes, expected: AnswerForm) -> Result<Reply, Failure> {
        let mut open = match self.open.take() {
            Some(open) if !open.is_closed() => open,
            _ => Connection::open(self.to).await?,
        };
        let request = connection::post("/v1/chat/completions", self.to, body);
        let response = open.send(request).await?;
        let is_ok = response.status() == StatusCode::OK;
        let mut body = response.into_body();
        let mut begun = None;
        let mut last = Bytes::new();
        while let Some(frame) = body.frame().await {
            begun.get_or_insert_with(Instant::now);
            if let Ok(data) = frame.map_err(Failure::breaks_off)?.into_data() {
                last = data;
            }
        }
        self.open = Some(open);
        let ended = Instant::now();
        let is_whole = match expected {
            AnswerForm::Stream => memmem::find(&last, DONE).is_some(),
            AnswerForm::Unstreamed => !last.is_empty(),
        };
        Ok(Reply {
            begun: begun.unwrap_or(ended),
            ended,
            is_good: is_ok && is_whole,
        })
    }
}

/// Expected form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerForm {
    /// Events, with `[DONE]` last.
    Stream,
    /// Unstreamed.
    Unstreamed,
}
