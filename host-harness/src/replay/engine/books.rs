//! Owns the books of one run: what the router is asked and told, how long that takes, and what became of each request.

use std::time::{Duration, Instant};

use super::{Parameters, START};
use crate::cache::Cache;
use crate::replay::chooser::{Chooser, Held, Status};
use crate::replay::trace::{Request, Trace};

/// However much of a prompt is cached, at least this many tokens are computed: an engine needs the last ones for the first
/// token, and a step has its price.
const LEAST_COMPUTED: u64 = 64;

/// Tokens of a prompt that are computed when `cached` ones are found.
pub fn computed(prompt: u64, cached: u64) -> u64 {
    prompt.saturating_sub(cached).max(LEAST_COMPUTED)
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Served {
    /// Since the first request of the trace.
    pub arrival: Duration,
    /// Until its prefill began.
    pub wait: Duration,
    /// Until its first token.
    pub ttft: Duration,
    /// From one token of its answer to the next, on the mean; none where there is only one.
    pub itl: Option<Duration>,
    /// The worker that computed the prompt.
    pub worker: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Of those, found in the worker's cache.
    pub cached_tokens: u64,
    /// Tokens computed.
    pub computed_tokens: u64,
}

/// What became of a trace.
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    /// The requests that were served, in order of arrival.
    pub served: Vec<Served>,
    /// How many requests the router refused.
    pub refused: u64,
    /// The first refusal's reason.
    pub refusal: Option<String>,
    /// Milliseconds from one token of an answer to the next, and how often.
    pub gaps: Vec<(f64, u64)>,
    /// How long the router's calls took, on the wall's clock.
    pub decided_in: Duration,
}

/// A request that has its place.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Its number in the trace.
    pub request: usize,
    /// Where its prompt is computed.
    pub prefill: usize,
    /// Where its answer is written.
    pub decode: usize,
    /// Prompt tokens to compute.
    pub tokens: u64,
}

/// The books.
pub struct Books<'a> {
    trace: &'a Trace,
    block_tokens: u64,
    chooser: &'a mut dyn Chooser,
    caches: Vec<Cache>,
    seats: Vec<Option<Box<dyn Held>>>,
    served: Vec<Option<Served>>,
    outcome: Outcome,
}

impl<'a> Books<'a> {
    /// Books in which nothing is written.
    pub fn new(trace: &'a Trace, parameters: &Parameters, chooser: &'a mut dyn Chooser) -> Self {
        let requests = trace.requests.len();
        let workers = 0..parameters.shape.workers();
        Self {
            trace,
            block_tokens: parameters.block_tokens.into(),
            chooser,
            caches: workers
                .map(|_| Cache::new(parameters.kv_blocks as usize))
                .collect(),
            seats: (0..requests).map(|_| None).collect(),
            served: vec![None; requests],
            outcome: Outcome::default(),
        }
    }

    /// How many requests the trace has.
    pub fn requests(&self) -> usize {
        self.trace.requests.len()
    }

    /// A request of the trace.
    pub fn request(&self, number: usize) -> &'a Request {
        &self.trace.requests[number]
    }

    /// When the router wants to hear of the engines next.
    pub fn listens(&self) -> Option<Duration> {
        self.chooser.listens()
    }

    /// The router hears of the engines. That is no call for a request, so its time is not counted.
    pub fn tell_of_engines(&mut self, all: &[Status], now: Duration) {
        self.chooser.hear(all, now);
    }

    /// A request comes in: the router sends it somewhere, and its blocks enter that worker's cache. None where it is refused.
    pub fn arrive(&mut self, number: usize, now: Duration) -> Option<Job> {
        let request = self.request(number);
        let asked = Instant::now();
        let choice = self.chooser.reserve(request, now);
        self.outcome.decided_in += asked.elapsed();
        let seat = match choice {
            Ok(seat) => seat,
            Err(reason) => {
                self.outcome.refused += 1;
                self.outcome.refusal.get_or_insert(reason);
                return None;
            }
        };
        let place = seat.place();
        self.seats[number] = Some(seat);
        let cache = &mut self.caches[place.prefill];
        let cached_tokens = cache.depth(&request.blocks.sequence) as u64 * self.block_tokens;
        cache.enter(&request.blocks.sequence);
        let tokens = computed(request.prompt_tokens, cached_tokens);
        self.served[number] = Some(Served {
            arrival: request.arrival,
            wait: Duration::ZERO,
            ttft: Duration::ZERO,
            itl: None,
            worker: place.prefill,
            prompt_tokens: request.prompt_tokens,
            cached_tokens,
            computed_tokens: tokens,
        });
        Some(Job {
            request: number,
            prefill: place.prefill,
            decode: place.decode,
            tokens,
        })
    }

    /// The first part of the prompt begins to be computed.
    pub fn prefill_begins(&mut self, number: usize, now: Duration) {
        if let Some(served) = &mut self.served[number] {
            served.wait = now - START - served.arrival;
        }
    }

    /// Prefill is over.
    pub fn first_token(&mut self, number: usize, now: Duration) {
        if let Some(served) = &mut self.served[number] {
            served.ttft = now - START - served.arrival;
        }
        self.tell(number, |seat| seat.first_token(now));
    }

    /// So many tokens of the answer are there.
    pub fn generated(&mut self, number: usize, tokens: u64) {
        self.tell(number, |seat| seat.generated(tokens));
    }

    /// The answer is complete.
    pub fn ended(&mut self, number: usize, now: Duration) {
        let gaps = u32::try_from(self.request(number).output_tokens - 1).unwrap_or(u32::MAX);
        if let Some(served) = &mut self.served[number] {
            let writing = now - START - served.arrival - served.ttft;
            served.itl = writing.checked_div(gaps);
        }
        let seat = self.seats[number].take();
        let asked = Instant::now();
        drop(seat);
        self.outcome.decided_in += asked.elapsed();
    }

    /// `count` tokens came this long after the ones before them.
    pub fn gap(&mut self, gap: Duration, count: u64) {
        let ms = gap.as_secs_f64() * 1000.0;
        match self.outcome.gaps.last_mut() {
            Some((last, times)) if *last == ms => *times += count,
            _ if count > 0 => self.outcome.gaps.push((ms, count)),
            _ => {}
        }
    }

    /// What all came to.
    pub fn close(self) -> Outcome {
        Outcome {
            served: self.served.into_iter().flatten().collect(),
            ..self.outcome
        }
    }

    fn tell(&mut self, number: usize, what: impl FnOnce(&mut dyn Held)) {
        let Some(seat) = &mut self.seats[number] else {
            return;
        };
        let asked = Instant::now();
        what(seat.as_mut());
        self.outcome.decided_in += asked.elapsed();
    }
}
