//! Owns the figures of a run: distributions and rates of many requests.

use serde::Serialize;

use super::engine::{ReplayOutcome, ServedRequest};

/// A distribution in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spread {
    /// The arithmetic mean.
    pub mean: f64,
    /// The smallest value that at least half of all do not exceed; `p90` and `p99` likewise.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
}

/// Result of one policy: of one run, or the mean of several.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PolicyFigures {
    /// Requests served.
    pub requests: f64,
    /// Requests that the router refused.
    pub refused: f64,
    /// Share of prompt tokens found in a cache.
    pub prefix_hit_rate: f64,
    /// Time from arrival to the first token.
    pub ttft_ms: Spread,
    /// Time from arrival to the start of prefill.
    pub wait_ms: Spread,
    /// Time between two tokens of an answer.
    pub itl_ms: Spread,
    /// Tokens computed by the busiest prefill worker, divided by the mean of all.
    pub imbalance: f64,
    /// Requests per second of wall-clock time spent in the router's calls.
    pub decisions_per_second: f64,
}

impl Spread {
    /// Distribution of values that all count once.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        Self::of_weighted(values.map(|value| (value, 1)).collect())
    }

    /// Distribution of values with a count each.
    pub fn of_weighted(mut values: Vec<(f64, u64)>) -> Self {
        let count: u64 = values.iter().map(|(_, times)| times).sum();
        if count == 0 {
            return Self::default();
        }
        values.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
        let sum: f64 = values
            .iter()
            .map(|(value, times)| value * *times as f64)
            .sum();
        Self {
            mean: sum / count as f64,
            p50: percentile(&values, count, 50),
            p90: percentile(&values, count, 90),
            p99: percentile(&values, count, 99),
        }
    }
}

/// The smallest of the sorted values that at least `percent` of all do not exceed.
fn percentile(sorted: &[(f64, u64)], count: u64, percent: u64) -> f64 {
    let rank = (count * percent).div_ceil(100).max(1);
    let mut seen = 0;
    for (value, times) in sorted {
        seen += times;
        if seen >= rank {
            return *value;
        }
    }
    0.0
}

impl PolicyFigures {
    /// Figures of one run with this many prefill workers.
    pub fn of(outcome: &ReplayOutcome, prefill_workers: usize) -> Self {
        let served = &outcome.served;
        let ms = |what: fn(&ServedRequest) -> std::time::Duration| {
            Spread::of(served.iter().map(|one| what(one).as_secs_f64() * 1000.0))
        };
        Self {
            requests: served.len() as f64,
            refused: outcome.refused as f64,
            prefix_hit_rate: hit_rate(served),
            ttft_ms: ms(|one| one.ttft),
            wait_ms: ms(|one| one.wait),
            itl_ms: Spread::of_weighted(outcome.gaps.clone()),
            imbalance: imbalance(served, prefill_workers),
            decisions_per_second: per_second(served.len(), outcome.decided_in.as_secs_f64()),
        }
    }

    /// The mean of each figure over several runs.
    pub fn mean(of: &[Self]) -> Self {
        let mean =
            |what: &dyn Fn(&Self) -> f64| of.iter().map(what).sum::<f64>() / of.len().max(1) as f64;
        let spread = |what: &dyn Fn(&Self) -> Spread| Spread {
            mean: mean(&|one| what(one).mean),
            p50: mean(&|one| what(one).p50),
            p90: mean(&|one| what(one).p90),
            p99: mean(&|one| what(one).p99),
        };
        Self {
            requests: mean(&|one| one.requests),
            refused: mean(&|one| one.refused),
            prefix_hit_rate: mean(&|one| one.prefix_hit_rate),
            ttft_ms: spread(&|one| one.ttft_ms),
            wait_ms: spread(&|one| one.wait_ms),
            itl_ms: spread(&|one| one.itl_ms),
            imbalance: mean(&|one| one.imbalance),
            decisions_per_second: mean(&|one| one.decisions_per_second),
        }
    }
}

/// Share of prompt tokens found in a cache; 0 without prompt tokens.
pub fn hit_rate<'a>(served: impl IntoIterator<Item = &'a ServedRequest>) -> f64 {
    let (mut cached, mut all) = (0, 0);
    for one in served {
        cached += one.cached_tokens;
        all += one.prompt_tokens;
    }
    cached as f64 / all.max(1) as f64
}

/// Tokens computed by each prefill worker.
pub fn work<'a>(
    served: impl IntoIterator<Item = &'a ServedRequest>,
    prefill_workers: usize,
) -> Vec<u64> {
    let mut work = vec![0; prefill_workers];
    for one in served {
        // A prompt computed by the decode worker is not a prefill worker's work.
        if let Some(tokens) = work.get_mut(one.worker) {
            *tokens += one.computed_tokens;
        }
    }
    work
}

/// Tokens computed by the busiest prefill worker, divided by the mean of all; 1 if no token is computed.
pub fn imbalance<'a>(
    served: impl IntoIterator<Item = &'a ServedRequest>,
    prefill_workers: usize,
) -> f64 {
    let work = work(served, prefill_workers);
    let most = work.iter().max().copied().unwrap_or_default();
    let all: u64 = work.iter().sum();
    if all == 0 {
        return 1.0;
    }
    most as f64 * work.len() as f64 / all as f64
}

fn per_second(count: usize, seconds: f64) -> f64 {
    if seconds > 0.0 {
        count as f64 / seconds
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let spread = Spread::of((1..=200).rev().map(f64::from));
        assert_eq!((spread.p50, spread.p90, spread.p99), (100.0, 180.0, 198.0));
        assert_eq!(spread.mean, 100.5);
        let few = Spread::of([3.0, 1.0, 2.0].into_iter());
        assert_eq!((few.p50, few.p90, few.p99), (2.0, 3.0, 3.0));
        assert_eq!(Spread::of([7.0].into_iter()).p50, 7.0);
        assert_eq!(Spread::of([].into_iter()), Spread::default());
    }

    #[test]
    fn a_weight_is_so_many_equal_values() {
        let spread = Spread::of_weighted(vec![(5.0, 1), (1.0, 98), (9.0, 1)]);
        assert_eq!((spread.p50, spread.p90, spread.p99), (1.0, 1.0, 5.0));
        assert_eq!(spread.mean, 1.12);
    }

    #[test]
    fn rates_and_imbalance_follow_their_definitions() {
        let one = |worker, prompt_tokens, cached_tokens| ServedRequest {
            arrival: Duration::ZERO,
            wait: Duration::from_secs(1),
            ttft: Duration::from_secs(2),
            itl: None,
            worker,
            prompt_tokens,
            cached_tokens,
            computed_tokens: prompt_tokens - cached_tokens,
        };
        let outcome = ReplayOutcome {
            served: vec![
                one(0, 1000, 0),
                one(1, 2000, 1000),
                one(1, 1000, 0),
                one(9, 500, 0),
            ],
            decided_in: Duration::from_millis(2),
            ..ReplayOutcome::default()
        };
        let figures = PolicyFigures::of(&outcome, 2);
        assert_eq!(figures.prefix_hit_rate, 1000.0 / 4500.0);
        assert_eq!(figures.imbalance, 2000.0 / 1500.0);
        assert_eq!(
            (figures.wait_ms.mean, figures.ttft_ms.p99),
            (1000.0, 2000.0)
        );
        assert_eq!(figures.decisions_per_second, 2000.0);
        let idle = PolicyFigures::of(&ReplayOutcome::default(), 2);
        assert_eq!((idle.prefix_hit_rate, idle.imbalance), (0.0, 1.0));
        let mean = PolicyFigures::mean(&[figures, idle]);
        assert_eq!((mean.requests, mean.ttft_ms.mean), (2.0, 1000.0));
    }
}
