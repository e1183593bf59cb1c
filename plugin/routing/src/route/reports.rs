//! Owns the reports of the workers' engines, and the external load derived from them: load that no VM of this proxy has booked.
//!
//! An engine's figures never change a booking. On arrival they are compared with this proxy's bookings on the worker: the
//! excess came from elsewhere, and counts on top until the next report. A worker without reports is not idle: [`beyond`]
//! estimates its load.

mod beyond;

use std::sync::Arc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};

use self::beyond::{Beliefs, Beyond, FigureLimits};
use crate::config::Pool;
use crate::engine_metrics::Figures;
use crate::fleet::{Capacity, Fleet, Role, Target, Worker, WorkerId};
use crate::load::{ExternalLoad, Ledger, Load, as_u32};

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

/// What a report adds to the ones before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    /// Nothing: the last one of its worker is newer.
    Nothing,
    /// Newer figures.
    Figures,
    /// The engine is another process than before.
    AnotherLife,
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

    /// The newest report of a worker, however old.
    pub(super) fn get(&self, worker: WorkerId) -> Option<&Report> {
        self.of.get(&worker).map(|latest| &latest.report)
    }

    pub(super) fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// The capacity of a rank of a worker: from its source, else from its engine's report, else from the pool.
    pub(super) fn capacity(&self, worker: &Worker, pool: &Pool) -> Capacity {
        let reported = || {
            let all = self.get(worker.id)?.kv_blocks_of(pool.block_tokens)?;
            Some(all / worker.dp_size.max(1))
        };
        let own = worker.capacity;
        Capacity {
            kv_blocks: own.kv_blocks.or_else(reported).or(pool.kv_blocks),
            max_model_len: own.max_model_len.or(pool.max_model_len),
            ..own
        }
    }

    /// What a report adds to the ones before.
    pub(super) fn news(&self, report: &Report, stale_after: Duration) -> News {
        let Some(last) = self.get(report.worker) else {
            return News::Figures;
        };
        // A report much older than the last one is from another VM's clock.
        if last.at >= report.at && last.at.saturating_sub(report.at) < stale_after {
            return News::Nothing;
        }
        match report.is_of_another_life(last) {
            true => News::AnotherLife,
            false => News::Figures,
        }
    }

    /// Takes a report from `at` by this VM's clock; `mean_prompt`: tokens of a waiting prompt. Returns whether the
    /// worker's capacity has changed. [`Reports::believe`] must follow.
    pub(super) fn take(
        &mut self,
        worker: &Arc<Worker>,
        report: Report,
        at: Duration,
        mean_prompt: f64,
        pool: &Pool,
        ledger: &Ledger,
    ) -> bool {
        let last = self.of.get(&worker.id);
        let report = report.after(last.map(|last| &last.report));
        let before = last.map(|last| (last.report.kv_blocks, last.report.block_tokens));
        let earlier = last.map(|last| last.beyond).unwrap_or_default();
        let beyond = beyond(worker, &report, at, mean_prompt, pool, ledger).after(earlier);
        self.warn(worker, &report, pool.block_tokens);
        self.of.insert(worker.id, LatestReport { report, beyond });
        before != Some((report.kv_blocks, report.block_tokens))
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

    /// Estimates anew when a report has become stale.
    pub(super) fn expire(&mut self, fleet: &Fleet, pool: &Pool, ledger: &mut Ledger) {
        let now = ledger.now();
        if self.next_change.is_some_and(|next| next <= now) {
            self.believe(fleet, pool, ledger);
        }
    }

    /// Estimates the external load of every worker, including those without a recent report, or any.
    pub(super) fn believe(&mut self, fleet: &Fleet, pool: &Pool, ledger: &mut Ledger) {
        if self.of.is_empty() {
            return;
        }
        let stale_after = stale_after(fleet, pool);
        // A figure is ignored at an age at which a booking would have expired.
        let expiry = Duration::from_millis(pool.booking_expiry_ms);
        let limits = FigureLimits {
            stale_after,
            forgotten_after: expiry.max(stale_after),
        };
        let reported = |id| self.of.get(&id).map(|latest| latest.beyond);
        let beliefs = Beliefs::new(fleet, reported, ledger.now(), limits);
        for worker in fleet.workers() {
            set_external(ledger, worker, beliefs.of(worker, reported(worker.id)));
        }
        self.next_change = beliefs.next_change;
    }
}

/// Age at which an engine's report is stale.
pub(super) fn stale_after(fleet: &Fleet, pool: &Pool) -> Duration {
    let rules = pool.engine_metrics.as_ref();
    rules.map_or(STALE_AFTER, |rules| {
        let workers = fleet.workers().count() as u64;
        let turn_ms = workers.saturating_mul(1000) / u64::from(rules.most_per_second.max(1));
        // With many workers each is polled seldom: its figures must last until the next poll.
        Duration::from_millis(rules.stale_after_ms.max(turn_ms.saturating_mul(2)))
    })
}

/// The load of a worker's engine beyond this proxy's bookings.
fn beyond(
    worker: &Arc<Worker>,
    report: &Report,
    at: Duration,
    mean_prompt: f64,
    pool: &Pool,
    ledger: &Ledger,
) -> Beyond {
    let own = ledger.worker_load(worker);
    let booked = own.plus(ledger.worker_load_elsewhere(worker));
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
    let blocks = blocks_beyond(worker, report, booked, pool);
    Beyond::reported(at, requests, queued_tokens, blocks)
}

/// External KV blocks; 0 on a prefill worker, whose own prompts are not booked as blocks.
fn blocks_beyond(worker: &Worker, report: &Report, booked: Load, pool: &Pool) -> Option<f64> {
    if worker.role == Role::Prefill {
        return Some(0.0);
    }
    // By the worker's source or the pool, over all ranks.
    let known = || {
        let of_rank = worker.capacity.kv_blocks.or(pool.kv_blocks)?;
        Some(of_rank.saturating_mul(worker.dp_size.max(1)))
    };
    let capacity = report.kv_blocks_of(pool.block_tokens).or_else(known);
    let used = f64::from(report.kv_use?) * f64::from(capacity?);
    Some((used - booked.decode_blocks as f64).max(0.0))
}

/// Estimated tokens of a waiting prompt.
pub(super) fn mean_prompt(ledger: &Ledger) -> f64 {
    match ledger.mean_prompt_tokens() {
        mean if mean > 0.0 => mean,
        _ => UNSEEN_PROMPT_TOKENS,
    }
}

/// Spreads external load evenly over the ranks of a worker.
fn set_external(ledger: &mut Ledger, worker: &Arc<Worker>, all: ExternalLoad) {
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
