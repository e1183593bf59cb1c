//! Owns the reports of the workers' engines, and the external load derived from them: load that no VM of this proxy has booked.
//!
//! An engine's figures never change a booking. On arrival they are compared with this proxy's bookings on the worker: the
//! excess came from elsewhere, and counts on top until the next report. A worker without reports is not idle: [`beyond`]
//! estimates its load.

mod beyond;

use std::rc::Rc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};

use self::beyond::{Beliefs, Beyond, FigureLimits};
use super::Router;
use crate::engine_metrics::Figures;
use crate::fleet::{Fleet, Role, Target, Worker, WorkerId};
use crate::load::{ExternalLoad, Ledger, Load};

/// Start times that differ by no more are of one start: some engines derive theirs from their uptime.
const SAME_START: Duration = Duration::from_secs(1);

/// Assumed tokens of a waiting prompt while none has been read here: any length is better than none, since an engine with
/// sixty waiting is not idle.
const UNSEEN_PROMPT_TOKENS: f64 = 512.0;

/// Age at which a report is stale if the pool sets none, since it polls no engines itself.
const STALE_AFTER: Duration = Duration::from_secs(5);

/// Figures of one worker's engine, over all its ranks; a missing figure is unknown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Report {
    /// The worker.
    pub worker: WorkerId,
    /// When the engine was polled, by the poller's clock.
    pub at: Duration,
    /// When the engine started, since 1970.
    pub started: Option<Duration>,
    /// Waiting requests.
    pub waiting: Option<u32>,
    /// Running requests.
    pub running: Option<u32>,
    /// The part of the KV cache that is in use, from 0 to 1.
    pub kv_use: Option<f32>,
    /// KV blocks that fit, in the engine's own blocks.
    pub kv_blocks: Option<u32>,
    /// Tokens in one of the engine's blocks.
    pub block_tokens: Option<u32>,
}

impl Report {
    /// The report of a worker's engine polled at `at`, by the poller's clock.
    pub fn of(worker: WorkerId, at: Duration, figures: Figures) -> Self {
        let started = figures.started.map(Duration::try_from_secs_f64);
        Self {
            worker,
            at,
            started: started.and_then(Result::ok),
            waiting: figures.waiting,
            running: figures.running,
            kv_use: figures.kv_use,
            kv_blocks: figures.kv_blocks,
            block_tokens: figures.block_tokens,
        }
    }

    /// Whether the engine is another process than the one that reported `earlier`.
    fn is_of_another_life(&self, earlier: &Self) -> bool {
        let lives = self.started.zip(earlier.started);
        lives.is_some_and(|(now, before)| now.abs_diff(before) > SAME_START)
    }

    /// Fills missing figures that do not change in an incarnation from an earlier report.
    fn after(self, earlier: Option<&Self>) -> Self {
        Self {
            started: self.started.or(earlier.and_then(|it| it.started)),
            kv_blocks: self.kv_blocks.or(earlier.and_then(|it| it.kv_blocks)),
            block_tokens: self.block_tokens.or(earlier.and_then(|it| it.block_tokens)),
            ..self
        }
    }

    /// KV blocks that fit, in blocks of `block_tokens`.
    fn kv_blocks_of(&self, block_tokens: u32) -> Option<u32> {
        let own = u64::from(self.kv_blocks?);
        let size = u64::from(self.block_tokens.unwrap_or(block_tokens));
        let tokens = own.saturating_mul(size);
        u32::try_from(tokens.checked_div(block_tokens.into())?).ok()
    }

    fn requests(&self) -> Option<u32> {
        match (self.waiting, self.running) {
            (Some(waiting), Some(running)) => Some(waiting.saturating_add(running)),
            (waiting, running) => waiting.or(running),
        }
    }
}

/// The newest report of a worker, and the external load by this and earlier reports.
#[derive(Debug)]
struct LatestReport {
    report: Report,
    beyond: Beyond,
}

/// The newest report of each worker.
#[derive(Debug, Default)]
pub(super) struct Reports {
    of: HashMap<WorkerId, LatestReport>,
    /// When an estimate next changes for lack of a newer report.
    next_change: Option<Duration>,
    warned: HashSet<WorkerId>,
    warnings: Vec<String>,
}

impl Reports {
    /// Forgets workers that left.
    pub(super) fn keep(&mut self, fleet: &Fleet) {
        self.of.retain(|id, _| fleet.contains(*id));
        self.warned.retain(|id| fleet.contains(*id));
    }

    /// KV blocks that fit on one rank of a worker, in blocks of `block_tokens`, if its engine has reported.
    pub(super) fn kv_blocks_of_rank(&self, worker: &Worker, block_tokens: u32) -> Option<u32> {
        let report = self.get(worker.id)?;
        let all = report.kv_blocks_of(block_tokens)?;
        Some(all / worker.dp_size.max(1))
    }

    fn get(&self, worker: WorkerId) -> Option<&Report> {
        self.of.get(&worker).map(|latest| &latest.report)
    }

    fn warn(&mut self, worker: &Worker, report: &Report, block_tokens: u32) {
        let Some(own) = report.block_tokens.filter(|own| *own != block_tokens) else {
            return;
        };
        if self.warned.insert(worker.id) {
            self.warnings.push(format!(
                "worker {}: its engine has KV blocks of {own} tokens, but the pool's block_tokens is {block_tokens}",
                worker.name
            ));
        }
    }
}

impl Router {
    /// Age at which an engine's report is stale.
    pub fn stale_after(&self) -> Duration {
        let rules = self.pool.engine_metrics.as_ref();
        rules.map_or(STALE_AFTER, |rules| {
            let workers = self.fleet.workers().count() as u64;
            let turn_ms = workers.saturating_mul(1000) / u64::from(rules.most_per_second.max(1));
            // With many workers each is polled seldom: its figures must last until the next poll.
            Duration::from_millis(rules.stale_after_ms.max(turn_ms.saturating_mul(2)))
        })
    }

    /// Takes reports of engines, timed by this router's clock. Only a report that is newer than the last one of its worker
    /// counts.
    pub fn apply_reports(&mut self, reports: &[Report]) {
        self.apply_each(reports, |report| report.at);
    }

    /// The same, from another VM whose clock shows `at` now. The clocks need not agree.
    pub fn apply_reports_at(&mut self, at: Duration, reports: &[Report]) {
        let now = self.ledger.now();
        let ago = |report: &Report| at.saturating_sub(report.at);
        self.apply_each(reports, |report| now.saturating_sub(ago(report)));
    }

    fn apply_each(&mut self, reports: &[Report], asked_at: impl Fn(&Report) -> Duration) {
        let mean_prompt = match self.ledger.mean_prompt_tokens() {
            mean if mean > 0.0 => mean,
            _ => UNSEEN_PROMPT_TOKENS,
        };
        let stale_after = self.stale_after();
        let mut has_capacity_changed = false;
        for report in reports {
            let Some(worker) = self.fleet.get(report.worker).cloned() else {
                continue;
            };
            let last = self.reports.get(worker.id);
            // A report much older than the last one is from another VM's clock.
            let before = |last: &Report| last.at.saturating_sub(report.at);
            if last.is_some_and(|last| last.at >= report.at && before(last) < stale_after) {
                continue;
            }
            if last.is_some_and(|last| report.is_of_another_life(last)) {
                self.begins_anew(worker.id);
            }
            let last = self.reports.get(worker.id);
            let report = report.after(last);
            let before = last.map(|last| (last.kv_blocks, last.block_tokens));
            has_capacity_changed |= before != Some((report.kv_blocks, report.block_tokens));
            self.apply_report(&worker, report, asked_at(&report), mean_prompt);
        }
        if has_capacity_changed {
            self.models_workers.clear();
            self.open_ranks();
        }
        self.believe();
    }

    /// The newest report of a worker, however old.
    pub fn report_of(&self, worker: WorkerId) -> Option<&Report> {
        self.reports.get(worker)
    }

    /// Takes the warnings on reports since the last call; each is given once for each worker.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.reports.warnings)
    }

    fn apply_report(
        &mut self,
        worker: &Rc<Worker>,
        report: Report,
        at: Duration,
        mean_prompt: f64,
    ) {
        self.reports.warn(worker, &report, self.pool.block_tokens);
        let earlier = self.reports.of.get(&worker.id).map(|latest| latest.beyond);
        let beyond = self.beyond(worker, &report, at, mean_prompt);
        let beyond = beyond.after(earlier.unwrap_or_default());
        self.reports
            .of
            .insert(worker.id, LatestReport { report, beyond });
    }

    /// Estimates anew when a report has become stale.
    pub(super) fn expire_reports(&mut self) {
        let now = self.ledger.now();
        if self.reports.next_change.is_some_and(|next| next <= now) {
            self.believe();
        }
    }

    /// Estimates the external load of every worker, including those without a recent report, or any.
    pub(super) fn believe(&mut self) {
        if self.reports.of.is_empty() {
            return;
        }
        let limits = self.limits();
        let Self {
            fleet,
            reports,
            ledger,
            ..
        } = self;
        let reported = |id| reports.of.get(&id).map(|latest| latest.beyond);
        let beliefs = Beliefs::new(fleet, reported, ledger.now(), limits);
        for worker in fleet.workers() {
            set_external(ledger, worker, beliefs.of(worker, reported(worker.id)));
        }
        reports.next_change = beliefs.next_change;
    }

    /// A figure is ignored at an age at which a booking would have expired.
    fn limits(&self) -> FigureLimits {
        let stale_after = self.stale_after();
        let expiry = Duration::from_millis(self.pool.booking_expiry_ms);
        FigureLimits {
            stale_after,
            forgotten_after: expiry.max(stale_after),
        }
    }

    /// The load of a worker's engine beyond this proxy's bookings.
    fn beyond(
        &self,
        worker: &Rc<Worker>,
        report: &Report,
        at: Duration,
        mean_prompt: f64,
    ) -> Beyond {
        let own = self.ledger.worker_load(worker);
        let booked = own.plus(self.ledger.worker_load_elsewhere(worker));
        let requests = report.requests().map(|requests| {
            requests.saturating_sub(as_u32(match worker.role {
                Role::Prefill => booked.prefills,
                // An aggregated request is booked as both.
                Role::Decode | Role::Aggregated => booked.decodes,
            }))
        });
        let prefills = match worker.role {
            Role::Prefill => requests,
            Role::Decode => Some(0),
            Role::Aggregated => report.waiting.map(|waiting| {
                let beyond = waiting.saturating_sub(as_u32(booked.prefills));
                beyond.min(requests.unwrap_or_default())
            }),
        };
        let queued_tokens = prefills.map(|prefills| f64::from(prefills) * mean_prompt);
        let blocks = self.blocks_beyond(worker, report, booked);
        Beyond::reported(at, requests, queued_tokens, blocks)
    }

    /// External KV blocks; 0 on a prefill worker, whose own prompts are not booked as blocks.
    fn blocks_beyond(&self, worker: &Worker, report: &Report, booked: Load) -> Option<f64> {
        if worker.role == Role::Prefill {
            return Some(0.0);
        }
        let capacity = report
            .kv_blocks_of(self.pool.block_tokens)
            .or_else(|| self.known_blocks(worker));
        let used = f64::from(report.kv_use?) * f64::from(capacity?);
        Some((used - booked.decode_blocks as f64).max(0.0))
    }

    /// KV blocks that fit on all ranks, by the worker's source or the pool.
    fn known_blocks(&self, worker: &Worker) -> Option<u32> {
        let of_rank = worker.capacity.kv_blocks.or(self.pool.kv_blocks)?;
        Some(of_rank.saturating_mul(worker.dp_size.max(1)))
    }
}

/// Spreads external load evenly over the ranks of a worker.
fn set_external(ledger: &mut Ledger, worker: &Rc<Worker>, all: ExternalLoad) {
    let ranks = worker.dp_size.max(1);
    let (each, rest) = (all.requests / ranks, all.requests % ranks);
    for (nth, key) in (0..).zip(worker.targets().map(|target: Target| target.key())) {
        let part = ExternalLoad {
            requests: each.saturating_add(u32::from(nth < rest)),
            queued_tokens: all.queued_tokens / f64::from(ranks),
            decode_blocks: all.decode_blocks / f64::from(ranks),
        };
        ledger.set_external(key, part);
    }
}

fn as_u32(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
