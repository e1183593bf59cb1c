//! Owns the prefill work that waits on one worker rank: what is left of it now, and how quickly it has been done so far.
//!
//! A worker is thought of as reading one prompt after the other, in the order in which they were sent. The oldest one is
//! taken to shrink at the rate that was observed, never below nothing and never beyond itself: whatever the estimate is
//! wrong by ends with the next first token. Engines that read several prompts at once end them in any order, which the
//! rate, being work over time, does not mind.

use std::collections::VecDeque;
use std::time::Duration;

/// What an observation still counts for when the next one comes: about the last ten count.
const MEMORY: f64 = 0.9;

/// A prompt with fewer tokens to compute tells of what every request costs, not of the worker's speed: one who is sent
/// what it has cached would be thought to be slow.
const TELLING_TOKENS: u64 = 1000;

/// Prefill work done, and the time it took.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rate {
    /// Tokens, the older ones counting less.
    pub tokens: f64,
    /// Seconds, likewise.
    pub seconds: f64,
}

impl Rate {
    fn observe(&mut self, tokens: u64, took: Duration) {
        self.tokens = self.tokens * MEMORY + tokens as f64;
        self.seconds = self.seconds * MEMORY + took.as_secs_f64();
    }

    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            seconds: self.seconds + other.seconds,
        }
    }

    /// Tokens a second; none where nothing has been observed yet.
    pub fn per_second(self) -> Option<f64> {
        let rate = self.tokens / self.seconds;
        (rate.is_finite() && rate > 0.0).then_some(rate)
    }
}

/// Names a prompt in its backlog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Waiting {
    tokens: u64,
    since: Duration,
    is_over: bool,
}

/// The prompts that wait on one worker rank.
#[derive(Debug, Default)]
pub struct Backlog {
    queue: VecDeque<Waiting>,
    /// The ticket of the oldest in the queue.
    first: u64,
    tokens: u64,
    prompts: u64,
    /// Since when the oldest one is thought to be read.
    head_since: Duration,
    /// Up to when work has been observed.
    observed_until: Duration,
    rate: Rate,
    /// The same in tokens a second, worked out once for each observation.
    speed: Option<f64>,
}

impl Backlog {
    /// An empty one in this one's place, in which no ticket of this one names anything.
    pub fn successor(&self) -> Self {
        Self {
            first: self.first.wrapping_add(self.queue.len() as u64),
            ..Self::default()
        }
    }

    /// Tokens that were booked and are not over.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Prompts likewise.
    pub fn prompts(&self) -> u64 {
        self.prompts
    }

    /// A prompt was sent, of which `tokens` must be computed.
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

    /// Its first token was seen. Once over, a prompt stays over.
    pub fn finish(&mut self, ticket: Ticket, now: Duration) {
        let ended = self.end(ticket, now);
        if let Some(tokens) = ended.filter(|tokens| *tokens >= TELLING_TOKENS) {
            let took = now.saturating_sub(self.observed_until);
            self.rate.observe(tokens, took);
            self.speed = self.rate.per_second();
            self.observed_until = now;
        }
    }

    /// It will have no first token, or none that tells of the worker's speed.
    pub fn cancel(&mut self, ticket: Ticket, now: Duration) {
        if self.end(ticket, now).is_some() {
            self.observed_until = now;
        }
    }

    /// Prompts that were sent before `then` count no more.
    pub fn expire(&mut self, then: Duration, now: Duration) {
        let before = |entry: &&Waiting| entry.since < then;
        let expired = self.queue.iter().take_while(before).count() as u64;
        let first = self.first;
        for ticket in (0..expired).map(|index| Ticket(first.wrapping_add(index))) {
            self.cancel(ticket, now);
        }
    }

    /// The tokens of a prompt that was not over yet.
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

    /// What an estimate needs, in one place.
    pub fn progress(&self) -> Progress {
        let head = self.queue.front();
        Progress {
            tokens: self.tokens,
            prompts: self.prompts,
            head_tokens: head.map_or(0.0, |head| head.tokens as f64),
            head_since: self.head_since.as_secs_f64(),
            speed: self.speed,
        }
    }

    /// The rate observed.
    pub fn rate(&self) -> Rate {
        self.rate
    }
}

/// A backlog as an estimate sees it: small, since every choice looks at all of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// Tokens that were booked and are not over.
    pub tokens: u64,
    /// Prompts likewise.
    pub prompts: u64,
    /// Tokens of the oldest one.
    head_tokens: f64,
    /// Since when that is thought to be read, in seconds since 1970.
    head_since: f64,
    /// How quickly the worker reads, in tokens a second; none where nothing has been observed yet.
    pub speed: Option<f64>,
}

impl Progress {
    /// Tokens that are thought to be left `now`, in seconds since 1970, the oldest prompt shrinking at this worker's rate, or at
    /// `common`, that of workers like it, where nothing was observed of it yet.
    pub fn left(&self, now: f64, common: Option<f64>) -> f64 {
        let booked = self.tokens as f64;
        let Some(speed) = self.speed.or(common) else {
            return booked;
        };
        let done = speed * (now - self.head_since).max(0.0);
        (booked - done.min(self.head_tokens)).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(backlog: &Backlog, now: Duration, common: Option<f64>) -> f64 {
        backlog.progress().left(now.as_secs_f64(), common)
    }

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn nothing_shrinks_before_something_was_observed() {
        let mut backlog = Backlog::default();
        backlog.push(1000, at(0));
        assert_eq!(left(&backlog, at(5_000), None), 1000.0);
        assert_eq!(left(&backlog, at(500), Some(1000.0)), 500.0);
    }

    #[test]
    fn the_oldest_shrinks_at_the_rate_observed_and_never_beyond_itself() {
        let mut backlog = Backlog::default();
        let first = backlog.push(1000, at(0));
        let second = backlog.push(3000, at(200));
        backlog.push(500, at(300));
        backlog.finish(first, at(500));
        assert_eq!(backlog.rate.per_second(), Some(2000.0));
        assert_eq!(left(&backlog, at(1000), None), 2500.0);
        assert_eq!(left(&backlog, at(60_000), None), 500.0);
        backlog.finish(second, at(2_000));
        assert_eq!(left(&backlog, at(2_000), None), 500.0);
        assert!((backlog.rate.per_second().unwrap() - 2000.0).abs() < 1.0);
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
        assert_eq!(left(&backlog, at(500), Some(1.0)), 0.0);
        assert!(backlog.queue.is_empty());
    }

    #[test]
    fn what_nobody_ended_expires_and_ends_only_once() {
        let mut backlog = Backlog::default();
        let old = backlog.push(10_000, at(0));
        let young = backlog.push(5000, at(5000));
        backlog.expire(at(1000), at(6000));
        assert_eq!((backlog.tokens(), backlog.prompts()), (5000, 1));
        backlog.finish(old, at(7000));
        assert_eq!(backlog.rate.per_second(), None);
        backlog.finish(young, at(7000));
        assert_eq!(backlog.rate.per_second(), Some(5000.0));
    }

    #[test]
    fn a_prompt_with_little_to_compute_tells_nothing_of_the_speed() {
        let mut backlog = Backlog::default();
        let cached = backlog.push(70, at(0));
        backlog.finish(cached, at(30));
        assert_eq!(backlog.speed, None);
        let long = backlog.push(8000, at(100));
        let cached = backlog.push(70, at(100));
        backlog.finish(long, at(1100));
        backlog.finish(cached, at(1130));
        assert_eq!(backlog.speed, Some(8000.0));
    }

    #[test]
    fn an_idle_time_is_no_work() {
        let mut backlog = Backlog::default();
        let first = backlog.push(1000, at(0));
        backlog.finish(first, at(1000));
        let second = backlog.push(1000, at(3_600_000));
        backlog.finish(second, at(3_601_000));
        assert!((backlog.rate.per_second().unwrap() - 1000.0).abs() < 1e-6);
    }
}
