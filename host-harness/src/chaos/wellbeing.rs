//! Owns the record of which engine was healthy at which time. Pure: the clock is an argument.

use std::time::Instant;

use routing::fleet::Role;

use super::scenario::{Seat, Shape};

/// Which engines were healthy at which time; all are at the beginning.
#[derive(Debug)]
pub struct Wellbeing {
    shape: Shape,
    /// In order of time.
    changes: Vec<Change>,
}

#[derive(Clone, Copy, Debug)]
struct Change {
    at: Instant,
    seat: Seat,
    state: State,
}

/// Health of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Running without a fault.
    Well,
    /// Dead, or with a fault.
    Unwell,
}

impl Wellbeing {
    /// A record in which all engines are healthy.
    pub fn new(shape: Shape) -> Self {
        Self {
            shape,
            changes: Vec::new(),
        }
    }

    /// Sets the engine's state from `at` on; `at` is not before the last change.
    pub fn note(&mut self, at: Instant, seat: Seat, state: State) {
        self.changes.push(Change { at, seat, state });
    }

    /// Whether at least one prefill and one decode engine were healthy at every moment from `from` to `to`.
    pub fn had_a_pair(&self, from: Instant, to: Instant) -> bool {
        let before = self.changes.partition_point(|change| change.at <= from);
        let during = self.changes.partition_point(|change| change.at <= to);
        (before..=during).all(|known| self.has_a_pair_after(known))
    }

    /// Whether a healthy pair exists after the first `known` changes.
    fn has_a_pair_after(&self, known: usize) -> bool {
        let some =
            |role, count| (0..count).any(|number| self.is_well(Seat { role, number }, known));
        some(Role::Prefill, self.shape.prefill) && some(Role::Decode, self.shape.decode)
    }

    fn is_well(&self, seat: Seat, known: usize) -> bool {
        let last = self
            .changes
            .iter()
            .take(known)
            .rfind(|change| change.seat == seat);
        last.is_none_or(|change| change.state == State::Well)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn seat(role: Role, number: usize) -> Seat {
        Seat { role, number }
    }

    #[test]
    fn a_pair_is_one_well_engine_of_each_role_all_the_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let shape = Shape {
            prefill: 2,
            decode: 1,
        };
        let mut wellbeing = Wellbeing::new(shape);
        assert!(wellbeing.had_a_pair(at(0), at(1000)));
        wellbeing.note(at(100), seat(Role::Prefill, 0), State::Unwell);
        assert!(wellbeing.had_a_pair(at(0), at(1000)));
        wellbeing.note(at(200), seat(Role::Prefill, 1), State::Unwell);
        wellbeing.note(at(300), seat(Role::Prefill, 0), State::Well);
        wellbeing.note(at(400), seat(Role::Decode, 0), State::Unwell);
        for (from, to, pair) in [
            (0, 199, true),
            (0, 200, false),
            (0, 1000, false),
            (250, 299, false),
            (250, 350, false),
            (300, 399, true),
            (300, 400, false),
            (500, 600, false),
        ] {
            assert_eq!(wellbeing.had_a_pair(at(from), at(to)), pair, "{from} {to}");
        }
    }
}
