//! Owns figures over time: requests grouped by arrival.

use std::time::Duration;

use crate::plot::Points;
use crate::replay::engine::ServedRequest;
use crate::replay::figures::{Spread, hit_rate};

/// Readable interval widths, in seconds.
const WIDTHS: [u64; 13] = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 21_600];

/// Maximum number of intervals, beyond which a line is unreadable.
const MOST: u64 = 60;

/// Time divided into equal intervals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    /// Seconds of each interval.
    pub width: u64,
    /// Number of intervals; at least 1.
    pub count: usize,
}

impl Intervals {
    /// Intervals for a trace of this length.
    pub fn over(lasts: Duration) -> Self {
        let seconds = lasts.as_secs() + 1;
        let fits = WIDTHS
            .into_iter()
            .find(|width| seconds.div_ceil(*width) <= MOST);
        let width = fits.unwrap_or(seconds.div_ceil(MOST));
        Self {
            width,
            count: seconds.div_ceil(width) as usize,
        }
    }

    /// The width in words.
    pub fn width_in_words(self) -> String {
        match self.width {
            60 => "minute".to_owned(),
            width if width % 60 == 0 => format!("{} minutes", width / 60),
            1 => "second".to_owned(),
            width => format!("{width} seconds"),
        }
    }

    /// End of the last interval, in minutes.
    pub fn end(self) -> f64 {
        self.width as f64 * self.count as f64 / 60.0
    }

    /// A value for each interval with arrivals, at its middle in minutes.
    pub fn points(
        self,
        served: &[ServedRequest],
        value: impl Fn(&[&ServedRequest]) -> f64,
    ) -> Points {
        let mut by_interval: Vec<Vec<&ServedRequest>> = vec![Vec::new(); self.count];
        for one in served {
            let at = (one.arrival.as_secs() / self.width) as usize;
            if let Some(interval) = by_interval.get_mut(at) {
                interval.push(one);
            }
        }
        let middle = |at: usize| (at as f64 + 0.5) * self.width as f64 / 60.0;
        let filled = by_interval
            .iter()
            .enumerate()
            .filter(|(_, of)| !of.is_empty());
        filled.map(|(at, of)| (middle(at), value(of))).collect()
    }
}

/// Distribution of the time to the first token, in seconds.
pub fn ttft(of: &[&ServedRequest]) -> Spread {
    Spread::of(of.iter().map(|one| one.ttft.as_secs_f64()))
}

/// The mean wait, in seconds.
pub fn wait(of: &[&ServedRequest]) -> f64 {
    Spread::of(of.iter().map(|one| one.wait.as_secs_f64())).mean
}

/// Milliseconds between two tokens of an answer: the mean over answers with more than one.
pub fn itl(of: &[&ServedRequest]) -> f64 {
    let each = of.iter().filter_map(|one| one.itl);
    Spread::of(each.map(|itl| itl.as_secs_f64() * 1000.0)).mean
}

/// Share of prompt tokens found in a cache, in per cent.
pub fn hits(of: &[&ServedRequest]) -> f64 {
    hit_rate(of.iter().copied()) * 100.0
}

/// Share of requests with a first token within a time: per cent by seconds.
pub fn distribution(served: &[ServedRequest]) -> Points {
    let mut times: Vec<f64> = served.iter().map(|one| one.ttft.as_secs_f64()).collect();
    times.sort_unstable_by(f64::total_cmp);
    let share = |percent: f64| ((times.len() as f64 * percent / 100.0).ceil() as usize).max(1) - 1;
    let steps = (1..=200).map(|step| f64::from(step) / 2.0);
    steps
        .filter_map(|percent| times.get(share(percent)).map(|time| (*time, percent)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(second: u64, ttft_s: u64) -> ServedRequest {
        ServedRequest {
            arrival: Duration::from_secs(second),
            wait: Duration::ZERO,
            ttft: Duration::from_secs(ttft_s),
            itl: Some(Duration::from_millis(20)),
            worker: 0,
            prompt_tokens: 100,
            cached_tokens: 25,
            computed_tokens: 75,
        }
    }

    #[test]
    fn an_hour_is_cut_into_minutes_and_less_into_less() {
        let over = |seconds| Intervals::over(Duration::from_secs(seconds));
        assert_eq!(
            over(3599),
            Intervals {
                width: 60,
                count: 60
            }
        );
        assert_eq!(
            over(3600),
            Intervals {
                width: 120,
                count: 31
            }
        );
        assert_eq!(over(0), Intervals { width: 1, count: 1 });
        assert_eq!(over(59).width_in_words(), "second");
        assert_eq!(over(3599).width_in_words(), "minute");
        assert!(over(100_000_000).count <= 60);
    }

    #[test]
    fn an_interval_without_requests_has_no_point() {
        let all = [served(0, 1), served(1, 3), served(130, 5)];
        let intervals = Intervals {
            width: 60,
            count: 3,
        };
        assert_eq!(
            intervals.points(&all, |of| ttft(of).mean),
            [(0.5, 2.0), (2.5, 5.0)]
        );
        assert_eq!(intervals.points(&all, hits)[0].1, 25.0);
        assert_eq!(intervals.points(&all, itl)[0].1, 20.0);
        let distribution = distribution(&all);
        assert_eq!(distribution.first(), Some(&(1.0, 0.5)));
        assert_eq!(distribution.last(), Some(&(5.0, 100.0)));
    }
}
