//! Owns plain least requests: the worker with the fewest running requests, regardless of their size.

use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::{InFlight, least};
use crate::replay::router_model::{Reservation, RouterModel, WorkerCounts, WorkerPair};
use crate::replay::trace::Request;

/// Selects the worker with the fewest requests; at random among equals.
#[derive(Debug)]
pub struct LeastRequests {
    in_flight: InFlight,
    random: StdRng,
}

impl LeastRequests {
    /// For idle workers.
    pub fn new(workers: WorkerCounts, seed: u64) -> Self {
        Self {
            in_flight: InFlight::new(workers),
            random: StdRng::seed_from_u64(seed),
        }
    }
}

impl RouterModel for LeastRequests {
    fn reserve(
        &mut self,
        _request: &Request,
        _now: Duration,
    ) -> Result<Box<dyn Reservation>, String> {
        let pair = WorkerPair {
            prefill: least(&self.in_flight.prefill(), &mut self.random),
            decode: self.in_flight.least_decode(&mut self.random),
        };
        Ok(self.in_flight.book(pair))
    }
}
