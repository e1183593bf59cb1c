//! Owns what the workers' engines tell of themselves, and what of it nobody here has booked.
//!
//! An engine's figures never change a booking. They are compared with what this proxy has booked on the worker at the moment
//! they are heard: what the engine has beyond that came from elsewhere, and counts on top until the next report. A report
//! that is too old tells nothing, which is not the same as an idle worker.

use std::rc::Rc;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};

use super::Router;
use crate::engine_metrics::Figures;
use crate::fleet::{Fleet, Role, Target, Worker, WorkerId};
use crate::load::{Foreign, Load};

/// Times of one start that differ by no more are the same: some engines work theirs out from how long they have run.
const SAME_START: Duration = Duration::from_secs(1);

/// How old a report may be where the pool does not say, since it asks for none itself.
const STALE_AFTER: Duration = Duration::from_secs(5);

/// Figures of one worker's engine, of all its ranks together; a figure that is not there is not known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Report {
    /// The worker.
    pub worker: WorkerId,
    /// When it was asked, since 1970.
    pub at: Duration,
    /// When its engine started, since 1970.
    pub started: Option<Duration>,
    /// Requests that wait.
    pub waiting: Option<u32>,
    /// Requests that it computes.
    pub running: Option<u32>,
    /// The part of its KV cache that is in use, from 0 to 1.
    pub kv_use: Option<f32>,
    /// KV blocks that fit, in its own blocks.
    pub kv_blocks: Option<u32>,
    /// Tokens in one of its blocks.
    pub block_tokens: Option<u32>,
}

impl Report {
    /// What a worker's engine has told `at` that time, since 1970.
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

    /// Whether the engine is another process than the one that told `earlier`.
    fn is_of_another_life(&self, earlier: &Self) -> bool {
        let lives = self.started.zip(earlier.started);
        lives.is_some_and(|(now, before)| now.abs_diff(before) > SAME_START)
    }

    /// What does not change in a worker's life is taken over from an earlier report where this one lacks it.
    fn after(self, earlier: Option<&Self>) -> Self {
        Self {
            started: self.started.or(earlier.and_then(|it| it.started)),
            kv_blocks: self.kv_blocks.or(earlier.and_then(|it| it.kv_blocks)),
            block_tokens: self.block_tokens.or(earlier.and_then(|it| it.block_tokens)),
            ..self
        }
    }

    /// KV blocks that fit, in blocks of so many tokens.
    fn kv_blocks_of(&self, block_tokens: u32) -> Option<u32> {
        let own = u64::from(self.kv_blocks?);
        let size = u64::from(self.block_tokens.unwrap_or(block_tokens));
        let tokens = own.saturating_mul(size);
        u32::try_from(tokens.checked_div(block_tokens.into())?).ok()
    }

    fn requests(&self) -> u32 {
        let (waiting, running) = (self.waiting.unwrap_or(0), self.running.unwrap_or(0));
        waiting.saturating_add(running)
    }
}

/// A report, and whether what it tells of load still counts.
#[derive(Debug)]
struct Heard {
    report: Report,
    counts: bool,
}

/// The newest report of each worker.
#[derive(Debug, Default)]
pub(super) struct Reports {
    of: HashMap<WorkerId, Heard>,
    /// When the next of those that count is too old.
    next_stale: Option<Duration>,
    warned: HashSet<WorkerId>,
    warnings: Vec<String>,
}

impl Reports {
    /// Forgets workers that left.
    pub(super) fn keep(&mut self, fleet: &Fleet) {
        self.of.retain(|id, _| fleet.contains(*id));
        self.warned.retain(|id| fleet.contains(*id));
    }

    /// KV blocks that fit on one rank of a worker, in blocks of so many tokens, if its engine has told.
    pub(super) fn kv_blocks_of_rank(&self, worker: &Worker, block_tokens: u32) -> Option<u32> {
        let report = self.get(worker.id)?;
        let all = report.kv_blocks_of(block_tokens)?;
        Some(all / worker.dp_size.max(1))
    }

    fn get(&self, worker: WorkerId) -> Option<&Report> {
        self.of.get(&worker).map(|heard| &heard.report)
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
    /// How old an engine's report may be to tell anything.
    pub fn stale_after(&self) -> Duration {
        let rules = self.pool.engine_metrics.as_ref();
        rules.map_or(STALE_AFTER, |rules| {
            let workers = self.fleet.workers().count() as u64;
            let turn_ms = workers.saturating_mul(1000) / u64::from(rules.most_per_second.max(1));
            // Where there are so many workers that each has its turn seldom, its figures must last until the next one.
            Duration::from_millis(rules.stale_after_ms.max(turn_ms.saturating_mul(2)))
        })
    }

    /// What engines tell of themselves. Only a report that is newer than the last one of its worker counts.
    pub fn hear_reports(&mut self, reports: &[Report]) {
        let mean_prompt = self.ledger.mean_prompt_tokens();
        let stale_after = self.stale_after();
        let mut has_capacity_changed = false;
        for report in reports {
            let Some(worker) = self.fleet.get(report.worker).cloned() else {
                continue;
            };
            let last = self.reports.get(worker.id);
            // A report from long before the last one is one from after the clock was set back.
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
            self.hear_report(&worker, report, mean_prompt);
        }
        if has_capacity_changed {
            self.rosters.clear();
            self.open_ranks();
        }
    }

    /// The newest report of a worker, however old.
    pub fn report_of(&self, worker: WorkerId) -> Option<&Report> {
        self.reports.get(worker)
    }

    /// What is wrong with what was reported, since this was last asked; each told once for each worker.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.reports.warnings)
    }

    fn hear_report(&mut self, worker: &Rc<Worker>, report: Report, mean_prompt: f64) {
        self.reports.warn(worker, &report, self.pool.block_tokens);
        let stale_at = report.at.saturating_add(self.stale_after());
        let counts = stale_at > self.ledger.now();
        let next = self.reports.next_stale;
        if counts {
            let first = next.map_or(stale_at, |next| next.min(stale_at));
            self.reports.next_stale = Some(first);
        }
        self.reports.of.insert(worker.id, Heard { report, counts });
        let foreign = match counts {
            true => self.foreign(worker, &report, mean_prompt),
            false => Foreign::default(),
        };
        self.set_foreign(worker, foreign);
    }

    /// Reports that have become too old count no more.
    pub(super) fn expire_reports(&mut self) {
        let now = self.ledger.now();
        if self.reports.next_stale.is_none_or(|next| now < next) {
            return;
        }
        let stale_after = self.stale_after();
        let mut next: Option<Duration> = None;
        let mut silent = Vec::new();
        for (id, heard) in &mut self.reports.of {
            let stale_at = heard.report.at.saturating_add(stale_after);
            if heard.counts && stale_at <= now {
                heard.counts = false;
                silent.push(*id);
            } else if heard.counts {
                next = Some(next.map_or(stale_at, |next| next.min(stale_at)));
            }
        }
        self.reports.next_stale = next;
        for id in silent {
            if let Some(worker) = self.fleet.get(id).cloned() {
                self.set_foreign(&worker, Foreign::default());
            }
        }
    }

    /// What a worker's engine has beyond what this proxy has booked on it.
    fn foreign(&self, worker: &Rc<Worker>, report: &Report, mean_prompt: f64) -> Foreign {
        let own = self.ledger.worker_load(worker);
        let booked = own.plus(self.ledger.worker_load_elsewhere(worker));
        let requests = report.requests().saturating_sub(as_u32(match worker.role {
            Role::Prefill => booked.prefills,
            // A request that runs whole is booked as both.
            Role::Decode | Role::Aggregated => booked.decodes,
        }));
        let prefills = match worker.role {
            Role::Prefill => requests,
            Role::Decode => 0,
            Role::Aggregated => {
                let waiting = report.waiting.unwrap_or(0);
                waiting
                    .saturating_sub(as_u32(booked.prefills))
                    .min(requests)
            }
        };
        Foreign {
            requests,
            queued_tokens: f64::from(prefills) * mean_prompt,
            decode_blocks: self.foreign_blocks(worker, report, booked),
        }
    }

    /// On a prefill worker there are none: what its own prompts take is not booked as blocks.
    fn foreign_blocks(&self, worker: &Worker, report: &Report, booked: Load) -> f64 {
        let capacity = report
            .kv_blocks_of(self.pool.block_tokens)
            .or_else(|| self.known_blocks(worker));
        let (Some(used), Some(blocks)) = (report.kv_use, capacity) else {
            return 0.0;
        };
        if worker.role == Role::Prefill {
            return 0.0;
        }
        (f64::from(used) * f64::from(blocks) - booked.decode_blocks as f64).max(0.0)
    }

    /// KV blocks that fit on all ranks, as the worker's source or the pool says.
    fn known_blocks(&self, worker: &Worker) -> Option<u32> {
        let of_rank = worker.capacity.kv_blocks.or(self.pool.kv_blocks)?;
        Some(of_rank.saturating_mul(worker.dp_size.max(1)))
    }

    /// The ranks of a worker share it evenly.
    fn set_foreign(&mut self, worker: &Rc<Worker>, all: Foreign) {
        let ranks = worker.dp_size.max(1);
        let (each, rest) = (all.requests / ranks, all.requests % ranks);
        for (nth, key) in (0..).zip(worker.targets().map(|target: Target| target.key())) {
            let part = Foreign {
                requests: each.saturating_add(u32::from(nth < rest)),
                queued_tokens: all.queued_tokens / f64::from(ranks),
                decode_blocks: all.decode_blocks / f64::from(ranks),
            };
            self.ledger.set_foreign(key, part);
        }
    }
}

fn as_u32(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
