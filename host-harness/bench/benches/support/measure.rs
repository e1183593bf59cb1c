//! Owns how a benchmark measures.

use std::time::Duration;

use cpu_time::ThreadTime;
use criterion::Criterion;

/// The time that this thread was on a CPU: what else the machine does is waited for, but not counted.
pub fn timed(work: impl FnOnce()) -> Duration {
    let start = ThreadTime::now();
    work();
    start.elapsed()
}

/// Long enough that a busy machine is averaged over, short enough for a hundred benchmarks.
pub fn times() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
}
