//! Owns the state of a connection: whether it has carried an earlier request, and since when it has been idle.

use std::cell::Cell;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::fault::Faults;

/// Kind of connection that carried a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionKind {
    /// Made for the request.
    Fresh,
    /// Kept alive after an earlier request.
    Kept,
}

/// Origin of a request.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The address at which the request reached the engine.
    pub local: SocketAddr,
    /// Kind of connection.
    pub connection: ConnectionKind,
}

/// One connection.
#[derive(Default)]
pub struct ConnectionState {
    requests: Cell<u64>,
    /// Requests whose answers are not completely sent.
    open: Cell<u64>,
    idle_since: Cell<Option<Instant>>,
    freed: Notify,
}

impl ConnectionState {
    /// Records the arrival of a request.
    pub fn begin(self: &Rc<Self>) -> ConnectionUse {
        let connection = match self.requests.get() {
            0 => ConnectionKind::Fresh,
            _ => ConnectionKind::Kept,
        };
        self.requests.set(self.requests.get() + 1);
        self.open.set(self.open.get() + 1);
        ConnectionUse {
            connection,
            state: Rc::clone(self),
        }
    }

    /// Resolves when the connection has been idle for longer than allowed, if a fault sets a limit.
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

/// A request on a connection, until its answer is sent or abandoned.
pub struct ConnectionUse {
    /// Kind of connection.
    pub connection: ConnectionKind,
    state: Rc<ConnectionState>,
}

impl ConnectionUse {
    /// The body of the request's answer.
    pub fn answer<B>(self, body: B) -> TrackedBody<B> {
        TrackedBody { body, _use: self }
    }
}

impl Drop for ConnectionUse {
    fn drop(&mut self) {
        self.state.open.set(self.state.open.get().saturating_sub(1));
        self.state.idle_since.set(Some(Instant::now()));
        self.state.freed.notify_one();
    }
}

/// A body that keeps its connection in use while being sent.
pub struct TrackedBody<B> {
    body: B,
    _use: ConnectionUse,
}

impl<B: Body + Unpin> Body for TrackedBody<B> {
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
