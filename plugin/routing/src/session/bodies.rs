//! Owns what is kept of a request's headers and body, and the shares of the budgets that the bytes count in.

use std::sync::Arc;

use super::Header;
use crate::budget::Share;

/// A request's body as its client sent it, kept for as long as the request may have to be routed again.
#[derive(Debug)]
pub struct ReplayBuffer {
    /// The body.
    pub body: Vec<u8>,
    /// The share of the budget.
    pub share: Arc<Share>,
}

/// A request that its client has left, kept for the clean-up leg.
#[derive(Debug)]
pub struct CleanupRequest {
    /// Headers as the client sent them.
    pub headers: Arc<[Header]>,
    /// Body as the client sent it.
    pub body: Vec<u8>,
    /// The share of the budget.
    pub share: Share,
}

/// What is kept of a request.
#[derive(Debug)]
pub struct Bodies {
    /// The request's headers as they came, kept as long as a call may be made: a proxy no longer shows them after forwarding.
    pub headers: Arc<[Header]>,
    /// The share of the body that the proxy holds, until the request is forwarded.
    pub received: Option<Arc<Share>>,
    /// What is needed to route the request again.
    pub replay: Option<ReplayBuffer>,
    /// The request, kept for the clean-up leg.
    pub cleanup: Option<CleanupRequest>,
}

impl Bodies {
    /// What is kept of a request that has just come.
    pub fn new(headers: Arc<[Header]>) -> Self {
        Self {
            headers,
            received: None,
            replay: None,
            cleanup: None,
        }
    }

    /// The request's share of a budget for bodies. A call that carries the body holds the share too: the proxy keeps the body
    /// until the call has ended, also after the client has left.
    pub fn share(&self) -> Option<Arc<Share>> {
        let replayed = || self.replay.as_ref().map(|replay| &replay.share);
        self.received.as_ref().or_else(replayed).cloned()
    }

    /// Bytes of the body that the proxy holds.
    pub fn received_bytes(&self) -> usize {
        self.received.as_ref().map_or(0, |share| share.bytes())
    }

    /// Frees what only a request whose client has read nothing needs.
    pub fn answer_begins(&mut self) {
        self.replay = None;
        self.headers = Arc::default();
    }

    /// Frees what the client's stream held. What the clean-up leg needs stays.
    pub fn end(&mut self) {
        self.received = None;
        self.replay = None;
    }
}
