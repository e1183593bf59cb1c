//! Owns the prefill rate: samples of each worker, the common rate fitted to them, and each worker's slowness against that rate.
//!
//! Reading a prompt takes a fixed time, plus a time for each token. Both are fitted to the samples of all workers of a role
//! together, so that a worker with short prompts is not taken for slow. A worker's slowness is the time of its own prompts
//! against the fit: the median of the last few, so that one slow start or one hiccup makes no worker slow, and an idle fleet
//! of equals shares evenly. The evidence fades: otherwise a worker avoided as slow could never show that it has recovered.

use std::time::Duration;

/// Weight that an observation keeps when the worker's next one comes: about the last ten count.
const MEMORY: f64 = 0.9;

/// Weight of the assumption that a worker is like its peers, in observations.
const BELIEF: f64 = 2.0;

/// Seconds without an observation after which the earlier ones count half as much; after twice as long a third, …
const FADES_IN: f64 = 30.0;

/// Within this ratio a worker counts as equal to its peers: a smaller difference is noise, and would make one worker of an
/// idle fleet the first choice of every request.
const LIKE_OTHERS: f64 = 1.25;

/// Bound on a worker's estimated slowness against its peers, and on the inverse.
const MOST_SLOWNESS: f64 = 4.0;

/// Bound on the estimated overhead of a prompt, in tokens.
const MOST_OVERHEAD_TOKENS: f64 = 2048.0;

/// Number of a worker's last prompts that are kept one by one.
const RECENT: usize = 9;

/// Fewest prompts from which a worker is judged: two outliers cannot be the median of five.
const FEWEST: usize = 5;

/// Idle seconds after which a worker's earlier samples are ignored. A worker avoided as slow is then tried again.
const FORGOTTEN_IN: f64 = 60.0;

/// A worker's last prompts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Recent {
    /// Tokens, and the seconds they took.
    prompts: [(f32, f32); RECENT],
    count: usize,
}

impl Recent {
    fn add(&mut self, tokens: f64, seconds: f64) {
        self.prompts.rotate_right(1);
        let [first, ..] = &mut self.prompts;
        *first = (tokens as f32, seconds as f32);
        self.count = self.count.saturating_add(1);
    }

    /// The prompts that count, the last one first. The very first is left out: the worker was still warming up.
    fn known(&self) -> impl ExactSizeIterator<Item = &(f32, f32)> {
        let known = self.count.saturating_sub(1).min(RECENT);
        self.prompts.iter().take(known)
    }

    /// Median ratio of the time taken to the time at that rate; none with too few prompts.
    fn ratio(&self, rate: &PrefillRate) -> Option<f64> {
        let known = self.known();
        let count = known.len();
        if count < FEWEST {
            return None;
        }
        let ratio = |(tokens, seconds): &(f32, f32)| {
            f64::from(*seconds) / rate.seconds(1.0, f64::from(*tokens))
        };
        let mut ratios = [f64::INFINITY; RECENT];
        for (place, known) in ratios.iter_mut().zip(known) {
            *place = ratio(known);
        }
        middle(&mut ratios, count)
    }
}

/// Median of the least `count` values; of an even number, the mean of the middle two.
pub(crate) fn middle(values: &mut [f64], count: usize) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let (low, high) = (count.checked_sub(1)? / 2, count / 2);
    let two = values.get(low).zip(values.get(high));
    two.map(|(low, high)| f64::midpoint(*low, *high))
}

/// Samples of one worker's prefills, or of several workers'; older ones count less.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RateSamples {
    recent: Recent,
    prompts: f64,
    tokens: f64,
    seconds: f64,
    tokens_squared: f64,
    tokens_seconds: f64,
    /// Time of the last sample, in seconds since 1970.
    last: f64,
}

impl RateSamples {
    /// Adds a prompt of which `tokens` had to be computed, in the time `took`.
    pub fn observe(&mut self, tokens: u64, took: Duration, now: Duration) {
        let (tokens, seconds) = (tokens as f64, took.as_secs_f64());
        let now = now.as_secs_f64();
        let idle = now - self.last;
        let kept = MEMORY / fading(idle);
        let mut recent = match idle < FORGOTTEN_IN {
            true => self.recent,
            false => Recent::default(),
        };
        recent.add(tokens, seconds);
        *self = Self {
            recent,
            prompts: self.prompts * kept + 1.0,
            tokens: self.tokens * kept + tokens,
            seconds: self.seconds * kept + seconds,
            tokens_squared: self.tokens_squared * kept + tokens * tokens,
            tokens_seconds: self.tokens_seconds * kept + tokens * seconds,
            last: now,
        };
    }

    /// Mean computed tokens of a prompt; 0 without samples.
    pub fn mean_tokens(&self) -> f64 {
        match self.prompts > 0.0 {
            true => self.tokens / self.prompts,
            false => 0.0,
        }
    }

    /// Sum of both, without the recent prompts, which cannot be summed.
    pub fn plus(self, other: Self) -> Self {
        Self {
            recent: Recent::default(),
            prompts: self.prompts + other.prompts,
            tokens: self.tokens + other.tokens,
            seconds: self.seconds + other.seconds,
            tokens_squared: self.tokens_squared + other.tokens_squared,
            tokens_seconds: self.tokens_seconds + other.tokens_seconds,
            last: self.last.max(other.last),
        }
    }
}

/// Divisor of an observation's weight after `age` seconds without another.
fn fading(age: f64) -> f64 {
    1.0 + age.max(0.0) / FADES_IN
}

/// Time to read a prompt, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillRate {
    /// Fixed part, for each prompt.
    pub per_prompt: f64,
    /// Part for each token that must be computed.
    pub per_token: f64,
}

impl PrefillRate {
    /// The rate that fits the samples best; none without samples.
    pub fn of(all: &RateSamples) -> Option<Self> {
        if all.seconds <= 0.0 || all.tokens <= 0.0 {
            return None;
        }
        let by_length = Self {
            per_prompt: 0.0,
            per_token: all.seconds / all.tokens,
        };
        let spread = all.prompts * all.tokens_squared - all.tokens * all.tokens;
        if spread <= 1e-6 * all.prompts * all.tokens_squared {
            // All prompts have one length: the fixed part and the part for each token cannot be separated.
            return Some(by_length);
        }
        let together = all.prompts * all.tokens_seconds - all.tokens * all.seconds;
        let per_token = together / spread;
        let per_prompt = (all.seconds - per_token * all.tokens) / all.prompts;
        if per_prompt <= 0.0 {
            return Some(by_length);
        }
        if per_token * MOST_OVERHEAD_TOKENS >= per_prompt {
            return Some(Self {
                per_prompt,
                per_token,
            });
        }
        let mean = (
            all.prompts,
            all.tokens / all.prompts,
            all.seconds / all.prompts,
        );
        let per_prompt = mean.2 / (1.0 + mean.1 / MOST_OVERHEAD_TOKENS);
        Some(Self {
            per_prompt,
            per_token: per_prompt / MOST_OVERHEAD_TOKENS,
        })
    }

    /// The rate of most of these workers: of all but those twice as slow as all together. A worker in trouble would make the
    /// others look quick, those with the most recent samples first. The rate is scaled to the median worker, since a few
    /// very long prefills distort sums.
    pub fn of_most(records: impl Iterator<Item = RateSamples> + Clone) -> Option<Self> {
        let all = Self::of(
            &records
                .clone()
                .fold(RateSamples::default(), RateSamples::plus),
        )?;
        let is_usual =
            |own: &RateSamples| own.seconds <= 2.0 * all.seconds(own.prompts, own.tokens);
        let most = records.clone().filter(is_usual);
        let fit = Self::of(&most.fold(RateSamples::default(), RateSamples::plus)).unwrap_or(all);
        let mut ratios: Vec<f64> = records.filter_map(|own| own.recent.ratio(&fit)).collect();
        let count = ratios.len();
        let typical = middle(&mut ratios, count).filter(|ratio| ratio.is_normal());
        Some(fit.times(typical.unwrap_or(1.0)))
    }

    /// `factor` times slower.
    fn times(self, factor: f64) -> Self {
        Self {
            per_prompt: self.per_prompt * factor,
            per_token: self.per_token * factor,
        }
    }

    /// Seconds that these prompts and tokens take one after the other.
    pub fn seconds(&self, prompts: f64, tokens: f64) -> f64 {
        self.per_prompt * prompts + self.per_token * tokens
    }

    /// Overhead of a prompt beside its tokens, in tokens.
    pub fn overhead_tokens(&self) -> f64 {
        self.per_prompt / self.per_token
    }

    /// How many times slower than this rate a worker is by its own samples, `now` in seconds since 1970; 1 if they are few
    /// or old.
    pub fn slowness(&self, own: &RateSamples, now: f64) -> f64 {
        let is_forgotten = now - own.last >= FORGOTTEN_IN;
        let Some(ratio) = own.recent.ratio(self).filter(|_| !is_forgotten) else {
            return 1.0;
        };
        let belief = BELIEF * fading(now - own.last);
        let evidence = own.prompts / (own.prompts + belief);
        let ratio = ratio.clamp(1.0 / MOST_SLOWNESS, MOST_SLOWNESS);
        let slowness = 1.0 + (ratio - 1.0) * evidence;
        match (1.0 / LIKE_OTHERS..=LIKE_OTHERS).contains(&slowness) {
            true => 1.0,
            false => slowness,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(observed: &[(u64, f64)], now: f64) -> RateSamples {
        let mut record = RateSamples::default();
        for (tokens, seconds) in observed {
            let took = Duration::from_secs_f64(*seconds);
            record.observe(*tokens, took, Duration::from_secs_f64(now));
        }
        record
    }

    fn is(rate: Option<PrefillRate>, per_prompt: f64, per_token: f64) -> bool {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9 + 1e-6 * b.abs();
        rate.is_some_and(|rate| {
            near(rate.per_prompt, per_prompt) && near(rate.per_token, per_token)
        })
    }

    #[test]
    fn both_parts_of_the_time_are_told_apart_where_lengths_differ() {
        let took = |tokens: u64| (tokens, 0.02 + tokens as f64 / 8000.0);
        let all = record(&[took(100), took(8000), took(500), took(64)], 1.0);
        assert!(is(PrefillRate::of(&all), 0.02, 1.0 / 8000.0));
        let same = record(&[(4000, 0.5), (4000, 0.5)], 1.0);
        assert!(is(PrefillRate::of(&same), 0.0, 1.0 / 8000.0));
        assert_eq!(PrefillRate::of(&RateSamples::default()), None);
        assert_eq!(PrefillRate::of(&record(&[(100, 0.0)], 1.0)), None);
    }

    #[test]
    fn time_that_does_not_grow_with_length_is_the_prompts_own() {
        let all = record(&[(100, 0.03), (900, 0.03), (500, 0.03)], 1.0);
        let rate = PrefillRate::of(&all).unwrap();
        assert!((rate.overhead_tokens() - MOST_OVERHEAD_TOKENS).abs() < 1e-6);
        let mean = all.tokens / all.prompts;
        assert!((rate.seconds(1.0, mean) - 0.03).abs() < 1e-9);
        // Longer prompts took less time: fitted by length alone.
        let odd = record(&[(100, 0.0), (8000, 4.0), (4000, 0.1)], 1.0);
        assert_eq!(PrefillRate::of(&odd).unwrap().per_prompt, 0.0);
    }

    #[test]
    fn a_worker_is_slow_by_its_own_prompts_and_the_more_the_surer() {
        let rate = PrefillRate {
            per_prompt: 0.02,
            per_token: 1.0 / 8000.0,
        };
        let like = record(&[(64, 0.028), (100, 0.0325)].repeat(3), 10.0);
        assert_eq!(rate.slowness(&like, 10.0), 1.0);
        let some = record(&[(8000, 2.04); 6], 10.0);
        let often = record(&[(8000, 2.04); 20], 10.0);
        let (some, often) = (rate.slowness(&some, 10.0), rate.slowness(&often, 10.0));
        assert!(1.25 < some && some < often && often < 2.0, "{some} {often}");
    }

    #[test]
    fn a_slow_start_or_a_hiccup_makes_nobody_slow() {
        let rate = PrefillRate {
            per_prompt: 0.02,
            per_token: 1.0 / 8000.0,
        };
        let usual = (8000, 1.02);
        let odd = (8000, 60.0);
        for observed in [
            &[][..],
            &[odd; 5],
            &[odd, odd, odd, usual, usual, usual],
            &[usual, usual, odd, usual, odd, usual],
        ] {
            let own = record(observed, 10.0);
            assert_eq!(rate.slowness(&own, 10.0), 1.0, "{observed:?}");
        }
        // Nor does a slow start make all workers look slow, and so one of them quick.
        let started = record(&[odd, odd, usual, usual, usual, usual], 10.0);
        let other = record(&[usual; 9], 10.0);
        let of_both = PrefillRate::of_most([started, other].into_iter()).unwrap();
        for own in [started, other] {
            assert_eq!(of_both.slowness(&own, 10.0), 1.0);
        }
    }

    #[test]
    fn one_who_had_trouble_does_not_make_the_others_look_quick() {
        let usual = record(&[(4000, 0.5); 6], 10.0);
        let trouble = record(&[(4000, 10.0); 6], 10.0);
        let rate = PrefillRate::of_most([usual, usual, trouble, usual].into_iter());
        assert!(is(rate, 0.0, 1.0 / 8000.0), "{rate:?}");
        let two = PrefillRate::of_most([usual, trouble].into_iter()).unwrap();
        assert!(two.slowness(&trouble, 10.0) > two.slowness(&usual, 10.0));
        assert_eq!(PrefillRate::of_most([].into_iter()), None);
    }

    #[test]
    fn what_is_long_ago_says_nothing_and_no_one_is_slow_beyond_measure() {
        let rate = PrefillRate {
            per_prompt: 0.0,
            per_token: 1.0 / 8000.0,
        };
        let dreadful = record(&[(8000, 500.0); 20], 10.0);
        assert!(rate.slowness(&dreadful, 10.0) <= MOST_SLOWNESS);
        assert_eq!(rate.slowness(&dreadful, 10.0 + 3600.0), 1.0);
        let splendid = record(&[(8000, 1e-6); 20], 10.0);
        assert!(rate.slowness(&splendid, 10.0) >= 1.0 / MOST_SLOWNESS);
    }
}
