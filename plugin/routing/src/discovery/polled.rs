//! Owns which answers of a polled source count: no unreadable one, and an empty one only when repeated.

use crate::fleet::Worker;

/// The workers according to the polled answers so far.
#[derive(Debug, Default)]
pub struct PolledWorkers {
    workers: Vec<Worker>,
    empty_answers: u32,
}

/// Effect of one answer.
#[derive(Debug, PartialEq)]
pub enum Believed {
    /// The workers have changed to these.
    Changed(Vec<Worker>),
    /// Nothing new, or not yet accepted.
    Unchanged,
}

impl PolledWorkers {
    /// Starts from the known workers, for a VM that takes over from another.
    pub fn starting_from(workers: Vec<Worker>) -> Self {
        Self {
            workers,
            empty_answers: 0,
        }
    }

    /// Takes in a readable answer. After a fleet with workers an empty list counts only when repeated: a source that has
    /// just restarted has no workers before they have registered again.
    pub fn accept(&mut self, answer: Vec<Worker>) -> Believed {
        self.empty_answers = match answer.is_empty() {
            true => self.empty_answers.saturating_add(1),
            false => 0,
        };
        if answer == self.workers || self.empty_answers == 1 {
            return Believed::Unchanged;
        }
        self.workers.clone_from(&answer);
        Believed::Changed(answer)
    }

    /// Expires the workers of a source that was silent for too long. The next answer with workers counts at once.
    pub fn expire(&mut self) -> Believed {
        // Same as a repeated empty answer.
        self.empty_answers = 2;
        match std::mem::take(&mut self.workers).is_empty() {
            true => Believed::Unchanged,
            false => Believed::Changed(Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{Role, WorkerId};

    fn workers(ids: &[u64]) -> Vec<Worker> {
        let worker = |id: &u64| Worker::new(WorkerId(*id), Role::Decode, None);
        ids.iter().map(worker).collect()
    }

    #[test]
    fn emptiness_is_believed_the_second_time() {
        let mut polled = PolledWorkers::default();
        assert_eq!(
            polled.accept(workers(&[1, 2])),
            Believed::Changed(workers(&[1, 2]))
        );
        assert_eq!(polled.accept(workers(&[])), Believed::Unchanged);
        assert_eq!(polled.accept(workers(&[1, 2])), Believed::Unchanged);
        assert_eq!(polled.accept(workers(&[])), Believed::Unchanged);
        assert_eq!(polled.accept(workers(&[])), Believed::Changed(workers(&[])));
        assert_eq!(polled.accept(workers(&[])), Believed::Unchanged);
        assert_eq!(
            polled.accept(workers(&[3])),
            Believed::Changed(workers(&[3]))
        );
    }

    #[test]
    fn what_is_given_up_is_gone_until_it_is_heard_of_again() {
        let mut polled = PolledWorkers::starting_from(workers(&[1]));
        assert_eq!(polled.expire(), Believed::Changed(workers(&[])));
        assert_eq!(polled.expire(), Believed::Unchanged);
        assert_eq!(polled.accept(workers(&[])), Believed::Unchanged);
        assert_eq!(
            polled.accept(workers(&[1])),
            Believed::Changed(workers(&[1]))
        );
    }
}
