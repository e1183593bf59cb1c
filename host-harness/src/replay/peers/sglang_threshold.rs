//! Owns a model of the cache-aware policy of SGLang's router, with the defaults of its command line.
//!
//! While the load is balanced, a prompt goes to the worker that last got its longest known prefix, if that prefix is a large
//! enough part of the prompt; otherwise, and whenever the load is out of balance, to the worker with the fewest requests. Known
//! blocks are never evicted: the default bound is larger than an hour's prompts.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::InFlight;
use crate::cache::IdentityHasher;
use crate::replay::router_model::{Reservation, RouterModel, WorkerCounts, WorkerPair};
use crate::replay::trace::Request;

/// `--cache-threshold`: the share of a prompt that must be known.
const CACHE_THRESHOLD: f64 = 0.3;
/// `--balance-abs-threshold`: difference in requests between the busiest and the least busy worker.
const BALANCE_ABS: u64 = 64;
/// `--balance-rel-threshold`: ratio of requests between the busiest and the least busy worker.
const BALANCE_REL: f64 = 1.5;

/// The threshold policy.
#[derive(Debug)]
pub struct SglangThreshold {
    in_flight: InFlight,
    block_tokens: u32,
    /// Requests ever assigned to each prefill worker: among equals the one with the fewest is selected.
    processed: Vec<u64>,
    /// The last worker to get each block.
    known: HashMap<u64, usize, BuildHasherDefault<IdentityHasher>>,
    random: StdRng,
}

impl SglangThreshold {
    /// For workers without known blocks.
    pub fn new(workers: WorkerCounts, block_tokens: u32, seed: u64) -> Self {
        Self {
            in_flight: InFlight::new(workers),
            block_tokens,
            processed: vec![0; workers.prefill],
            known: HashMap::default(),
            random: StdRng::seed_from_u64(seed),
        }
    }

    fn choose(&self, request: &Request) -> usize {
        let loads = self.in_flight.prefill();
        match self.matched(request) {
            Some(worker) if !imbalanced(&loads) => worker,
            _ => self.least(&loads),
        }
    }

    /// The worker with the deepest known block of a prompt, if deep enough.
    fn matched(&self, request: &Request) -> Option<usize> {
        let names = request.blocks.sequence.iter();
        let (depth, worker) = (1..)
            .zip(names.map_while(|name| self.known.get(name)))
            .last()?;
        // In blocks; the last one may be partial and is never known.
        let total = request.prompt_tokens.div_ceil(self.block_tokens.into());
        (f64::from(depth) / total as f64 > CACHE_THRESHOLD).then_some(*worker)
    }

    fn least(&self, loads: &[u64]) -> usize {
        (0..loads.len())
            .min_by_key(|at| (loads[*at], self.processed[*at], *at))
            .unwrap_or_default()
    }
}

fn imbalanced(loads: &[u64]) -> bool {
    let most = loads.iter().max().copied().unwrap_or_default();
    let least = loads.iter().min().copied().unwrap_or_default();
    most - least > BALANCE_ABS && most as f64 > BALANCE_REL * least as f64
}

impl RouterModel for SglangThreshold {
    fn reserve(
        &mut self,
        request: &Request,
        _now: Duration,
    ) -> Result<Box<dyn Reservation>, String> {
        let prefill = self.choose(request);
        self.processed[prefill] += 1;
        let names = request.blocks.sequence.iter();
        self.known.extend(names.map(|name| (*name, prefill)));
        let decode = self.in_flight.least_decode(&mut self.random);
        Ok(self.in_flight.book(WorkerPair { prefill, decode }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use routing::prefix::Blocks;

    const WORKERS: WorkerCounts = WorkerCounts {
        prefill: 3,
        decode: 1,
    };

    fn request(sequence: &[u64]) -> Request {
        Request {
            arrival: Duration::ZERO,
            prompt_tokens: sequence.len() as u64 * 512,
            output_tokens: 1,
            blocks: Blocks {
                scope: 0,
                sequence: sequence.to_vec(),
                ..Blocks::default()
            },
            tail: None,
            session: None,
        }
    }

    fn given(router: &mut SglangThreshold, sequence: &[u64]) -> (usize, Box<dyn Reservation>) {
        let held = router.reserve(&request(sequence), Duration::ZERO).unwrap();
        (held.pair().prefill, held)
    }

    #[test]
    fn a_long_match_wins_and_a_short_one_does_not() {
        let mut router = SglangThreshold::new(WORKERS, 512, 1);
        let (first, _held) = given(&mut router, &[1, 2]);
        assert_eq!(first, 0);
        let (short, _short) = given(&mut router, &[1, 11, 12, 13]);
        assert_eq!(short, 1, "one block of four is less than the threshold");
        let (long, _long) = given(&mut router, &[1, 11, 12, 99]);
        assert_eq!(long, 1, "the deepest block was last given to 1");
        let (again, _again) = given(&mut router, &[1, 2]);
        assert_eq!(again, 0);
    }

    #[test]
    fn out_of_balance_the_shortest_queue_wins() {
        let mut router = SglangThreshold::new(WORKERS, 512, 1);
        let mut held = Vec::new();
        let workers: Vec<usize> = (0..66)
            .map(|_| {
                let (worker, reservation) = given(&mut router, &[1, 2]);
                held.push(reservation);
                worker
            })
            .collect();
        assert!(
            workers[..65].iter().all(|worker| *worker == 0),
            "{workers:?}"
        );
        assert_eq!(workers[65], 1, "65 requests between them are more than 64");
    }
}
