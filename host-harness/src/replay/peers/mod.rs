//! Owns models of other routers: their policies and their counts.
//!
//! They follow the behaviour of those routers, are small enough to be read at a glance, and run in `replay` only. Their load is
//! the number of running requests; for a prefill worker, those without a first token.

mod least_requests;
#[cfg(test)]
pub mod plain_cost;
mod sglang_threshold;

pub use least_requests::LeastRequests;
pub use sglang_threshold::SglangThreshold;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use super::router_model::{Reservation, WorkerCounts, WorkerPair};

/// Running requests of each worker.
#[derive(Debug)]
struct InFlight {
    workers: WorkerCounts,
    counts: Vec<Rc<Cell<u64>>>,
}

impl InFlight {
    fn new(workers: WorkerCounts) -> Self {
        Self {
            workers,
            counts: (0..workers.total()).map(|_| Rc::default()).collect(),
        }
    }

    /// Counts of the prefill workers.
    fn prefill(&self) -> Vec<u64> {
        let counts = self.counts.iter().take(self.workers.prefill);
        counts.map(|count| count.get()).collect()
    }

    /// The decode worker with the fewest requests; at random among equals.
    fn least_decode(&self, random: &mut StdRng) -> usize {
        let counts = self.counts.iter().skip(self.workers.prefill);
        let counts: Vec<u64> = counts.map(|count| count.get()).collect();
        self.workers.prefill + least(&counts, random)
    }

    fn book(&self, pair: WorkerPair) -> Box<dyn Reservation> {
        Box::new(Booking {
            pair,
            prefill: Some(CountGuard::new(&self.counts[pair.prefill])),
            _decode: CountGuard::new(&self.counts[pair.decode]),
        })
    }
}

/// Index of the minimum; at random among equals.
fn least(loads: &[u64], random: &mut StdRng) -> usize {
    let smallest = loads.iter().min().copied().unwrap_or_default();
    let equals: Vec<usize> = (0..loads.len())
        .filter(|at| loads[*at] == smallest)
        .collect();
    equals.choose(random).copied().unwrap_or_default()
}

/// One request in a count, until dropped.
#[derive(Debug)]
struct CountGuard(Rc<Cell<u64>>);

impl CountGuard {
    fn new(count: &Rc<Cell<u64>>) -> Self {
        count.set(count.get() + 1);
        Self(Rc::clone(count))
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// A request in the counts of its two workers.
#[derive(Debug)]
struct Booking {
    pair: WorkerPair,
    prefill: Option<CountGuard>,
    _decode: CountGuard,
}

impl Reservation for Booking {
    fn pair(&self) -> WorkerPair {
        self.pair
    }

    fn first_token(&mut self, _now: Duration) {
        self.prefill = None;
    }

    fn generated(&mut self, _tokens: u64) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    const WORKERS: WorkerCounts = WorkerCounts {
        prefill: 2,
        decode: 2,
    };

    #[test]
    fn a_request_is_counted_until_its_first_token_and_until_its_end() {
        let in_flight = InFlight::new(WORKERS);
        let mut held = in_flight.book(WorkerPair {
            prefill: 1,
            decode: 2,
        });
        assert_eq!(in_flight.prefill(), [0, 1]);
        let mut random = StdRng::seed_from_u64(1);
        assert!((0..50).all(|_| in_flight.least_decode(&mut random) == 3));
        held.first_token(Duration::ZERO);
        assert_eq!(in_flight.prefill(), [0, 0]);
        assert_eq!(in_flight.counts[2].get(), 1);
        drop(held);
        assert!(in_flight.counts.iter().all(|count| count.get() == 0));
    }

    #[test]
    fn equals_are_taken_evenly() {
        let mut random = StdRng::seed_from_u64(1);
        let mut taken = [0; 4];
        for _ in 0..1000 {
            taken[least(&[3, 1, 1, 1], &mut random)] += 1;
        }
        assert_eq!(taken[0], 0);
        assert!(
            taken[1..].iter().all(|count| (270..400).contains(count)),
            "{taken:?}"
        );
    }
}
