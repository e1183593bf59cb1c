//! Owns selection by cost: the least, or with a temperature now and then a dearer one.

use super::cost::{self, Terms};
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
        let least_booked = cost::least_booked(candidates);
        self.costs.clear();
        self.costs.extend(
            candidates
                .iter()
                .map(|candidate| cost::terms(task, candidate, least_booked).cost),
        );
        pick::softmax(&self.costs, task.weights.router_temperature, random)
    }

    fn goes_by_cost(&self) -> bool {
        true
    }

    fn reads(&self) -> Reads {
        Reads::Overlap
    }

    fn terms(&self, task: &Task<'_>, candidates: &[Candidate<'_>]) -> Option<Vec<Terms>> {
        let least_booked = cost::least_booked(candidates);
        let terms = candidates
            .iter()
            .map(|c| cost::terms(task, c, least_booked));
        Some(terms.collect())
    }
}
