//! Owns the time measurement of the benchmarks.

use std::time::Duration;

use cpu_time::ThreadTime;
use criterion::Criterion;

/// CPU time of this thread: other work on the machine delays it, but does not count.
pub fn timed(work: impl FnOnce()) -> Duration {
    let start = ThreadTime::now();
    work();
    start.elapsed()
}

/// Long enough to average over a busy machine, short enough for a hundred benchmarks.
pub fn times() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
}
