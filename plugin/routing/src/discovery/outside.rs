//! Owns which of a source's workers are left out because they lie outside the networks that requests may go to.

use hashbrown::HashSet;

use crate::config::Destinations;
use crate::fleet::Worker;

/// Maximum messages remembered, so that they are not repeated at every poll.
const MAX_SAID: usize = 1_024;

/// Leaves workers out, with one message for each.
#[derive(Debug)]
pub struct Outside {
    destinations: Destinations,
    said: OperatorMessages,
}

/// Messages given to the operator, kept as long as they stay true.
#[derive(Debug, Default)]
pub struct OperatorMessages(HashSet<String>);

impl Outside {
    pub fn new(destinations: &Destinations) -> Self {
        Self {
            destinations: destinations.clone(),
            said: OperatorMessages::default(),
        }
    }

    /// The workers that requests may go to, and the new messages: about the other workers, and `beside`.
    pub fn leave_out(
        &mut self,
        mut workers: Vec<Worker>,
        beside: Vec<String>,
    ) -> (Vec<Worker>, Vec<String>) {
        let mut problems = beside;
        workers.retain(|worker| {
            let refused = worker
                .address
                .filter(|address| !self.destinations.allow(*address));
            if let Some(address) = refused {
                problems.push(left_out(&worker.name, &address.to_string()));
            }
            refused.is_none()
        });
        (workers, self.said.anew(problems))
    }
}

fn left_out(name: &str, address: &str) -> String {
    let label = match name == address {
        true => name.to_owned(),
        false => format!("{name} at {address}"),
    };
    format!(
        "worker {label} is left out: its address lies in none of destinations.original_dst.networks"
    )
}

impl OperatorMessages {
    /// The problems without a message so far. A problem that was over is reported again.
    fn anew(&mut self, problems: Vec<String>) -> Vec<String> {
        let reported = std::mem::take(&mut self.0);
        self.0.extend(problems.iter().take(MAX_SAID).cloned());
        let mut problems = problems;
        problems.truncate(MAX_SAID);
        problems.retain(|problem| !reported.contains(problem));
        problems
    }
}
