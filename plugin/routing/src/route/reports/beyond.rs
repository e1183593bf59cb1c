//! Owns the external load of engines, and the estimate for engines that do not report.
//!
//! An engine that does not report is not idle. Without any report, the estimate is the median of its peers; after a stale
//! report, the greater of that and the report, until the report is too old to mean anything.

use std::time::Duration;

use hashbrown::HashMap;

use crate::fleet::{Fleet, Role, Worker, WorkerId};
use crate::load::{ExternalLoad, middle};

/// Figures: requests, prompt tokens that wait, KV blocks in use.
const FIGURES: usize = 3;

/// One figure of a worker, over all its ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Reading {
    value: f64,
    at: Duration,
}

/// How long a figure counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct FigureLimits {
    /// Age from which a figure is no longer current.
    pub(super) stale_after: Duration,
    /// Age from which a figure means nothing.
    pub(super) forgotten_after: Duration,
}

/// The external load of a worker's engine: each figure as last reported.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Beyond([Option<Reading>; FIGURES]);

impl Beyond {
    /// The figures reported at one time; none: not reported.
    pub(super) fn reported(
        at: Duration,
        requests: Option<u32>,
        queued_tokens: Option<f64>,
        decode_blocks: Option<f64>,
    ) -> Self {
        let reported = |value| Reading { value, at };
        Self([requests.map(f64::from), queued_tokens, decode_blocks].map(|it| it.map(reported)))
    }

    /// Fills missing figures from an earlier report.
    pub(super) fn after(self, earlier: Self) -> Self {
        let [requests, queued, blocks] = self.0;
        let [requests_before, queued_before, blocks_before] = earlier.0;
        Self([
            requests.or(requests_before),
            queued.or(queued_before),
            blocks.or(blocks_before),
        ])
    }

    /// The first time after `now` when a figure of it counts for less.
    fn next_change(&self, now: Duration, limits: FigureLimits) -> Option<Duration> {
        let times = self.0.iter().flatten().flat_map(|reading| {
            [limits.stale_after, limits.forgotten_after]
                .map(|limit| reading.at.saturating_add(limit))
        });
        times.filter(|time| *time > now).min()
    }
}

/// The key of workers with comparable load: role, namespace and model.
type Peers<'w> = (Role, &'w str, Option<&'w str>);

fn peers(worker: &Worker) -> Peers<'_> {
    (worker.role, &worker.namespace, worker.model.as_deref())
}

fn ranks(worker: &Worker) -> f64 {
    f64::from(worker.dp_size.max(1))
}

/// The median; 0 of none.
fn median(mut values: Vec<f64>) -> f64 {
    let count = values.len();
    middle(&mut values, count).unwrap_or(0.0)
}

/// The estimates for all workers of a fleet at `now`, and when they next change by themselves.
pub(super) struct Beliefs<'w> {
    now: Duration,
    limits: FigureLimits,
    /// Medians for one rank.
    medians: HashMap<Peers<'w>, [f64; FIGURES]>,
    pub(super) next_change: Option<Duration>,
}

impl<'w> Beliefs<'w> {
    pub(super) fn new(
        fleet: &'w Fleet,
        reported: impl Fn(WorkerId) -> Option<Beyond>,
        now: Duration,
        limits: FigureLimits,
    ) -> Self {
        let mut known: HashMap<Peers<'w>, [Vec<f64>; FIGURES]> = HashMap::new();
        let mut next_change: Option<Duration> = None;
        for worker in fleet.workers() {
            let Some(beyond) = reported(worker.id) else {
                continue;
            };
            let change = beyond.next_change(now, limits);
            next_change = next_change.into_iter().chain(change).min();
            let of_peers = known.entry(peers(worker)).or_default();
            for (values, reading) in of_peers.iter_mut().zip(beyond.0) {
                let fresh =
                    reading.filter(|reading| is_within(reading.at, limits.stale_after, now));
                values.extend(fresh.map(|reading| reading.value / ranks(worker)));
            }
        }
        let medians = known.into_iter();
        Self {
            now,
            limits,
            medians: medians
                .map(|(peers, values)| (peers, values.map(median)))
                .collect(),
            next_change,
        }
    }

    /// The estimate for one worker, over all its ranks.
    pub(super) fn of(&self, worker: &'w Worker, beyond: Option<Beyond>) -> ExternalLoad {
        let medians = self.medians.get(&peers(worker)).copied();
        let medians = medians.unwrap_or_default();
        let Beyond(readings) = beyond.unwrap_or_default();
        let believed = |(reading, median): (Option<Reading>, f64)| {
            let median = median * ranks(worker);
            match reading {
                Some(reading) if is_within(reading.at, self.limits.stale_after, self.now) => {
                    reading.value
                }
                Some(reading) if is_within(reading.at, self.limits.forgotten_after, self.now) => {
                    reading.value.max(median)
                }
                _ => median,
            }
        };
        let [requests, queued, blocks] = readings;
        let [of_requests, of_queued, of_blocks] = medians;
        ExternalLoad {
            requests: believed((requests, of_requests)).ceil() as u32,
            queued_tokens: believed((queued, of_queued)),
            decode_blocks: believed((blocks, of_blocks)),
        }
    }
}

fn is_within(at: Duration, limit: Duration, now: Duration) -> bool {
    at.saturating_add(limit) > now
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_one_or_between_the_two() {
        assert_eq!(median(vec![]), 0.0);
        assert_eq!(median(vec![3.0]), 3.0);
        assert_eq!(median(vec![9.0, 1.0]), 5.0);
        assert_eq!(median(vec![60.0, 2.0, 4.0]), 4.0);
    }

    #[test]
    fn each_figure_is_as_it_was_told_last() {
        let at = Duration::from_secs;
        let first = Beyond::reported(at(1), Some(3), Some(5.0), None);
        let Beyond([requests, queued, blocks]) =
            Beyond::reported(at(2), Some(4), None, None).after(first);
        let reading = |value, s| Some(Reading { value, at: at(s) });
        assert_eq!(
            (requests, queued, blocks),
            (reading(4.0, 2), reading(5.0, 1), None)
        );
    }
}
