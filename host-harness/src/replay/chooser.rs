//! Owns the seam between engines and routers: what an engine asks of a router, and what it tells it.
//!
//! Times are since 1970, as a router in a proxy has them.

use std::time::Duration;

use super::trace::Request;

/// How many workers there are of each role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Prefill workers, numbered from 0.
    pub prefill: usize,
    /// Decode workers, numbered on.
    pub decode: usize,
}

impl Shape {
    /// All workers.
    pub fn workers(self) -> usize {
        self.prefill + self.decode
    }
}

/// Which workers a request goes to, by number; both the same where one runs it whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Where the prompt is computed.
    pub prefill: usize,
    /// Where the answer is written.
    pub decode: usize,
}

/// What an engine says of itself at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Status {
    /// Requests that wait.
    pub waiting: u32,
    /// Requests under way.
    pub running: u32,
    /// The part of its KV cache that requests under way hold, 0 to 1. What is only remembered is free to be given up, and not in it.
    pub kv_use: f32,
}

/// A router, or the model of one.
pub trait Chooser {
    /// Chooses the workers of a request and books it.
    ///
    /// # Errors
    /// The reason, where the router refuses the request.
    fn reserve(&mut self, request: &Request, now: Duration) -> Result<Box<dyn Held>, String>;

    /// When it wants to hear of the engines next; none: never.
    fn listens(&self) -> Option<Duration> {
        None
    }

    /// What all engines say of themselves, by number.
    fn hear(&mut self, _engines: &[Status], _now: Duration) {}
}

/// What a request occupies in the router's books. Dropping it frees everything.
pub trait Held {
    /// Where the request goes.
    fn place(&self) -> Place;

    /// The first token was seen: prefill is over.
    fn first_token(&mut self, now: Duration);

    /// Output tokens so far.
    fn generated(&mut self, tokens: u64);
}
