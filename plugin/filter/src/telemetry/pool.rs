//! Owns the metrics of one pool: requests and answers by model, prefix blocks possible and chosen, picks, and each worker's
//! bookings.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::fleet::{Role, Worker};
use routing::rendezvous::{Mode, ServingDecision};
use routing::route::{Facts, Router, Tally};

use super::metric::Metric;

/// Models with labels of their own; other models are counted under `other`.
const MOST_MODELS: usize = 64;
/// Workers with labels of their own: the first names ever seen, since the proxy forgets no metric. Later workers have no gauges,
/// and their picks are counted under `other`.
const MOST_WORKERS: usize = 1024;
/// Label of models and workers beyond these limits.
const OTHER: &str = "other";
/// Model label of a request that was routed to no model.
const NO_MODEL: &str = "none";
/// Classes of status, by first digit.
const CODES: [&str; 6] = ["none", "1xx", "2xx", "3xx", "4xx", "5xx"];

/// How a request ended, for its metrics.
pub struct Ended<'a> {
    /// Model and prompt tokens that the request is counted under.
    pub facts: &'a Facts,
    /// Tokens of the answer, as far as known.
    pub output_tokens: u64,
    /// First digit of the status; 0: none.
    pub code: usize,
}

/// The metrics of one pool.
pub struct PoolTelemetry {
    pool: String,
    answers: [Metric; CODES.len()],
    first_token: Metric,
    between_tokens: Metric,
    queued: Metric,
    body_bytes: Metric,
    input_tokens: Metric,
    output_tokens: Metric,
    hit_percent: Metric,
    prompt_blocks: Metric,
    possible: Metric,
    chosen: Metric,
    cached: Metric,
    fleet_version: Metric,
    disaggregating: Metric,
    models: RefCell<HashMap<String, OfModel>>,
    picks: RefCell<HashMap<(String, Role), Metric>>,
    gauges: RefCell<FleetGauges>,
}

/// The gauges of the pool's fleet, and what they were set to last.
#[derive(Default)]
struct FleetGauges {
    /// Version of the fleet, and whether it disaggregates.
    exported: Option<(u64, bool)>,
    workers: HashMap<(String, Role), OfWorker>,
    round: u64,
}

#[derive(Clone, Copy)]
struct OfModel {
    requests: Metric,
    input_tokens: Metric,
    output_tokens: Metric,
}

/// A worker's gauges, and the values last set.
struct OfWorker {
    prefill_tokens: Metric,
    decode_blocks: Metric,
    /// Prefill tokens and decode blocks last set; `None`: not known.
    exported: Option<(u64, u64)>,
    /// Last round in which the worker was in the fleet.
    seen: u64,
}

impl PoolTelemetry {
    /// Defines the pool's metrics, so that they start as zeros.
    pub fn new(pool: &str) -> Self {
        let labels = [("pool", pool)];
        let counter = |name: &str| Metric::counter(name, &labels);
        let gauge = |name: &str| Metric::gauge(name, &labels);
        let histogram = |name: &str| Metric::histogram(name, &labels);
        let defined = Self {
            pool: pool.to_owned(),
            answers: CODES
                .map(|code| Metric::counter("answers_total", &[("pool", pool), ("code", code)])),
            first_token: histogram("time_to_first_token_ms"),
            between_tokens: histogram("inter_token_latency_ms"),
            queued: histogram("queue_ms"),
            body_bytes: counter("body_bytes_read_total"),
            input_tokens: histogram("request_input_tokens"),
            output_tokens: histogram("request_output_tokens"),
            hit_percent: histogram("prefix_hit_percent"),
            prompt_blocks: counter("prompt_blocks_total"),
            possible: counter("prefix_blocks_possible_total"),
            chosen: counter("prefix_blocks_chosen_total"),
            cached: counter("prefix_blocks_cached_total"),
            fleet_version: gauge("fleet_version"),
            disaggregating: gauge("disaggregating"),
            models: RefCell::default(),
            picks: RefCell::default(),
            gauges: RefCell::default(),
        };
        defined.of_model(NO_MODEL);
        defined
    }

    /// Counts a request that has ended.
    pub fn ended(&self, ended: &Ended<'_>) {
        let model = self.of_model(ended.facts.model.as_deref().unwrap_or(NO_MODEL));
        model.requests.add(1);
        model.input_tokens.add(ended.facts.prompt_tokens);
        model.output_tokens.add(ended.output_tokens);
        // A request that was not read, or generated nothing, has no length.
        for (metric, tokens) in [
            (self.input_tokens, ended.facts.prompt_tokens),
            (self.output_tokens, ended.output_tokens),
        ] {
            if tokens > 0 {
                metric.record(tokens);
            }
        }
        if let Some(answers) = self.answers.get(ended.code) {
            answers.add(1);
        }
    }

    /// Records the time from a request to the first token of its answer.
    pub fn first_token(&self, after: Duration) {
        self.first_token.record(milliseconds(after));
    }

    /// Records the mean time between the tokens of an answer.
    pub fn between_tokens(&self, apart: Duration) {
        self.between_tokens.record(milliseconds(apart));
    }

    /// Records the time that a request waited for a worker.
    pub fn queued(&self, time: Duration) {
        self.queued.record(milliseconds(time));
    }

    /// Counts blocks of a prompt that a prefill worker reported as cached.
    pub fn cached(&self, blocks: u64) {
        self.cached.add(blocks);
    }

    /// Counts the decisions made since the last call.
    pub fn decided(&self, tally: Tally) {
        self.body_bytes.add(tally.body_bytes);
        self.prompt_blocks.add(tally.prompt_blocks);
        self.possible.add(tally.possible_blocks);
        self.chosen.add(tally.chosen_blocks);
        for (percent, count) in tally.hits {
            (0..count).for_each(|_| self.hit_percent.record(percent.into()));
        }
        for ((_, role), picks) in tally.picks {
            self.picks_of(&picks.worker.name, role).add(picks.count);
        }
    }

    /// Sets the gauges of the pool; called by the leading VM. Workers that were never picked start with 0 picks.
    pub fn export_counts(&self, router: &Router) {
        let absent = router.absent_policy();
        let disaggregates = router
            .model_states()
            .any(|(_, state)| state.decision(Mode::Normal, absent) == ServingDecision::Pair);
        let now = (router.fleet().version(), disaggregates);
        let before = self.gauges.borrow_mut().exported.replace(now);
        if before != Some(now) {
            self.fleet_version.record(now.0);
            self.disaggregating.record(u64::from(disaggregates));
            for worker in router.fleet().workers().take(MOST_WORKERS) {
                self.picks_of(&worker.name, worker.role);
            }
        }
        self.tell_of_workers(router);
    }

    /// Forgets the values of the gauges: the next export sets all of them.
    pub fn forget_exported(&self) {
        let gauges = &mut *self.gauges.borrow_mut();
        gauges.exported = None;
        for known in gauges.workers.values_mut() {
            known.exported = None;
        }
    }

    fn tell_of_workers(&self, router: &Router) {
        let FleetGauges { workers, round, .. } = &mut *self.gauges.borrow_mut();
        *round = round.wrapping_add(1);
        for worker in router.fleet().workers() {
            let key = (worker.name.clone(), worker.role);
            if workers.len() >= MOST_WORKERS && !workers.contains_key(&key) {
                continue;
            }
            let known = workers
                .entry(key)
                .or_insert_with(|| OfWorker::new(&self.pool, worker));
            known.seen = *round;
            let load = router.worker_load_in_all(worker);
            known.tell((load.prefill_tokens, load.decode_blocks));
        }
        // The proxy forgets no metric: gauges of a worker that left are set to 0.
        for gone in workers.values_mut().filter(|known| known.seen != *round) {
            gone.tell((0, 0));
        }
    }

    fn of_model(&self, name: &str) -> OfModel {
        let mut models = self.models.borrow_mut();
        if let Some(known) = models.get(name) {
            return *known;
        }
        let name = if models.len() < MOST_MODELS {
            name
        } else {
            OTHER
        };
        let labels = [("pool", self.pool.as_str()), ("model", name)];
        let define = || OfModel {
            requests: Metric::counter("requests_total", &labels),
            input_tokens: Metric::counter("input_tokens_total", &labels),
            output_tokens: Metric::counter("output_tokens_total", &labels),
        };
        *models.entry_ref(name).or_insert_with(define)
    }

    fn picks_of(&self, worker: &str, role: Role) -> Metric {
        let mut picks = self.picks.borrow_mut();
        let key = (worker.to_owned(), role);
        if let Some(known) = picks.get(&key) {
            return *known;
        }
        let key = match picks.len() < MOST_WORKERS {
            true => key,
            false => (OTHER.to_owned(), role),
        };
        let labels = [
            ("pool", self.pool.as_str()),
            ("role", role.name()),
            ("worker", key.0.as_str()),
        ];
        let define = || Metric::counter("picks_total", &labels);
        *picks.entry_ref(&key).or_insert_with(define)
    }
}

impl OfWorker {
    fn new(pool: &str, worker: &Arc<Worker>) -> Self {
        let labels = [
            ("pool", pool),
            ("role", worker.role.name()),
            ("worker", worker.name.as_str()),
        ];
        Self {
            prefill_tokens: Metric::gauge("worker_prefill_tokens", &labels),
            decode_blocks: Metric::gauge("worker_decode_blocks", &labels),
            exported: None,
            seen: 0,
        }
    }

    fn tell(&mut self, now: (u64, u64)) {
        if self.exported.replace(now) != Some(now) {
            self.prefill_tokens.record(now.0);
            self.decode_blocks.record(now.1);
        }
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
