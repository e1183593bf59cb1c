//! Owns the client's side of a stream: the response head, the pieces of its body, and whether the client is still connected.

use std::collections::VecDeque;

use bytes::Bytes;
use hyper::body::Frame;
use hyper::{HeaderMap, Response, StatusCode};
use tokio::sync::{mpsc, oneshot};

use crate::host::body::{BodyError, ChannelBody, Piece};
use crate::host::maps::Headers;
use crate::host::upstream::copy_headers;

/// Pieces queued for hyper before upstream has to wait.
const QUEUE: usize = 8;

/// A change at the client.
pub enum ClientChange {
    /// The client has left.
    Gone,
    /// The client has read: queued pieces can be sent.
    Room,
}

/// The client of one stream.
pub struct Client {
    head: Option<oneshot::Sender<Response<ChannelBody>>>,
    pieces: mpsc::Sender<Piece>,
    body: Option<ChannelBody>,
    waiting: VecDeque<Piece>,
    declared: Option<u64>,
    sent: u64,
    bodiless: bool,
}

impl Client {
    /// A client that sent `method` and waits for `head`.
    pub fn new(head: oneshot::Sender<Response<ChannelBody>>, method: &[u8]) -> Client {
        let (pieces, body) = mpsc::channel(QUEUE);
        Client {
            head: Some(head),
            pieces,
            body: Some(ChannelBody::new(body)),
            waiting: VecDeque::new(),
            declared: None,
            sent: 0,
            bodiless: method == b"HEAD",
        }
    }

    /// True once the response head was sent.
    pub fn has_head(&self) -> bool {
        self.head.is_none()
    }

    /// Sends the response head. `end`: no body follows.
    pub fn send_head(&mut self, headers: &Headers, end: bool) {
        let Some(head) = self.head.take() else {
            return;
        };
        let status = headers
            .get(b":status")
            .and_then(|status| StatusCode::from_bytes(status).ok())
            .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        self.bodiless |= matches!(status.as_u16(), 204 | 304);
        if !self.bodiless {
            self.declared = headers.content_length();
        }
        let body = self.body.take().filter(|_| !end && !self.bodiless);
        let mut response = Response::new(body.unwrap_or_else(ChannelBody::empty));
        *response.status_mut() = status;
        let mut map = HeaderMap::new();
        copy_headers(headers, &mut map, |_| false);
        *response.headers_mut() = map;
        // A client that has left is detected by `gone`.
        let _ = head.send(response);
    }

    /// Sends a piece of the body. An excess over the content-length is an error: only the client would notice it otherwise.
    pub fn send_data(&mut self, data: Bytes) -> Result<(), BodyError> {
        if data.is_empty() || self.bodiless {
            return Ok(());
        }
        self.sent += data.len() as u64;
        if self.declared.is_some_and(|length| self.sent > length) {
            return Err(BodyError::Length);
        }
        self.waiting.push_back(Piece::Frame(Frame::data(data)));
        self.pump();
        Ok(())
    }

    /// Ends the response cleanly, unless it is shorter than declared.
    pub fn send_end(&mut self, trailers: Option<&Headers>) -> Result<(), BodyError> {
        if self.declared.is_some_and(|length| self.sent < length) {
            return Err(BodyError::Length);
        }
        if self.bodiless {
            return Ok(());
        }
        if let Some(trailers) = trailers {
            let mut map = HeaderMap::new();
            copy_headers(trailers, &mut map, |_| false);
            self.waiting.push_back(Piece::Frame(Frame::trailers(map)));
        }
        self.waiting.push_back(Piece::End);
        self.pump();
        Ok(())
    }

    /// Sends queued pieces as far as there is room.
    pub fn pump(&mut self) {
        while let Some(piece) = self.waiting.pop_front() {
            match self.pieces.try_send(piece) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Full(piece)) => {
                    self.waiting.push_front(piece);
                    return;
                }
                Err(mpsc::error::TrySendError::Closed(_)) => self.waiting.clear(),
            }
        }
    }

    /// True while pieces wait for the client to read.
    pub fn is_behind(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Waits until the client has left, or has room for queued pieces.
    pub async fn next_change(&mut self) -> ClientChange {
        if let Some(head) = &mut self.head {
            head.closed().await;
            return ClientChange::Gone;
        }
        if self.is_behind() {
            return match self.pieces.reserve().await {
                Ok(_) => ClientChange::Room,
                Err(_) => ClientChange::Gone,
            };
        }
        // hyper also drops a body after its last declared byte, and one that HTTP does not allow; neither means that the client
        // has left.
        if self.bodiless || self.declared.is_some_and(|length| self.sent >= length) {
            return std::future::pending().await;
        }
        self.pieces.closed().await;
        ClientChange::Gone
    }

    /// Breaks the connection, so that a truncated answer does not look complete.
    pub fn abort(&mut self) {
        self.head = None;
        self.waiting.clear();
    }

    /// Sends the rest to a slow client, after the stream has ended.
    pub fn finish(self) {
        if self.waiting.is_empty() {
            return;
        }
        tokio::task::spawn_local(async move {
            for piece in self.waiting {
                if self.pieces.send(piece).await.is_err() {
                    return;
                }
            }
        });
    }
}
