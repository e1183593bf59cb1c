//! Owns the interface between engines and routers: an engine's queries and its reports.
//!
//! Times are since 1970, as for a router in a proxy.

use std::time::Duration;

use super::trace::Request;

/// Number of workers of each role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerCounts {
    /// Prefill workers, numbered from 0.
    pub prefill: usize,
    /// Decode workers, numbered after the prefill workers.
    pub decode: usize,
}

impl WorkerCounts {
    /// All workers.
    pub fn total(self) -> usize {
        self.prefill + self.decode
    }
}

/// The workers of a request, by number; equal if one worker runs it aggregated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerPair {
    /// Worker that computes the prompt.
    pub prefill: usize,
    /// Worker that writes the answer.
    pub decode: usize,
}

/// An engine's metrics at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineMetrics {
    /// Waiting requests.
    pub waiting: u32,
    /// Running requests.
    pub running: u32,
    /// Share of the KV cache held by running requests, 0 to 1. Cached blocks without a request can be evicted, and are not
    /// included.
    pub kv_use: f32,
}

/// A router, or the model of one.
pub trait RouterModel {
    /// Selects the workers of a request and books it.
    ///
    /// # Errors
    /// The reason, if the router refuses the request.
    fn reserve(&mut self, request: &Request, now: Duration)
    -> Result<Box<dyn Reservation>, String>;

    /// Time of the next report of the engines; `None`: never.
    fn next_report(&self) -> Option<Duration> {
        None
    }

    /// Receives the metrics of all engines, by number.
    fn on_engine_metrics(&mut self, _engines: &[EngineMetrics], _now: Duration) {}
}

/// A request's bookings in the router. Dropping it releases all of them.
pub trait Reservation {
    /// The request's workers.
    fn pair(&self) -> WorkerPair;

    /// The first token was seen: prefill has ended.
    fn first_token(&mut self, now: Duration);

    /// Output tokens so far.
    fn generated(&mut self, tokens: u64);
}
