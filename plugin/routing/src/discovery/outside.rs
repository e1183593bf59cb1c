//! Owns which of a source's workers are left out, since they lie outside the networks that requests may go to.

use hashbrown::HashSet;

use crate::config::Destinations;
use crate::fleet::Worker;

/// Things said that are remembered, so that they are not said at every poll.
const MAX_SAID: usize = 1_024;

/// Leaves workers out, and says so once of each.
#[derive(Debug)]
pub struct Outside {
    destinations: Destinations,
    said: Said,
}

/// What the operator has been told, as long as it goes on being true.
#[derive(Debug, Default)]
pub struct Said(HashSet<String>);

impl Outside {
    pub fn new(destinations: &Destinations) -> Self {
        Self {
            destinations: destinations.clone(),
            said: Said::default(),
        }
    }

    /// Those who may be sent something; and what is new to say, of those who may not and `beside`.
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
    let whom = match name == address {
        true => name.to_owned(),
        false => format!("{name} at {address}"),
    };
    format!(
        "worker {whom} is left out: its address lies in none of destinations.original_dst.networks"
    )
}

impl Said {
    /// Those of the present problems that have not been told. What is over may be told again.
    fn anew(&mut self, problems: Vec<String>) -> Vec<String> {
        let told = std::mem::take(&mut self.0);
        self.0.extend(problems.iter().take(MAX_SAID).cloned());
        let mut problems = problems;
        problems.truncate(MAX_SAID);
        problems.retain(|problem| !told.contains(problem));
        problems
    }
}
