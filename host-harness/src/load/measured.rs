//! Owns what is known of a load afterwards.

use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use super::line::Reply;

/// What is measured: answers that end in it.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// From then on.
    pub begins: Instant,
    /// Until then.
    pub ends: Instant,
}

/// What came of one request.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// From when it was due to the first piece of its answer.
    pub begun_after: Duration,
    /// From when it was due to its end.
    pub took: Duration,
    /// When it ended.
    pub ended: Instant,
    /// Whether with 200 and a whole answer.
    pub is_good: bool,
}

impl Sample {
    /// Of a request that was due then; none: it had no answer.
    pub fn of(due: Instant, reply: Option<Reply>) -> Self {
        let now = Instant::now();
        let (begun, ended) = reply.map_or((now, now), |reply| (reply.begun, reply.ended));
        Self {
            begun_after: begun.saturating_duration_since(due),
            took: ended.saturating_duration_since(due),
            ended,
            is_good: reply.is_some_and(|reply| reply.is_good),
        }
    }
}

/// Percentiles in milliseconds; each is a value that occurred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// The smallest value that at least half of all do not exceed.
    pub p50: f64,
    /// Nine tenths.
    pub p90: f64,
    /// 99 in a hundred.
    pub p99: f64,
}

impl Percentiles {
    /// Of some times.
    pub fn of(times: impl Iterator<Item = Duration>) -> Self {
        let mut times: Vec<Duration> = times.collect();
        times.sort_unstable();
        let at = |percent: usize| {
            let rank = (times.len() * percent).div_ceil(100).max(1);
            let time = times.get(rank - 1).copied().unwrap_or_default();
            time.as_secs_f64() * 1000.0
        };
        Self {
            p50: at(50),
            p90: at(90),
            p99: at(99),
        }
    }
}

/// What a load came to, in its window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// Requests that ended.
    pub requests: usize,
    /// Those with 200 and a whole answer.
    pub good: usize,
    /// Good answers per second.
    pub rps: f64,
    /// Times to the end of good answers.
    pub latency_ms: Percentiles,
    /// Times to the first piece of good answers.
    pub ttft_ms: Percentiles,
}

impl Measured {
    /// What ended in the window.
    pub fn of(samples: Vec<Sample>, window: Window) -> Self {
        let inside = |sample: &&Sample| sample.ended >= window.begins && sample.ended < window.ends;
        let requests = samples.iter().filter(inside).count();
        let good: Vec<Sample> = samples
            .iter()
            .filter(inside)
            .filter(|sample| sample.is_good)
            .copied()
            .collect();
        let lasted = (window.ends - window.begins).as_secs_f64();
        Self {
            requests,
            good: good.len(),
            rps: match lasted {
                0.0 => 0.0,
                lasted => good.len() as f64 / lasted,
            },
            latency_ms: Percentiles::of(good.iter().map(|sample| sample.took)),
            ttft_ms: Percentiles::of(good.iter().map(|sample| sample.begun_after)),
        }
    }

    /// Good ones, of all; 1 where there were none.
    pub fn success_rate(&self) -> f64 {
        match self.requests {
            0 => 1.0,
            all => self.good as f64 / all as f64,
        }
    }
}
