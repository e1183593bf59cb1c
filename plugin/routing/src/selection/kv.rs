//! Owns selection by cost: the cheapest worker, or with a temperature now and then a dearer one.

use super::cost::{Prices, Terms};
use super::{Candidate, Policy, Random, Reads, Task, pick};

/// Picks by the cost of each candidate.
#[derive(Debug, Default)]
pub struct Kv;

impl Policy for Kv {
    fn peek(
        &mut self,
        task: &Task<'_>,
        candidates: &[Candidate<'_>],
        random: &mut Random,
    ) -> Option<usize> {
        cheapest(task, candidates.iter().copied(), random)
    }

    fn goes_by_cost(&self) -> bool {
        true
    }

    fn reads(&self) -> Reads {
        Reads::Overlap
    }

    fn terms(&self, task: &Task<'_>, candidates: &[Candidate<'_>]) -> Option<Vec<Terms>> {
        let prices = Prices::new(task, candidates.iter().copied());
        let terms = candidates.iter().map(|candidate| prices.terms(candidate));
        Some(terms.collect())
    }
}

/// The position of the picked candidate. Candidates are priced as they are built: storing a thousand of them first takes
/// longer than pricing them.
pub fn cheapest<'c>(
    task: &Task<'_>,
    candidates: impl Iterator<Item = Candidate<'c>> + Clone,
    random: &mut Random,
) -> Option<usize> {
    let prices = Prices::new(task, candidates.clone());
    let costs = candidates.map(|candidate| prices.cost(&candidate));
    let temperature = task.weights.router_temperature;
    if temperature <= 0.0 {
        return pick::least(costs, random);
    }
    pick::softmax(&costs.collect::<Vec<f64>>(), temperature, random)
}
