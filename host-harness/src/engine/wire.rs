//! Owns what a connection remembers: whether a request came on it before, and since when it has had none.

use std::cell::Cell;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::fault::Faults;

/// What a request came on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    /// One that was made for it.
    Fresh,
    /// One that had served another request.
    Kept,
}

/// Whence a request came.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The address under which it reached the engine.
    pub local: SocketAddr,
    /// On what it came.
    pub connection: Connection,
}

/// One connection.
#[derive(Default)]
pub struct Wire {
    requests: Cell<u64>,
    /// Requests whose answers are not sent to their end.
    open: Cell<u64>,
    idle_since: Cell<Option<Instant>>,
    freed: Notify,
}

impl Wire {
    /// Notes that a request has come.
    pub fn begin(self: &Rc<Self>) -> Use {
        let connection = match self.requests.get() {
            0 => Connection::Fresh,
            _ => Connection::Kept,
        };
        self.requests.set(self.requests.get() + 1);
        self.open.set(self.open.get() + 1);
        Use {
            connection,
            wire: Rc::clone(self),
        }
    }

    /// Resolves when it has been idle for longer than is allowed, if that is ordered.
    pub async fn idle_too_long(&self, faults: &Faults) {
        loop {
            self.freed.notified().await;
            let Some(limit) = faults.idle_limit() else {
                continue;
            };
            sleep(limit).await;
            let since = self.idle_since.get();
            if self.open.get() == 0 && since.is_some_and(|since| since.elapsed() >= limit) {
                return faults.idle_closed();
            }
        }
    }
}

/// A request on a connection, until its answer is sent or given up.
pub struct Use {
    /// On what it came.
    pub connection: Connection,
    wire: Rc<Wire>,
}

impl Use {
    /// The body of its answer.
    pub fn answer<B>(self, body: B) -> Answer<B> {
        Answer { body, _use: self }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.wire.open.set(self.wire.open.get().saturating_sub(1));
        self.wire.idle_since.set(Some(Instant::now()));
        self.wire.freed.notify_one();
    }
}

/// A body that uses its connection while it is sent.
pub struct Answer<B> {
    body: B,
    _use: Use,
}

impl<B: Body + Unpin> Body for Answer<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
