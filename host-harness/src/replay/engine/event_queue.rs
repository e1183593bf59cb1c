//! Owns the queue of future events: in order of time, and of entry where times are equal.

use std::collections::BTreeMap;
use std::time::Duration;

/// Future events.
#[derive(Debug)]
pub struct EventQueue<E> {
    /// By time and number of entry.
    entries: BTreeMap<(Duration, u64), E>,
    entered: u64,
}

impl<E> EventQueue<E> {
    /// An empty queue.
    pub fn new() -> Self {
        Self {
            entries: BTreeMap::new(),
            entered: 0,
        }
    }

    /// Schedules `event` at that time.
    pub fn push(&mut self, at: Duration, event: E) {
        self.entered += 1;
        self.entries.insert((at, self.entered), event);
    }

    /// Time of the next event.
    pub fn due(&self) -> Option<Duration> {
        self.entries.first_key_value().map(|((at, _), _)| *at)
    }

    /// The next event, and its time.
    pub fn pop(&mut self) -> Option<(Duration, E)> {
        let ((at, _), event) = self.entries.pop_first()?;
        Some((at, event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_and_then_of_entry() {
        let mut queue = EventQueue::new();
        for (at, event) in [(5, 'a'), (3, 'b'), (5, 'c'), (3, 'd')] {
            queue.push(Duration::from_secs(at), event);
        }
        assert_eq!(queue.due(), Some(Duration::from_secs(3)));
        let order: String = std::iter::from_fn(|| queue.pop().map(|(_, event)| event)).collect();
        assert_eq!(order, "bdac");
        assert_eq!(queue.due(), None);
    }
}
