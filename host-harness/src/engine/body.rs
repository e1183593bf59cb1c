//! Response bodies: whole ones, and ones that a generating task feeds while the client listens.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Frame;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

/// Any body an engine answers with.
pub type Body = Either<Full<Bytes>, Fed>;

/// A JSON answer.
pub fn json(status: StatusCode, content: Bytes) -> Response<Body> {
    whole(status, "application/json", content)
}

/// An answer that is known in full.
pub fn whole(status: StatusCode, content_type: &'static str, content: Bytes) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::new(content)));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// An answer whose events a task sends as they happen.
pub fn events(feed: Fed) -> Response<Body> {
    let mut response = Response::new(Either::Right(feed));
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    response
}

/// A body fed by a task; dropped, as when the client leaves, it ends the task.
pub struct Fed {
    pieces: mpsc::UnboundedReceiver<Bytes>,
    feeder: AbortHandle,
}

impl Fed {
    /// A body of the pieces that `feeder` sends.
    pub fn new(pieces: mpsc::UnboundedReceiver<Bytes>, feeder: AbortHandle) -> Self {
        Self { pieces, feeder }
    }
}

impl hyper::body::Body for Fed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = ready!(self.pieces.poll_recv(context));
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }
}

impl Drop for Fed {
    fn drop(&mut self) {
        self.feeder.abort();
    }
}
