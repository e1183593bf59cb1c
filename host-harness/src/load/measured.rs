//! Owns what is known of a load afterwards.

use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, timeout_at};

use super::line::{LineError, Reply};

/// What is measured: answers that end in it.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// From then on.
    pub begins: Instant,
    /// Until then.
    pub ends: Instant,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// With 200 and a whole answer.
    Good,
    /// With another answer, or none.
    Bad,
    /// Not: nobody waits for ever.
    GivenUp,
}

/// What came of one request.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// From when it was due to the first piece of its answer.
    begun_after: Duration,
    /// From when it was due to its end.
    took: Duration,
    /// When it ended.
    ended: Instant,
    end: End,
}

impl Sample {
    /// Of a request that was due then, and whose answer is waited for no longer than until `limit`.
    pub async fn of(
        answer: impl Future<Output = Result<Reply, LineError>>,
        due: Instant,
        limit: Instant,
    ) -> Self {
        let (reply, end) = match timeout_at(limit, answer).await {
            Ok(Ok(reply)) if reply.is_good => (Some(reply), End::Good),
            Ok(reply) => (reply.ok(), End::Bad),
            Err(_) => (None, End::GivenUp),
        };
        let now = Instant::now();
        let (begun, ended) = reply.map_or((now, now), |reply| (reply.begun, reply.ended));
        Self {
            begun_after: begun.saturating_duration_since(due),
            took: ended.saturating_duration_since(due),
            ended,
            end,
        }
    }

    /// Whether it was answered with 200, and whole.
    pub fn is_good(&self) -> bool {
        self.end == End::Good
    }

    /// Whether it is among what is measured. What was given up is, though it ended too late: or who answers nothing would seem
    /// never to have been asked.
    fn counts(&self, window: Window) -> bool {
        let ended_inside = self.ended >= window.begins && self.ended < window.ends;
        ended_inside || self.end == End::GivenUp
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
    /// Requests sent, those before and after the window included.
    pub sent: usize,
    /// Requests that ended, or never did.
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
        let inside = |sample: &&Sample| sample.counts(window);
        let requests = samples.iter().filter(inside).count();
        let good: Vec<Sample> = samples
            .iter()
            .filter(inside)
            .filter(|sample| sample.is_good())
            .copied()
            .collect();
        let lasted = (window.ends - window.begins).as_secs_f64();
        Self {
            sent: samples.len(),
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
