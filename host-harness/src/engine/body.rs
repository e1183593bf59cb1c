//! Owns response bodies: fixed ones, and ones that a generating task feeds while the client reads.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Frame;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::instant::Stream;

const JSON: &str = "application/json";
const EVENT_STREAM: &str = "text/event-stream; charset=utf-8";

/// Any body an engine answers with.
pub type Body = Either<Full<Bytes>, Either<FedBody, Stream>>;

/// A JSON answer.
pub fn json(status: StatusCode, content: Bytes) -> Response<Body> {
    whole(status, JSON, content)
}

/// An answer of JSON made from a value whose serialisation cannot fail.
pub fn serialized(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    json(status, serde_json::to_vec(value).unwrap_or_default().into())
}

/// An answer with an empty body, and so without a content type.
pub fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::new(Bytes::new())));
    *response.status_mut() = status;
    response
}

/// An answer with a fixed body.
pub fn whole(status: StatusCode, content_type: &'static str, content: Bytes) -> Response<Body> {
    let mut response = typed(content_type, Either::Left(Full::new(content)));
    *response.status_mut() = status;
    response
}

/// An answer with fixed events.
pub fn whole_stream(pieces: Vec<Bytes>) -> Response<Body> {
    let content = Bytes::from(pieces.concat());
    whole(StatusCode::OK, EVENT_STREAM, content)
}

/// An answer whose events a task sends as they occur.
pub fn events(feed: FedBody) -> Response<Body> {
    typed(EVENT_STREAM, Either::Right(Either::Left(feed)))
}

/// An answer with prepared events.
pub fn ready(stream: Stream) -> Response<Body> {
    typed(EVENT_STREAM, Either::Right(Either::Right(stream)))
}

/// An unstreamed answer whose task may fail before sending it.
pub fn unfinished(feed: FedBody) -> Response<Body> {
    typed(JSON, Either::Right(Either::Left(feed)))
}

fn typed(content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// The error that ends an incomplete answer: its connection breaks.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the answer is broken off")]
pub struct BrokenOff;

/// The sender of a stream's events.
#[derive(Clone)]
pub struct Events(mpsc::UnboundedSender<Result<Bytes, BrokenOff>>);

impl Events {
    /// Sends some events. The receiver is gone only if the sending task is about to be ended.
    pub fn send(&self, pieces: Vec<Bytes>) {
        for piece in pieces {
            let _ = self.0.send(Ok(piece));
        }
    }

    /// Breaks the connection after what was sent.
    pub fn break_off(&self) {
        let _ = self.0.send(Err(BrokenOff));
    }
}

/// A body fed by a task; dropping it, as when the client leaves, ends the task.
pub struct FedBody {
    pieces: mpsc::UnboundedReceiver<Result<Bytes, BrokenOff>>,
    feeder: AbortHandle,
    broken: bool,
}

impl FedBody {
    /// A body of the events that `feed` sends, unbounded: a slow client does not delay the feed.
    pub fn by(feed: impl AsyncFnOnce(Events) + 'static) -> Self {
        let (events, pieces) = mpsc::unbounded_channel();
        let feeder = tokio::task::spawn_local(async move { feed(Events(events)).await });
        Self {
            pieces,
            feeder: feeder.abort_handle(),
            broken: false,
        }
    }
}

impl hyper::body::Body for FedBody {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        if self.broken {
            return Poll::Ready(Some(Err(BrokenOff)));
        }
        match ready!(self.pieces.poll_recv(context)) {
            Some(Err(BrokenOff)) => {
                // The server flushes when it has to wait: one wait makes the earlier events arrive.
                self.broken = true;
                context.waker().wake_by_ref();
                Poll::Pending
            }
            piece => Poll::Ready(piece.map(|piece| piece.map(Frame::data))),
        }
    }
}

impl Drop for FedBody {
    fn drop(&mut self) {
        self.feeder.abort();
    }
}
