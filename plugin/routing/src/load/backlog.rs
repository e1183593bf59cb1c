//! Owns the prefill backlog of one worker rank: the work left now, and the samples of its prefill rate.
//!
//! Model: a worker reads one prompt after the other, in the order sent. The oldest prompt is assumed to shrink at the observed
//! prefill rate, never below zero and never beyond its own size: any error of the estimate ends with the next first token.
//! Engines that read several prompts at once finish them in any order; the prefill rate, being work over time, is not affected.

use std::collections::VecDeque;
use std::time::Duration;

use super::rate::{PrefillRate, RateSamples};

/// Identifies a prompt in its backlog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Waiting {
    tokens: u64,
    since: Duration,
    is_over: bool,
}

/// The prompts waiting on one worker rank.
#[derive(Debug, Default)]
pub struct Backlog {
    queue: VecDeque<Waiting>,
    /// Ticket number of the oldest prompt in the queue.
    first: u64,
    tokens: u64,
    prompts: u64,
    /// Estimated start of reading the oldest prompt.
    head_since: Duration,
    /// End of the observed work.
    observed_until: Duration,
    record: RateSamples,
}

impl Backlog {
    /// An empty successor, in which no ticket of this backlog is valid.
    pub fn successor(&self) -> Self {
        Self {
            first: self.first.wrapping_add(self.queue.len() as u64),
            ..Self::default()
        }
    }

    /// Booked tokens of unfinished prompts.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Unfinished prompts.
    pub fn prompts(&self) -> u64 {
        self.prompts
    }

    /// Adds a prompt that was sent, of which `tokens` must be computed.
    pub fn push(&mut self, tokens: u64, now: Duration) -> Ticket {
        if self.prompts == 0 {
            self.head_since = now;
            self.observed_until = now;
        }
        let ticket = Ticket(self.first.wrapping_add(self.queue.len() as u64));
        self.queue.push_back(Waiting {
            tokens,
            since: now,
            is_over: false,
        });
        self.tokens = self.tokens.saturating_add(tokens);
        self.prompts = self.prompts.saturating_add(1);
        ticket
    }

    /// Records the first token of a prompt. A finished prompt stays finished.
    pub fn finish(&mut self, ticket: Ticket, now: Duration) {
        if let Some(tokens) = self.end(ticket, now) {
            let took = now.saturating_sub(self.observed_until);
            self.record.observe(tokens, took, now);
            self.observed_until = now;
        }
    }

    /// Ends a prompt that will have no first token, or none that measures the worker's prefill rate.
    pub fn cancel(&mut self, ticket: Ticket, now: Duration) {
        if self.end(ticket, now).is_some() {
            self.observed_until = now;
        }
    }

    /// Drops prompts sent before `then`.
    pub fn expire(&mut self, then: Duration, now: Duration) {
        let before = |entry: &&Waiting| entry.since < then;
        let expired = self.queue.iter().take_while(before).count() as u64;
        let first = self.first;
        for ticket in (0..expired).map(|index| Ticket(first.wrapping_add(index))) {
            self.cancel(ticket, now);
        }
    }

    /// Finishes a prompt; returns its tokens unless it was finished already.
    fn end(&mut self, ticket: Ticket, now: Duration) -> Option<u64> {
        let index = usize::try_from(ticket.0.wrapping_sub(self.first)).ok()?;
        let waiting = self.queue.get_mut(index).filter(|entry| !entry.is_over)?;
        waiting.is_over = true;
        let tokens = waiting.tokens;
        self.tokens = self.tokens.saturating_sub(tokens);
        self.prompts = self.prompts.saturating_sub(1);
        if index == 0 {
            self.head_since = now;
        }
        while self.queue.front().is_some_and(|entry| entry.is_over) {
            self.queue.pop_front();
            self.first = self.first.wrapping_add(1);
        }
        Some(tokens)
    }

    /// The inputs of an estimate.
    pub fn progress(&self) -> BacklogReading {
        let head = self.queue.front();
        BacklogReading {
            tokens: self.tokens as f64,
            head_since: self.head_since.as_secs_f64(),
            head_tokens: head.map_or(0.0, |head| head.tokens as f32),
            prompts: u32::try_from(self.prompts).unwrap_or(u32::MAX),
        }
    }

    /// The worker's rate samples.
    pub fn record(&self) -> RateSamples {
        self.record
    }
}

/// A backlog as an estimate reads it: small, since every choice reads all of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct BacklogReading {
    /// Booked tokens of unfinished prompts.
    tokens: f64,
    /// Estimated start of reading the oldest prompt, in seconds since 1970.
    head_since: f64,
    /// Tokens of the oldest prompt.
    head_tokens: f32,
    /// Unfinished prompts.
    prompts: u32,
}

impl BacklogReading {
    /// Adds tokens that wait on the same worker but were not booked here.
    pub fn with_elsewhere(self, tokens: f64) -> Self {
        Self {
            tokens: self.tokens + tokens,
            ..self
        }
    }

    /// Estimated tokens left at `now`, in seconds since 1970: the prompts' tokens plus the overhead of each prompt. The
    /// oldest prompt shrinks at `rate`, the prefill rate of this worker's peers; this worker is `slowness` times slower.
    #[inline]
    pub fn left(&self, now: f64, rate: Option<PrefillRate>, slowness: f64) -> f64 {
        let Some(rate) = rate.filter(|_| self.prompts > 0) else {
            return self.tokens;
        };
        let head_tokens = f64::from(self.head_tokens);
        let takes = rate.seconds(1.0, head_tokens) * slowness;
        let done = ((now - self.head_since) / takes).clamp(0.0, 1.0);
        let prompts = f64::from(self.prompts) - done;
        (self.tokens - done * head_tokens + prompts * rate.overhead_tokens()).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: PrefillRate = PrefillRate {
        per_prompt: 0.0,
        per_token: 1.0 / 2000.0,
    };

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn left(backlog: &Backlog, now: Duration, rate: Option<PrefillRate>) -> f64 {
        backlog.progress().left(now.as_secs_f64(), rate, 1.0)
    }

    #[test]
    fn nothing_shrinks_where_no_pace_is_known() {
        let mut backlog = Backlog::default();
        backlog.push(1000, at(0));
        assert_eq!(left(&backlog, at(5_000), None), 1000.0);
        assert_eq!(left(&backlog, at(250), Some(PACE)), 500.0);
        assert_eq!(backlog.progress().left(0.25, Some(PACE), 2.0), 750.0);
    }

    #[test]
    fn the_oldest_shrinks_at_the_pace_and_never_beyond_itself() {
        let mut backlog = Backlog::default();
        let first = backlog.push(1000, at(0));
        let second = backlog.push(3000, at(200));
        backlog.push(500, at(300));
        backlog.finish(first, at(500));
        assert_eq!(PrefillRate::of(&backlog.record), Some(PACE));
        assert_eq!(left(&backlog, at(1000), Some(PACE)), 2500.0);
        assert_eq!(left(&backlog, at(60_000), Some(PACE)), 500.0);
        backlog.finish(second, at(2_000));
        assert_eq!(left(&backlog, at(2_000), Some(PACE)), 500.0);
    }

    #[test]
    fn what_each_prompt_takes_beside_its_tokens_waits_too() {
        let rate = PrefillRate {
            per_prompt: 0.1,
            per_token: 1.0 / 1000.0,
        };
        let mut backlog = Backlog::default();
        backlog.push(400, at(0));
        backlog.push(50, at(0));
        assert_eq!(left(&backlog, at(0), Some(rate)), 650.0);
        assert_eq!(left(&backlog, at(250), Some(rate)), 400.0);
    }

    #[test]
    fn the_order_of_first_tokens_may_be_any_and_each_counts_once() {
        let mut backlog = Backlog::default();
        let tickets: Vec<Ticket> = (0..4).map(|i| backlog.push(100, at(i))).collect();
        backlog.finish(tickets[2], at(100));
        backlog.finish(tickets[2], at(200));
        backlog.cancel(tickets[2], at(300));
        assert_eq!((backlog.tokens(), backlog.prompts()), (300, 3));
        backlog.cancel(tickets[0], at(300));
        backlog.finish(tickets[1], at(400));
        backlog.finish(tickets[3], at(400));
        assert_eq!((backlog.tokens(), backlog.prompts()), (0, 0));
        assert_eq!(left(&backlog, at(500), Some(PACE)), 0.0);
        assert!(backlog.queue.is_empty());
    }

    #[test]
    fn what_nobody_ended_expires_and_ends_only_once() {
        let mut backlog = Backlog::default();
        let old = backlog.push(100, at(0));
        let young = backlog.push(50, at(5000));
        backlog.expire(at(1000), at(6000));
        assert_eq!((backlog.tokens(), backlog.prompts()), (50, 1));
        backlog.finish(old, at(7000));
        assert_eq!(PrefillRate::of(&backlog.record), None);
        backlog.finish(young, at(7000));
        assert_eq!(
            PrefillRate::of(&backlog.record).map(|rate| rate.per_token),
            Some(0.02)
        );
    }

    #[test]
    fn an_idle_time_is_no_work() {
        let mut backlog = Backlog::default();
        let first = backlog.push(1000, at(0));
        backlog.finish(first, at(1000));
        let second = backlog.push(1000, at(3_600_000));
        backlog.finish(second, at(3_601_000));
        let rate = PrefillRate::of(&backlog.record).unwrap();
        assert!((rate.per_token - 0.001).abs() < 1e-9);
    }
}
