//! Owns the two bodies between hyper and a stream: the request body that can be sent again, and the response body fed by a
//! channel.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use tokio::sync::{Notify, mpsc};

/// Bytes that an upstream connection may lag behind before the client is no longer read.
const BACKLOG: u64 = 1024 * 1024;

/// Why a body ended early.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum BodyError {
    /// The body's length differs from its content-length header.
    #[error("the body is not as long as its content-length says")]
    Length,
    /// The stream was reset.
    #[error("the stream was reset")]
    Reset,
}

/// A request body on its way upstream, kept so that a retry can send it again.
#[derive(Clone)]
pub struct Outgoing {
    source: Rc<RefCell<Source>>,
    drained: Rc<Notify>,
}

struct Source {
    chunks: VecDeque<Bytes>,
    first: usize,
    ended: bool,
    broken: bool,
    retain: bool,
    declared: Option<u64>,
    total: u64,
    read: u64,
    reader: Option<Waker>,
}

impl Outgoing {
    /// An empty body whose content-length header says `declared` bytes.
    pub fn new(declared: Option<u64>) -> Outgoing {
        let source = Source {
            chunks: VecDeque::new(),
            first: 0,
            ended: false,
            broken: false,
            retain: true,
            declared,
            total: 0,
            read: 0,
            reader: None,
        };
        Outgoing {
            source: Rc::new(RefCell::new(source)),
            drained: Rc::new(Notify::new()),
        }
    }

    /// Appends bytes. More than declared break the body.
    pub fn push(&self, chunk: Bytes) -> Result<(), BodyError> {
        let mut source = self.source.borrow_mut();
        if chunk.is_empty() {
            return Ok(());
        }
        source.total += chunk.len() as u64;
        if source.declared.is_some_and(|length| source.total > length) {
            return Err(source.fail());
        }
        source.chunks.push_back(chunk);
        source.wake();
        Ok(())
    }

    /// Ends the body. Fewer bytes than declared break the body.
    pub fn end(&self) -> Result<(), BodyError> {
        let mut source = self.source.borrow_mut();
        if source.declared.is_some_and(|length| source.total < length) {
            return Err(source.fail());
        }
        source.ended = true;
        source.wake();
        Ok(())
    }

    /// True when the body is complete.
    pub fn is_complete(&self) -> bool {
        self.source.borrow().ended
    }

    /// True while upstream keeps up, so that more may be read from the client.
    pub fn has_room(&self) -> bool {
        let source = self.source.borrow();
        source.total - source.read.min(source.total) < BACKLOG
    }

    /// Waits until upstream has read more.
    pub async fn drained(&self) {
        self.drained.notified().await;
    }

    /// Bytes that a retry would have to send again; beyond a limit they are not kept.
    pub fn retained(&self) -> u64 {
        self.source.borrow().total
    }

    /// Rules out further retries: sent bytes can be dropped.
    pub fn forget_sent(&self) {
        self.source.borrow_mut().retain = false;
    }

    /// True while a retry can send everything again.
    pub fn can_replay(&self) -> bool {
        self.source.borrow().first == 0
    }

    /// The body from its start, for one attempt.
    pub fn replay(&self) -> ReplayBody {
        self.source.borrow_mut().read = 0;
        ReplayBody {
            outgoing: self.clone(),
            next: 0,
        }
    }
}

impl Source {
    fn fail(&mut self) -> BodyError {
        self.broken = true;
        self.wake();
        BodyError::Length
    }

    fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

/// One attempt's view of an [`Outgoing`] body. Its size stays unknown on purpose: a content-length that the plugin removed must
/// not come back.
pub struct ReplayBody {
    outgoing: Outgoing,
    next: usize,
}

impl Body for ReplayBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let outgoing = self.outgoing.clone();
        let mut source = outgoing.source.borrow_mut();
        if source.broken {
            return Poll::Ready(Some(Err(BodyError::Length)));
        }
        let Some(offset) = self.next.checked_sub(source.first) else {
            return Poll::Ready(Some(Err(BodyError::Reset)));
        };
        if let Some(chunk) = source.chunks.get(offset).cloned() {
            self.next += 1;
            source.read += chunk.len() as u64;
            if !source.retain {
                source.first += offset + 1;
                source.chunks.drain(..=offset);
            }
            outgoing.drained.notify_one();
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        if source.ended {
            return Poll::Ready(None);
        }
        source.reader = Some(context.waker().clone());
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        let source = self.outgoing.source.borrow();
        source.ended && !source.broken && self.next == source.first + source.chunks.len()
    }
}

/// One piece of a response body.
#[derive(Debug)]
pub enum Piece {
    /// Data or trailers.
    Frame(Frame<Bytes>),
    /// The clean end. Without it the connection is broken, so that a truncated body does not look complete.
    End,
}

/// A response body whose pieces come from a stream's task.
pub struct ChannelBody {
    pieces: mpsc::Receiver<Piece>,
    ended: bool,
    flushed: bool,
}

impl ChannelBody {
    /// A body of the pieces from this channel.
    pub fn new(pieces: mpsc::Receiver<Piece>) -> ChannelBody {
        ChannelBody {
            pieces,
            ended: false,
            flushed: false,
        }
    }

    /// No body at all.
    pub fn empty() -> ChannelBody {
        let (_, pieces) = mpsc::channel(1);
        ChannelBody {
            pieces,
            ended: true,
            flushed: false,
        }
    }
}

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        match self.pieces.poll_recv(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(Piece::Frame(frame))) => Poll::Ready(Some(Ok(frame))),
            Poll::Ready(Some(Piece::End)) => {
                self.ended = true;
                Poll::Ready(None)
            }
            // hyper drops unflushed bytes when a body fails; one more poll lets it flush first.
            Poll::Ready(None) if !self.flushed => {
                self.flushed = true;
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Ready(None) => Poll::Ready(Some(Err(BodyError::Reset))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}
