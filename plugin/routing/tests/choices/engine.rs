//! Owns simulated workers that prefill prompts in virtual time, one after the other, and report each end to the router.

use std::time::Duration;

use routing::route::{Assignment, Router, SelectionRequest};

use crate::support::*;

/// The workers and their requests under way.
pub struct Engines {
    rates: Vec<f64>,
    overhead: f64,
    free_at: Vec<f64>,
    under_way: Vec<(f64, Assignment)>,
    pub now: f64,
    /// Requests so far, by worker.
    pub taken: Vec<u64>,
    /// Times to the first token of all requests, in seconds.
    pub waits: Vec<f64>,
}

impl Engines {
    /// Prefill workers from 1 on, with these rates in tokens a second; each prompt takes `overhead` seconds more.
    pub fn new(rates: &[f64], overhead: f64) -> Self {
        Self {
            rates: rates.to_vec(),
            overhead,
            free_at: vec![0.0; rates.len()],
            under_way: Vec::new(),
            now: 1.0,
            taken: vec![0; rates.len()],
            waits: Vec::new(),
        }
    }

    /// Advances time and reports the prompts that end meanwhile, in order.
    pub fn pass(&mut self, seconds: f64) {
        self.now += seconds;
        self.under_way.sort_by(|a, b| a.0.total_cmp(&b.0));
        let due = self.under_way.partition_point(|(end, _)| *end <= self.now);
        for (end, mut assignment) in self.under_way.drain(..due) {
            assignment.first_token(Duration::from_secs_f64(end));
        }
    }

    /// Advances time until nothing is under way.
    pub fn idle(&mut self) {
        let end = self
            .under_way
            .iter()
            .map(|(end, _)| *end)
            .fold(self.now, f64::max);
        self.pass(end - self.now + 0.001);
    }

    /// Books a request on the worker that the router picks; the tokens to compute are the ones booked.
    pub fn take(&mut self, router: &mut Router, ask: &SelectionRequest<'_>) -> u64 {
        let before: Vec<u64> = (1..=self.rates.len() as u64)
            .map(|id| load(router, id).prefill_tokens)
            .collect();
        let assignment = router
            .reserve(ask, Duration::from_secs_f64(self.now))
            .unwrap();
        let id = prefill_id(&assignment);
        let index = usize::try_from(id - 1).unwrap();
        let tokens = load(router, id).prefill_tokens - before[index];
        let took = self.overhead + tokens as f64 / self.rates[index];
        let end = self.free_at[index].max(self.now) + took;
        self.free_at[index] = end;
        self.taken[index] += 1;
        self.waits.push(end - self.now);
        self.under_way.push((end, assignment));
        id
    }
}
