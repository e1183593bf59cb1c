//! Owns the polling of engine metrics: the leading VM asks every worker in turn, and publishes the reports to all VMs.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::config::{EngineMetrics, Pool};
use routing::engine_metrics;
use routing::fleet::{Incarnation, Role, Worker};
use routing::route::Report;

use crate::legs::calls;
use crate::shared;
use crate::vm::PoolRuntime;

/// Asks the workers of a pool while this VM leads.
pub struct Scraper {
    rules: EngineMetrics,
    pending: HashMap<u32, Incarnation>,
    reports: HashMap<Incarnation, Report>,
    /// Index in the fleet of the next worker to ask.
    turn: usize,
    /// Workers that may be asked now, with the fraction that is left over.
    allowance: f64,
    last_round: Option<Duration>,
    /// Whether there are reports that are not published.
    has_news: bool,
}

impl Scraper {
    /// The scraper of a pool; `None` if not configured, or if the pool's workers are out of reach.
    pub fn new(pool: &Pool) -> Option<Self> {
        let rules = pool.engine_metrics.clone()?;
        pool.rules().reaches_workers.then(|| Self {
            rules,
            pending: HashMap::new(),
            reports: HashMap::new(),
            turn: 0,
            allowance: 0.0,
            last_round: None,
            has_news: false,
        })
    }

    /// Asks the workers whose turn it is, if this VM leads, and publishes new reports. Called in each round.
    pub fn tick(&mut self, runtime: &PoolRuntime) {
        if !runtime.vm.leads() {
            self.last_round = None;
            return;
        }
        self.publish(runtime);
        let fleet: Vec<Arc<Worker>> = {
            let router = runtime.router();
            let reachable = router.fleet().workers().filter(|w| w.address.is_some());
            reachable.cloned().collect()
        };
        let due = self.due(fleet.len(), runtime.now());
        for place in (self.turn..).take(due) {
            if let Some(worker) = place.checked_rem(fleet.len()).and_then(|at| fleet.get(at)) {
                self.ask(runtime, worker);
            }
        }
        self.turn = self
            .turn
            .wrapping_add(due)
            .checked_rem(fleet.len())
            .unwrap_or(0);
    }

    /// Number of workers to ask now: each worker once in an interval, and no more in a second than allowed.
    fn due(&mut self, workers: usize, now: Duration) -> usize {
        let before = self.last_round.replace(now).unwrap_or(now);
        let elapsed = now.saturating_sub(before).as_secs_f64().min(1.0);
        let interval = self.rules.interval_ms as f64 / 1000.0;
        let per_second = (workers as f64 / interval).min(f64::from(self.rules.most_per_second));
        self.allowance = (self.allowance + elapsed * per_second).min(workers as f64);
        let due = self.allowance.floor();
        self.allowance -= due;
        due as usize
    }

    fn ask(&mut self, runtime: &PoolRuntime, worker: &Worker) {
        let Some(address) = worker.address else {
            return;
        };
        let life = worker.incarnation();
        if self.pending.values().any(|asked| *asked == life) {
            return;
        }
        let timeout = Duration::from_millis(self.rules.timeout_ms);
        let cluster = {
            let router = runtime.router();
            let clusters = &router.pool().clusters;
            match worker.role {
                Role::Prefill => clusters.prefill.clone(),
                Role::Decode | Role::Aggregated => clusters.decode.clone(),
            }
        };
        // A worker that cannot be asked reports nothing: its last figures grow old.
        if let Ok(token) = calls::get(&cluster, Some(address), &self.rules.path, &[], timeout) {
            self.pending.insert(token, life);
        }
    }

    /// Handles an answer; false if the token is another call's.
    pub fn answered(&mut self, token: u32, has_headers: bool, runtime: &PoolRuntime) -> bool {
        let Some(life) = self.pending.remove(&token) else {
            return false;
        };
        if let Some(text) = calls::good_answer(has_headers) {
            let figures = engine_metrics::parse(&text);
            self.reports
                .insert(life, Report::of(life.id, runtime.now(), figures));
            self.has_news = true;
        }
        true
    }

    fn publish(&mut self, runtime: &PoolRuntime) {
        if !std::mem::take(&mut self.has_news) {
            return;
        }
        let router = runtime.router();
        self.reports.retain(|life, _| router.fleet().lives(life));
        shared::publish_reports(&runtime.pool.name, runtime.now(), self.reports.values());
    }
}
