//! Owns selection by cost: the least, or with a temperature now and then a dearer one.

use super::cost::{Prices, Terms};
use super::{Candidate, Policy, Random, Reads, Task, pick};

/// Goes by what each candidate would cost.
#[derive(Debug, Default)]
pub struct Kv {
    /// Kept between choices for its memory alone.
    costs: Vec<f64>,
}

impl Policy for Kv {
    fn peek(
        &mut self,
        task: &Task<'_>,
        candidates: &[Candidate<'_>],
        random: &mut Random,
    ) -> Option<usize> {
        let prices = Prices::new(task, candidates);
        let costs = candidates.iter().map(|candidate| prices.cost(candidate));
        let temperature = task.weights.router_temperature;
        if temperature <= 0.0 {
            return pick::least(costs, random);
        }
        self.costs.clear();
        self.costs.extend(costs);
        pick::softmax(&self.costs, temperature, random)
    }

    fn goes_by_cost(&self) -> bool {
        true
    }

    fn reads(&self) -> Reads {
        Reads::Overlap
    }

    fn terms(&self, task: &Task<'_>, candidates: &[Candidate<'_>]) -> Option<Vec<Terms>> {
        let prices = Prices::new(task, candidates);
        let terms = candidates.iter().map(|candidate| prices.terms(candidate));
        Some(terms.collect())
    }
}
