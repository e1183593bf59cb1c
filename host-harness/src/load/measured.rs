//! Owns the results of a load.

use std::time::Duration;

use pd_harness_common::connection::Failure;
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

use super::connection::Reply;
use crate::replay::Spread;

/// The measured window: answers that end in it count.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Start of the window.
    pub begins: Instant,
    /// End of the window.
    pub ends: Instant,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// With 200 and a complete answer.
    Good,
    /// With another answer, or none.
    Bad,
    /// Without an end within the limit.
    GivenUp,
}

/// Outcome of one request.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Time from its due time to the first piece of its answer.
    begun_after: Duration,
    /// Time from its due time to its end.
    took: Duration,
    /// Its end.
    ended: Instant,
    end: End,
}

impl Sample {
    /// The outcome of a request with this due time, whose answer is awaited until `limit` at most.
    pub async fn of(
        answer: impl Future<Output = Result<Reply, Failure>>,
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

    /// Whether the answer was 200, and complete.
    pub fn is_good(&self) -> bool {
        self.end == End::Good
    }

    /// Whether the request counts. An abandoned request does, although it ended too late: otherwise a server that never answers
    /// would appear to have had no requests.
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
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Percentiles {
    /// Percentiles of these times.
    pub fn of(times: impl Iterator<Item = Duration>) -> Self {
        let Spread { p50, p90, p99, .. } =
            Spread::of(times.map(|time| time.as_secs_f64() * 1000.0));
        Self { p50, p90, p99 }
    }
}

/// Results of a load in its window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// Requests sent, including those before and after the window.
    pub sent: usize,
    /// Requests that ended in the window, or never.
    pub requests: usize,
    /// Requests with 200 and a complete answer.
    pub good: usize,
    /// Good answers per second.
    pub rps: f64,
    /// Times to the end of good answers.
    pub latency_ms: Percentiles,
    /// Times to the first piece of good answers.
    pub ttft_ms: Percentiles,
}

impl Measured {
    /// Results of the requests that ended in the window.
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

    /// Share of good requests; 1 without requests.
    pub fn success_rate(&self) -> f64 {
        match self.requests {
            0 => 1.0,
            all => self.good as f64 / all as f64,
        }
    }
}
