//! Owns the record of which engine was healthy at which time. Pure: the clock is an argument.

use std::time::Instant;

use routing::fleet::Role;

use super::scenario::{EngineId, FleetSize};

/// Which engines were healthy at which time; all are at the beginning.
#[derive(Debug)]
pub struct HealthRecord {
    size: FleetSize,
    /// In order of time.
    changes: Vec<Change>,
}

#[derive(Clone, Copy, Debug)]
struct Change {
    at: Instant,
    id: EngineId,
    state: EngineHealth,
}

/// Health of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineHealth {
    /// Running without a fault.
    Healthy,
    /// Dead, or with a fault.
    Faulty,
}

impl HealthRecord {
    /// A record in which all engines are healthy.
    pub fn new(size: FleetSize) -> Self {
        Self {
            size,
            changes: Vec::new(),
        }
    }

    /// Sets the engine's state from `at` on; `at` is not before the last change.
    pub fn record(&mut self, at: Instant, id: EngineId, state: EngineHealth) {
        self.changes.push(Change { at, id, state });
    }

    /// Whether at least one prefill and one decode engine were healthy at every moment from `from` to `to`.
    pub fn had_a_pair(&self, from: Instant, to: Instant) -> bool {
        let before = self.changes.partition_point(|change| change.at <= from);
        let during = self.changes.partition_point(|change| change.at <= to);
        (before..=during).all(|known| self.has_a_pair_after(known))
    }

    /// Whether a healthy pair exists after the first `known` changes.
    fn has_a_pair_after(&self, known: usize) -> bool {
        let some = |role, count| {
            (0..count).any(|number| self.is_healthy(EngineId { role, number }, known))
        };
        some(Role::Prefill, self.size.prefill) && some(Role::Decode, self.size.decode)
    }

    fn is_healthy(&self, id: EngineId, known: usize) -> bool {
        let last = self
            .changes
            .iter()
            .take(known)
            .rfind(|change| change.id == id);
        last.is_none_or(|change| change.state == EngineHealth::Healthy)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn id(role: Role, number: usize) -> EngineId {
        EngineId { role, number }
    }

    #[test]
    fn a_pair_is_one_well_engine_of_each_role_all_the_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let size = FleetSize {
            prefill: 2,
            decode: 1,
        };
        let mut health = HealthRecord::new(size);
        assert!(health.had_a_pair(at(0), at(1000)));
        health.record(at(100), id(Role::Prefill, 0), EngineHealth::Faulty);
        assert!(health.had_a_pair(at(0), at(1000)));
        health.record(at(200), id(Role::Prefill, 1), EngineHealth::Faulty);
        health.record(at(300), id(Role::Prefill, 0), EngineHealth::Healthy);
        health.record(at(400), id(Role::Decode, 0), EngineHealth::Faulty);
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
            assert_eq!(health.had_a_pair(at(from), at(to)), pair, "{from} {to}");
        }
    }
}
