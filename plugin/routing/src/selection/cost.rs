//! Owns the cost of a worker for a request, term by term.
//!
//! The shape, names and defaults are those of Dynamo's cost function (routing semantics, C.2), with two additions. The work ahead
//! of the prompt is the estimated work *left* now, not the work booked: a prefill under way shrinks at the observed prefill rate.
//! And where prefill rates differ, waiting and computing are multiplied by the worker's slowness. In units of blocks:
//!
//! ```text
//! prefill = max((queued_tokens + prompt_tokens) / block_tokens − credit · decay · overlap, 0) · slowness
//! decode  = decode_weight + prompt blocks
//! cost    = (prefill_load_scale · prefill + decode + decode_active_request_weight · decodes) · factor
//! ```
//!
//! A prefill worker has no decode term, a decode worker no prefill term. Answers weigh less than the blocks they hold where
//! their end is near: those blocks will soon be free.

use serde::Serialize;

use super::{Candidate, Task};
use crate::fleet::Role;
use crate::load::LoadSnapshot;

/// Whether prefill counts in the cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tracking {
    /// Prefill counts, where the role has a prefill term.
    #[default]
    Prefill,
    /// The caller excludes prefill.
    DecodeOnly,
}

/// Whether blocks cached on a decode worker lower its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DecodeCredit {
    /// They do not: the worker is handed all of the prompt's KV.
    #[default]
    Nothing,
    /// They do: the worker may run the request aggregated.
    Counts,
}

/// The terms of one worker's cost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Terms {
    /// Prompt tokens booked on the worker.
    pub booked_tokens: u64,
    /// Estimated rest of these tokens.
    pub queued_tokens: f64,
    /// Leading blocks of this prompt that the worker is estimated to hold.
    pub overlap_blocks: u32,
    /// Credit for these blocks, in blocks.
    pub credit_blocks: f64,
    /// How many times slower the worker reads prompts than all together.
    pub slowness: f64,
    /// Estimated milliseconds until the worker reads this prompt, if a prefill rate is known.
    pub estimated_wait_ms: Option<f64>,
    /// The prefill term, in blocks.
    pub prefill: f64,
    /// The decode term, in blocks.
    pub decode: f64,
    /// Requests being decoded.
    pub decodes: u32,
    /// Factor for the request's preferences.
    pub factor: f64,
    /// The sum. Less is better.
    pub cost: f64,
}

/// The fewest tokens booked on any candidate: the decay of the credit is measured from there.
fn least_booked<'c>(candidates: impl Iterator<Item = Candidate<'c>>) -> u64 {
    let booked = candidates.map(|candidate| candidate.snapshot.booked_tokens);
    booked.min().unwrap_or_default()
}

/// Prices of a task's candidates: parts common to all are computed once.
#[derive(Debug, Clone, Copy)]
pub struct Prices<'a> {
    task: &'a Task<'a>,
    least_booked: u64,
    /// Blocks per token.
    per_token: f64,
    prompt_blocks: f64,
    prompt_blocks_whole: f64,
}

impl<'a> Prices<'a> {
    /// The prices for `task` among these candidates.
    pub fn new<'c>(task: &'a Task<'a>, candidates: impl Iterator<Item = Candidate<'c>>) -> Self {
        let per_token = 1.0 / f64::from(task.block_tokens.max(1));
        let prompt_blocks = task.prompt_tokens as f64 * per_token;
        let least_booked = match task.weights.overlap_score_credit_decay > 0.0 {
            true => least_booked(candidates),
            false => 0,
        };
        Self {
            task,
            least_booked,
            per_token,
            prompt_blocks,
            prompt_blocks_whole: prompt_blocks.ceil(),
        }
    }

    /// The cost of one candidate. Less is better.
    #[inline]
    pub fn cost(&self, candidate: &Candidate<'_>) -> f64 {
        let weights = &self.task.weights;
        let sum = weights.prefill_load_scale * self.prefill(candidate)
            + self.decode(candidate)
            + self.requests(candidate);
        sum * candidate.factor
    }

    /// The same, term by term.
    pub fn terms(&self, candidate: &Candidate<'_>) -> Terms {
        let snapshot = &candidate.snapshot;
        Terms {
            booked_tokens: snapshot.booked_tokens,
            queued_tokens: snapshot.queued_tokens,
            overlap_blocks: candidate.overlap,
            credit_blocks: self.credit(candidate),
            slowness: candidate.snapshot.slowness,
            estimated_wait_ms: wait_ms(self.task, candidate),
            prefill: self.prefill(candidate),
            decode: self.decode(candidate),
            decodes: snapshot.decodes,
            factor: candidate.factor,
            cost: self.cost(candidate),
        }
    }

    #[inline]
    fn prefill(&self, candidate: &Candidate<'_>) -> f64 {
        let counts = self.task.role != Role::Decode && self.task.tracking == Tracking::Prefill;
        if !counts {
            return 0.0;
        }
        let wait = candidate.snapshot.queued_tokens * self.per_token;
        let work = self.prompt_blocks - self.credit(candidate);
        ((wait + work) * candidate.snapshot.slowness).max(0.0)
    }

    #[inline]
    fn decode(&self, candidate: &Candidate<'_>) -> f64 {
        let used = candidate.snapshot.decode_weight + self.prompt_blocks_whole;
        match (self.task.role, self.task.decode_credit) {
            (Role::Prefill, _) => 0.0,
            (Role::Decode, DecodeCredit::Counts) => (used - self.credit(candidate)).max(0.0),
            (Role::Decode | Role::Aggregated, _) => used,
        }
    }

    #[inline]
    fn requests(&self, candidate: &Candidate<'_>) -> f64 {
        match self.task.role {
            Role::Prefill => 0.0,
            Role::Decode | Role::Aggregated => {
                self.task.weights.decode_active_request_weight * decodes(&candidate.snapshot)
            }
        }
    }

    /// Credit for cached blocks, in blocks: with a decay configured, less on a worker with more booked than the idlest.
    #[inline]
    fn credit(&self, candidate: &Candidate<'_>) -> f64 {
        let weights = &self.task.weights;
        let worth = weights.overlap_score_credit * f64::from(candidate.overlap);
        let decay = weights.overlap_score_credit_decay;
        if decay <= 0.0 || self.task.tracking == Tracking::DecodeOnly {
            return worth;
        }
        let booked = candidate.snapshot.booked_tokens;
        let more = booked.saturating_sub(self.least_booked) as f64 * self.per_token;
        worth / (1.0 + decay * more / self.prompt_blocks.max(1.0))
    }
}

/// Requests being decoded; the engine's external requests count as such.
#[inline]
fn decodes(snapshot: &LoadSnapshot) -> f64 {
    f64::from(snapshot.decodes.saturating_add(snapshot.external_requests))
}

fn wait_ms(task: &Task<'_>, candidate: &Candidate<'_>) -> Option<f64> {
    if task.role == Role::Decode {
        return None;
    }
    let snapshot = &candidate.snapshot;
    let seconds = snapshot.queued_tokens * task.rate?.per_token * snapshot.slowness;
    Some(seconds * 1000.0)
}
