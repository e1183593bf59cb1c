//! Owns what is kept of a request's headers and body.
//!
//! A body counts once in the budget for bodies, as long as the proxy or the filter holds any of it. A copy for another leg also
//! counts in the bound on such copies.

use std::sync::Arc;

use super::Header;
use crate::budget::Share;

/// A request's body as its client sent it, kept for as long as the request may have to be routed again.
#[derive(Debug)]
pub struct ReplayBuffer {
    /// The body.
    pub body: Vec<u8>,
    /// The share of the bound on replay buffers.
    pub bound: Share,
}

/// A request kept for the clean-up leg: its client has left, or is served by another call.
#[derive(Debug)]
pub struct CleanupRequest {
    /// Headers as the client sent them.
    pub headers: Arc<[Header]>,
    /// Body as the client sent it.
    pub body: Vec<u8>,
    /// The share of the bound on clean-up requests.
    pub bound: Share,
    /// The share of the budget for bodies.
    pub share: Option<Arc<Share>>,
}

/// What is kept of a request.
#[derive(Debug)]
pub struct Bodies {
    /// The request's headers as they came, kept as long as a call may be made: a proxy no longer shows them after forwarding.
    pub headers: Arc<[Header]>,
    /// The share of the budget for bodies. A call that carries the body holds the share too: the proxy keeps the body until the
    /// call has ended, also after the client has left.
    pub share: Option<Arc<Share>>,
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
            share: None,
            replay: None,
            cleanup: None,
        }
    }

    /// Bytes of the body that the proxy holds.
    pub fn received_bytes(&self) -> usize {
        self.share.as_ref().map_or(0, |share| share.bytes())
    }

    /// Notes that the proxy has forwarded the request: its body counts only if it is kept for another leg.
    pub fn forwarded(&mut self) {
        if self.replay.is_none() {
            self.share = None;
        }
    }

    /// Keeps the request for the clean-up leg.
    pub fn leave(&mut self, body: Vec<u8>, bound: Share) {
        self.cleanup = Some(CleanupRequest {
            headers: Arc::clone(&self.headers),
            body,
            bound,
            share: self.share.clone(),
        });
    }

    /// Frees what only a request whose client has read nothing needs.
    pub fn answer_begins(&mut self) {
        self.release();
        self.headers = Arc::default();
    }

    /// Frees the body of a request that was answered, or has ended. What the clean-up leg needs stays.
    pub fn release(&mut self) {
        self.replay = None;
        self.share = None;
    }
}
