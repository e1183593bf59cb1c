//! Owns what is kept of a queued request.
//!
//! A body is parsed once, when its request arrives: the result is kept, and another try costs the same however long the body is.

use super::selection_request::Demand;
use crate::admission::Waiter;
use crate::request::{BufferedRequest, ParsedRequest, RoutingOverrides};

/// A request that is to queue, without its body.
#[derive(Debug)]
pub struct QueueTicket {
    /// Its number in the queue.
    pub waiter: Waiter,
    pub(super) parsed: ParsedRequest,
    pub(super) terms: QueuedChoice,
}

/// A queued request, with its body and all that was parsed of it.
#[derive(Debug)]
pub struct QueuedRequest {
    /// Its number in the queue.
    pub waiter: Waiter,
    pub(super) request: BufferedRequest,
    pub(super) terms: QueuedChoice,
}

/// The inputs of a choice for a queued request.
#[derive(Debug)]
pub(super) struct QueuedChoice {
    pub(super) overrides: RoutingOverrides,
    pub(super) demand: Demand,
    /// The model, or the base model of the requested adapter; none: the API names no model.
    pub(super) model: Option<String>,
    /// Number of fleets adopted when the model was looked up.
    pub(super) adopted: u64,
}

impl QueueTicket {
    /// Adds the body; none if it differs from the one that was parsed.
    pub fn with_body(self, body: Vec<u8>) -> Option<QueuedRequest> {
        Some(QueuedRequest {
            waiter: self.waiter,
            request: self.parsed.with(body)?,
            terms: self.terms,
        })
    }
}

impl QueuedRequest {
    /// Takes the body out.
    pub fn into_body(self) -> Vec<u8> {
        self.request.into_body()
    }
}
