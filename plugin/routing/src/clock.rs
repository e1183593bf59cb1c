//! Owns the gateway's clock: how much time passes, whatever the host's clock is set to.
//!
//! A host reads its wall clock, which people and services set forward and back. Deadlines, ejections, leases and ages are
//! durations, so they are measured here: the sum of the host clock's steps forward, plus one tick for each step back. A
//! time of this clock is therefore meaningful only to readers of the same clock.

use std::time::Duration;

/// Length that a step back counts as: about the time from one reading to the next.
const TICK: Duration = Duration::from_millis(25);

/// A clock that never goes back. It starts at the first reading of the host.
#[derive(Debug, Clone, Copy, Default)]
pub struct Clock {
    /// Last reading of the host; none: not read yet, or the host has no time.
    host: Option<Duration>,
    now: Duration,
}

impl Clock {
    /// Advances to the host's reading, which is the time since 1970, and returns this clock's time. A reading of 0 means
    /// that the host has no time: no time passes.
    pub fn read(&mut self, host: Duration) -> Duration {
        if host.is_zero() {
            return self.now;
        }
        let step = match self.host.replace(host) {
            None => host,
            Some(before) => host.checked_sub(before).unwrap_or(TICK),
        };
        self.now = self.now.saturating_add(step);
        self.now
    }

    /// Converts a time of this clock to the host's wall clock, as set now: for people to read.
    pub fn on_the_wall(&self, time: Duration) -> Duration {
        let ahead = self.now.saturating_sub(self.host.unwrap_or(self.now));
        time.saturating_sub(ahead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    #[test]
    fn found_w8_a_step_back_is_one_tick_and_time_goes_on_from_there() {
        let mut clock = Clock::default();
        assert_eq!(clock.read(at(1_000)), at(1_000));
        assert_eq!(clock.read(at(1_010)), at(1_010));
        assert_eq!(clock.read(at(980)), at(1_010) + TICK);
        assert_eq!(clock.read(at(985)), at(1_015) + TICK);
        assert_eq!(clock.on_the_wall(at(1_013) + TICK), at(983));
    }

    #[test]
    fn a_host_that_cannot_tell_the_time_moves_nothing() {
        let mut clock = Clock::default();
        assert_eq!(clock.read(Duration::ZERO), Duration::ZERO);
        assert_eq!(clock.read(at(1_000)), at(1_000));
        assert_eq!(clock.read(Duration::ZERO), at(1_000));
        assert_eq!(clock.read(at(1_001)), at(1_001));
        assert_eq!(clock.on_the_wall(at(7)), at(7));
    }

    proptest! {
        #[test]
        fn it_is_the_sum_of_the_steps_forward(steps in proptest::collection::vec(-5_000i64..5_000, 0..200)) {
            let mut clock = Clock::default();
            let mut host: i64 = 10_000_000;
            let mut expected = clock.read(Duration::from_millis(host as u64));
            for step in steps {
                host += step;
                expected += match u64::try_from(step) {
                    Ok(forward) => Duration::from_millis(forward),
                    Err(_) => TICK,
                };
                prop_assert_eq!(clock.read(Duration::from_millis(host as u64)), expected);
            }
        }
    }
}
