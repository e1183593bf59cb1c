//! Owns how long a fleet outlives a source that gives no good answer: stale beats gone, for a stated time.

use std::time::Duration;

/// Maximum silence added by one look: a clock set forward by hours must not end a fleet.
const MOST_AT_ONCE: Duration = Duration::from_secs(60);

/// Health of a source. Needs every poll's result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Staleness {
    /// How long a stale fleet is kept; none: for ever.
    keep: Option<Duration>,
    /// Time of the last good answer, since 1970.
    last_good: Option<Duration>,
    /// Time of the last look.
    looked: Duration,
    /// Time without a good answer.
    silent: Duration,
    failures: u32,
    given_up: bool,
}

impl Staleness {
    /// Polling begins at `now`, since 1970. A fleet known before is kept for `keep_ms` milliseconds; none: for ever.
    pub fn new(keep_ms: Option<u64>, now: Duration) -> Self {
        Self {
            keep: keep_ms.map(Duration::from_millis),
            last_good: None,
            looked: now,
            silent: Duration::ZERO,
            failures: 0,
            given_up: false,
        }
    }

    /// Records a good answer, which may be unchanged.
    pub fn good(&mut self, now: Duration) {
        *self = Self {
            keep: self.keep,
            last_good: Some(now),
            ..Self::new(None, now)
        };
    }

    /// Records a failed poll or a bad answer.
    pub fn failed(&mut self, now: Duration) {
        self.failures = self.failures.saturating_add(1);
        self.look(now);
    }

    /// Whether the fleet expires at `now`; true only once. Call after every failed poll, or more often.
    pub fn gives_up(&mut self, now: Duration) -> bool {
        self.look(now);
        let Some(keep) = self.keep.filter(|_| self.is_stale() && !self.given_up) else {
            return false;
        };
        self.given_up = self.silent >= keep;
        self.given_up
    }

    fn look(&mut self, now: Duration) {
        let since = now.saturating_sub(self.looked).min(MOST_AT_ONCE);
        self.silent = self.silent.saturating_add(since);
        self.looked = now;
    }

    /// Whether the last poll failed: the workers may have changed.
    pub fn is_stale(&self) -> bool {
        self.failures > 0
    }

    /// Whether the fleet has expired, without a good answer since.
    pub fn is_given_up(&self) -> bool {
        self.given_up
    }

    /// Polls that have failed in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Time of the last good answer, since 1970; none: not since this VM began to poll.
    pub fn last_good(&self) -> Option<Duration> {
        self.last_good
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_stale_fleet_is_kept_for_its_time_and_given_up_once() {
        let mut source = Staleness::new(Some(10_000), at(100));
        assert!(!source.is_stale());
        source.good(at(101));
        assert_eq!(source.last_good(), Some(at(101)));
        for second in 102..111 {
            source.failed(at(second));
            assert!(
                source.is_stale() && !source.gives_up(at(second)),
                "{second}"
            );
        }
        source.failed(at(111));
        assert!(source.gives_up(at(111)) && source.is_given_up());
        source.failed(at(112));
        assert!(!source.gives_up(at(112)));
        assert_eq!((source.failures(), source.last_good()), (11, Some(at(101))));
        source.good(at(113));
        assert!(!source.is_stale() && !source.is_given_up());
        // The time to keep the fleet starts anew.
        source.failed(at(122));
        assert!(!source.gives_up(at(122)));
        source.failed(at(123));
        assert!(source.gives_up(at(123)));
    }

    #[test]
    fn one_that_never_answered_is_given_its_time_too() {
        let mut source = Staleness::new(Some(10_000), at(100));
        source.failed(at(109));
        assert!(!source.gives_up(at(109)));
        source.failed(at(110));
        assert!(source.gives_up(at(110)));
        assert_eq!(source.last_good(), None);
    }

    #[test]
    fn for_ever_is_for_ever_and_silence_without_a_failure_is_none() {
        let mut source = Staleness::new(None, at(100));
        source.failed(at(1_000_000));
        assert!(!source.gives_up(at(2_000_000)));
        let mut source = Staleness::new(Some(1_000), at(100));
        assert!(!source.gives_up(at(200)));
    }

    #[test]
    fn a_clock_that_jumps_ends_no_fleet() {
        let mut source = Staleness::new(Some(600_000), at(100));
        source.good(at(100));
        source.failed(at(1_000_000));
        assert!(!source.gives_up(at(1_000_000)));
        source.failed(at(50));
        assert!(!source.gives_up(at(50)));
    }
}
