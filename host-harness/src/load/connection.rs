//! Owns one connection: a request over it, and the times of its answer's start and end.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use memchr::memmem;
use tokio::net::TcpStream;
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

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum LoadConnectionError {
    /// The connection was refused.
    #[error(transparent)]
    Connect(#[from] std::io::Error),
    /// The connection broke.
    #[error(transparent)]
    Http(#[from] hyper::Error),
    /// The address is no valid header value.
    #[error(transparent)]
    Request(#[from] hyper::http::Error),
}

/// A connection, made when first needed and kept for many requests.
pub struct LoadConnection {
    to: SocketAddr,
    host: HeaderValue,
    sender: Option<SendRequest<Full<Bytes>>>,
}

/// The end of a complete stream.
const DONE: &[u8] = b"[DONE]";

impl LoadConnection {
    /// A connection not yet made.
    pub fn new(to: SocketAddr) -> Self {
        let host = HeaderValue::from_str(&to.to_string());
        Self {
            to,
            // An address is always a valid header value.
            host: host.unwrap_or(HeaderValue::from_static("localhost")),
            sender: None,
        }
    }

    /// Sends a chat completion and reads its answer; `expected` defines a complete one.
    ///
    /// # Errors
    /// When there is no complete answer. The next request uses a new connection.
    pub async fn send(
        &mut self,
        body: Bytes,
        expected: AnswerForm,
    ) -> Result<Reply, LoadConnectionError> {
        let mut sender = match self.sender.take() {
            Some(sender) if !sender.is_closed() => sender,
            _ => self.connect().await?,
        };
        sender.ready().await?;
        let request = Request::builder()
            .method(Method::POST)
            .uri("/v1/chat/completions")
            .header(HOST, &self.host)
            .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .body(Full::new(body))?;
        let response = sender.send_request(request).await?;
        let is_ok = response.status() == StatusCode::OK;
        let mut body = response.into_body();
        let mut begun = None;
        let mut last = Bytes::new();
        while let Some(frame) = body.frame().await {
            begun.get_or_insert_with(Instant::now);
            if let Ok(data) = frame?.into_data() {
                last = data;
            }
        }
        self.sender = Some(sender);
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

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, LoadConnectionError> {
        let stream = TcpStream::connect(self.to).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::task::spawn_local(connection);
        Ok(sender)
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
