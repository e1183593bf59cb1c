//! Owns the queue of future events: in order of time, and of entry where times are equal.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::time::Duration;

/// Future events.
#[derive(Debug)]
pub struct EventQueue<E> {
    entries: BinaryHeap<Reverse<Entry<E>>>,
    entered: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Duration,
    number: u64,
    event: E,
}

impl<E> EventQueue<E> {
    /// An empty queue.
    pub fn new() -> Self {
        Self {
            entries: BinaryHeap::new(),
            entered: 0,
        }
    }

    /// Schedules `event` at that time.
    pub fn push(&mut self, at: Duration, event: E) {
        self.entered += 1;
        self.entries.push(Reverse(Entry {
            at,
            number: self.entered,
            event,
        }));
    }

    /// Time of the next event.
    pub fn due(&self) -> Option<Duration> {
        self.entries.peek().map(|Reverse(entry)| entry.at)
    }

    /// The next event, and its time.
    pub fn pop(&mut self) -> Option<(Duration, E)> {
        let Reverse(entry) = self.entries.pop()?;
        Some((entry.at, entry.event))
    }
}

impl<E> Entry<E> {
    fn order(&self) -> (Duration, u64) {
        (self.at, self.number)
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.order() == other.order()
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.order().cmp(&other.order())
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
