//! Owns the clock of one VM, and its last reading.

use std::cell::Cell;
use std::time::Duration;

use routing::clock::Clock;

use crate::host;

/// The clock that all durations are measured by, valid in one VM alone.
#[derive(Default)]
pub struct VmClock {
    clock: Cell<Clock>,
    last: Cell<Duration>,
}

impl VmClock {
    /// Reads the clock.
    pub fn read(&self) -> Duration {
        let mut clock = self.clock.get();
        let now = clock.read(Duration::from_nanos(host::now_ns()));
        self.clock.set(clock);
        now
    }

    /// Reads the clock, and keeps the reading.
    pub fn keep(&self) -> Duration {
        self.last.set(self.read());
        self.last.get()
    }

    /// The last reading that was kept: of this callback or, without one in it, of the last round, a tenth of a second ago at
    /// most.
    pub fn last(&self) -> Duration {
        self.last.get()
    }

    /// A time by the host's wall clock, for people to read.
    pub fn on_the_wall(&self, time: Duration) -> Duration {
        self.clock.get().on_the_wall(time)
    }
}
