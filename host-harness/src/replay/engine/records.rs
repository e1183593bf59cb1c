//! Owns the records of one run: the calls to the router and their time, and the outcome of each request.

use std::time::{Duration, Instant};

use super::{Parameters, START};
use crate::cache::Cache;
use crate::replay::router_model::{EngineMetrics, Reservation, RouterModel};
use crate::replay::trace::{Request, Trace};

/// Minimum number of prompt tokens computed, however much is cached: an engine needs the last ones for the first token, and a
/// step has its cost.
const LEAST_COMPUTED: u64 = 64;

/// Tokens computed of a prompt with `cached` cached tokens.
pub fn computed(prompt: u64, cached: u64) -> u64 {
    prompt.saturating_sub(cached).max(LEAST_COMPUTED)
}

/// Outcome of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct ServedRequest {
    /// Time since the first request of the trace.
    pub arrival: Duration,
    /// Time to the start of prefill.
    pub wait: Duration,
    /// Time to the first token.
    pub ttft: Duration,
    /// Mean time between two tokens of its answer; `None` for a single token.
    pub itl: Option<Duration>,
    /// The worker that computed the prompt.
    pub worker: usize,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the worker's cache.
    pub cached_tokens: u64,
    /// Tokens computed.
    pub computed_tokens: u64,
}

/// Outcome of a trace.
#[derive(Debug, Default, PartialEq)]
pub struct ReplayOutcome {
    /// Served requests, in order of arrival.
    pub served: Vec<ServedRequest>,
    /// Number of requests refused by the router.
    pub refused: u64,
    /// Reason of the first refusal.
    pub refusal: Option<String>,
    /// Milliseconds between two tokens of an answer, with their count.
    pub gaps: Vec<(f64, u64)>,
    /// Wall-clock time of the router's calls.
    pub decided_in: Duration,
}

/// A request with assigned workers.
#[derive(Debug, Clone, Copy)]
pub struct AssignedRequest {
    /// Number in the trace.
    pub request: usize,
    /// Worker that computes the prompt.
    pub prefill: usize,
    /// Worker that writes the answer.
    pub decode: usize,
    /// Prompt tokens to compute.
    pub tokens: u64,
}

/// The records of one run.
pub struct RunRecords<'a> {
    trace: &'a Trace,
    block_tokens: u64,
    router: &'a mut dyn RouterModel,
    caches: Vec<Cache>,
    reservations: Vec<Option<Box<dyn Reservation>>>,
    served: Vec<Option<ServedRequest>>,
    outcome: ReplayOutcome,
}

impl<'a> RunRecords<'a> {
    /// Empty records.
    pub fn new(trace: &'a Trace, parameters: &Parameters, router: &'a mut dyn RouterModel) -> Self {
        let requests = trace.requests.len();
        let workers = 0..parameters.workers.total();
        Self {
            trace,
            block_tokens: parameters.block_tokens.into(),
            router,
            caches: workers
                .map(|_| Cache::new(parameters.kv_blocks as usize))
                .collect(),
            reservations: (0..requests).map(|_| None).collect(),
            served: vec![None; requests],
            outcome: ReplayOutcome::default(),
        }
    }

    /// Number of requests in the trace.
    pub fn requests(&self) -> usize {
        self.trace.requests.len()
    }

    /// A request of the trace.
    pub fn request(&self, number: usize) -> &'a Request {
        &self.trace.requests[number]
    }

    /// Time of the router's next report of the engines.
    pub fn next_report(&self) -> Option<Duration> {
        self.router.next_report()
    }

    /// Passes the engines' metrics to the router. This is no call for a request, so its time is not counted.
    pub fn deliver_metrics(&mut self, all: &[EngineMetrics], now: Duration) {
        self.router.on_engine_metrics(all, now);
    }

    /// Handles an arrival: the router assigns workers, and the request's blocks enter the worker's cache. `None` if the router
    /// refuses.
    pub fn arrive(&mut self, number: usize, now: Duration) -> Option<AssignedRequest> {
        let request = self.request(number);
        let started = Instant::now();
        let choice = self.router.reserve(request, now);
        self.outcome.decided_in += started.elapsed();
        let reservation = match choice {
            Ok(reservation) => reservation,
            Err(reason) => {
                self.outcome.refused += 1;
                self.outcome.refusal.get_or_insert(reason);
                return None;
            }
        };
        let pair = reservation.pair();
        self.reservations[number] = Some(reservation);
        let cache = &mut self.caches[pair.prefill];
        let cached_tokens = cache.depth(&request.blocks.sequence) as u64 * self.block_tokens;
        cache.enter(&request.blocks.sequence);
        let tokens = computed(request.prompt_tokens, cached_tokens);
        self.served[number] = Some(ServedRequest {
            arrival: request.arrival,
            wait: Duration::ZERO,
            ttft: Duration::ZERO,
            itl: None,
            worker: pair.prefill,
            prompt_tokens: request.prompt_tokens,
            cached_tokens,
            computed_tokens: tokens,
        });
        Some(AssignedRequest {
            request: number,
            prefill: pair.prefill,
            decode: pair.decode,
            tokens,
        })
    }

    /// Records the start of prefill.
    pub fn prefill_begins(&mut self, number: usize, now: Duration) {
        if let Some(served) = &mut self.served[number] {
            served.wait = now - START - served.arrival;
        }
    }

    /// Records the end of prefill.
    pub fn first_token(&mut self, number: usize, now: Duration) {
        if let Some(served) = &mut self.served[number] {
            served.ttft = now - START - served.arrival;
        }
        self.timed_call(number, |reservation| reservation.first_token(now));
    }

    /// Records the tokens of the answer so far.
    pub fn generated(&mut self, number: usize, tokens: u64) {
        self.timed_call(number, |reservation| reservation.generated(tokens));
    }

    /// Records the end of the answer.
    pub fn ended(&mut self, number: usize, now: Duration) {
        let gaps = u32::try_from(self.request(number).output_tokens - 1).unwrap_or(u32::MAX);
        if let Some(served) = &mut self.served[number] {
            let writing = now - START - served.arrival - served.ttft;
            served.itl = writing.checked_div(gaps);
        }
        let reservation = self.reservations[number].take();
        let started = Instant::now();
        drop(reservation);
        self.outcome.decided_in += started.elapsed();
    }

    /// Records `count` tokens that came this long after the ones before them.
    pub fn gap(&mut self, gap: Duration, count: u64) {
        let ms = gap.as_secs_f64() * 1000.0;
        match self.outcome.gaps.last_mut() {
            Some((last, times)) if *last == ms => *times += count,
            _ if count > 0 => self.outcome.gaps.push((ms, count)),
            _ => {}
        }
    }

    /// Returns the outcome of the run.
    pub fn close(self) -> ReplayOutcome {
        ReplayOutcome {
            served: self.served.into_iter().flatten().collect(),
            ..self.outcome
        }
    }

    fn timed_call(&mut self, number: usize, what: impl FnOnce(&mut dyn Reservation)) {
        let Some(reservation) = &mut self.reservations[number] else {
            return;
        };
        let started = Instant::now();
        what(reservation.as_mut());
        self.outcome.decided_in += started.elapsed();
    }
}
