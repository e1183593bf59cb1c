//! Owns the plainest cost policy, as a check of the engine: it has exact knowledge of each worker's queue and cache.

use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::{InFlight, least};
use crate::cache::Cache;
use crate::replay::engine::{Parameters, computed};
use crate::replay::router_model::{Reservation, RouterModel, WorkerPair};
use crate::replay::trace::Request;

/// Selects the worker with the least sum of wait and own work; at random among equals.
#[derive(Debug)]
pub struct PlainCost {
    in_flight: InFlight,
    caches: Vec<Cache>,
    free_at: Vec<Duration>,
    block_tokens: u64,
    rate: f64,
    random: StdRng,
}

impl PlainCost {
    /// For workers that are idle and empty.
    pub fn new(parameters: &Parameters, seed: u64) -> Self {
        let workers = parameters.workers.prefill;
        Self {
            in_flight: InFlight::new(parameters.workers),
            caches: (0..workers)
                .map(|_| Cache::new(parameters.kv_blocks as usize))
                .collect(),
            free_at: vec![Duration::ZERO; workers],
            block_tokens: parameters.block_tokens.into(),
            rate: parameters.prefill_rate,
            random: StdRng::seed_from_u64(seed),
        }
    }

    fn ends(&self, worker: usize, request: &Request, now: Duration) -> Duration {
        let cached = self.caches[worker].depth(&request.blocks.sequence) as u64 * self.block_tokens;
        let work = computed(request.prompt_tokens, cached) as f64 / self.rate;
        self.free_at[worker].max(now) + Duration::from_secs_f64(work)
    }
}

impl RouterModel for PlainCost {
    fn reserve(
        &mut self,
        request: &Request,
        now: Duration,
    ) -> Result<Box<dyn Reservation>, String> {
        let ends: Vec<Duration> = (0..self.caches.len())
            .map(|at| self.ends(at, request, now))
            .collect();
        let costs: Vec<u64> = ends
            .iter()
            .map(|end| (*end - now).as_micros() as u64)
            .collect();
        let prefill = least(&costs, &mut self.random);
        self.free_at[prefill] = ends[prefill];
        self.caches[prefill].enter(&request.blocks.sequence);
        let decode = self.in_flight.least_decode(&mut self.random);
        Ok(self.in_flight.book(WorkerPair { prefill, decode }))
    }
}
