//! Owns what a worker would cost a request, term by term.
//!
//! The shape, the names and the defaults are those of Dynamo's cost function (routing semantics, C.2). Two things are
//! added. What waits before the prompt is what is thought to be *left* of it now, not what was booked: a prefill under
//! way shrinks at the pace observed. And where workers differ in that pace, waiting and computing count for as much
//! longer as the worker is slower than the others. So, in units of blocks:
//!
//! ```text
//! prefill = max((queued_tokens + prompt_tokens) / block_tokens − credit · decay · overlap, 0) · slowness
//! decode  = decode_weight + prompt blocks
//! cost    = (prefill_load_scale · prefill + decode + decode_active_request_weight · decodes) · factor
//! ```
//!
//! A prefill worker has no decode term, a decode worker no prefill term. What answers weigh is less than the blocks they hold
//! where their ends are near: those will soon be free.

use serde::Serialize;

use super::{Candidate, Task};
use crate::fleet::Role;
use crate::load::LoadSnapshot;

/// Whether prefill counts in the cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tracking {
    /// It does, where the role has one.
    #[default]
    Prefill,
    /// The caller does not want it to.
    DecodeOnly,
}

/// Whether blocks that a decode worker has cached are worth something to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DecodeCredit {
    /// They are not: it is handed all of the prompt's KV.
    #[default]
    Nothing,
    /// They are: it may run the request whole.
    Counts,
}

/// The terms of one worker's cost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Terms {
    /// Prompt tokens booked on it.
    pub booked_tokens: u64,
    /// What is thought to be left of them.
    pub queued_tokens: f64,
    /// Leading blocks of this prompt that it is thought to hold.
    pub overlap_blocks: u32,
    /// What those are worth, in blocks.
    pub credit_blocks: f64,
    /// How much slower than all together it reads prompts.
    pub slowness: f64,
    /// Milliseconds until this prompt would be read, as far as a rate is known.
    pub estimated_wait_ms: Option<f64>,
    /// The prefill term, in blocks.
    pub prefill: f64,
    /// The decode term, in blocks.
    pub decode: f64,
    /// Requests being decoded.
    pub decodes: u32,
    /// The factor by what the request prefers.
    pub factor: f64,
    /// The sum. Less is better.
    pub cost: f64,
}

/// The least that is booked on any candidate: the decay of the credit is measured from there.
fn least_booked<'c>(candidates: impl Iterator<Item = Candidate<'c>>) -> u64 {
    let booked = candidates.map(|candidate| candidate.standing.booked_tokens);
    booked.min().unwrap_or_default()
}

/// What a task's candidates cost: what is the same for all of them is worked out once.
#[derive(Debug, Clone, Copy)]
pub struct Prices<'a> {
    task: &'a Task<'a>,
    least_booked: u64,
    /// Blocks in one token.
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
        let standing = &candidate.standing;
        Terms {
            booked_tokens: standing.booked_tokens,
            queued_tokens: standing.queued_tokens,
            overlap_blocks: candidate.overlap,
            credit_blocks: self.credit(candidate),
            slowness: candidate.standing.slowness,
            estimated_wait_ms: wait_ms(self.task, candidate),
            prefill: self.prefill(candidate),
            decode: self.decode(candidate),
            decodes: standing.decodes,
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
        let wait = candidate.standing.queued_tokens * self.per_token;
        let work = self.prompt_blocks - self.credit(candidate);
        ((wait + work) * candidate.standing.slowness).max(0.0)
    }

    #[inline]
    fn decode(&self, candidate: &Candidate<'_>) -> f64 {
        let used = candidate.standing.decode_weight + self.prompt_blocks_whole;
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
                self.task.weights.decode_active_request_weight * decodes(&candidate.standing)
            }
        }
    }

    /// What the cached blocks are worth: less on a worker that has more booked than the idlest one, where that is wanted.
    #[inline]
    fn credit(&self, candidate: &Candidate<'_>) -> f64 {
        let weights = &self.task.weights;
        let worth = weights.overlap_score_credit * f64::from(candidate.overlap);
        let decay = weights.overlap_score_credit_decay;
        if decay <= 0.0 || self.task.tracking == Tracking::DecodeOnly {
            return worth;
        }
        let booked = candidate.standing.booked_tokens;
        let more = booked.saturating_sub(self.least_booked) as f64 * self.per_token;
        worth / (1.0 + decay * more / self.prompt_blocks.max(1.0))
    }
}

/// Requests being decoded: what an engine has from elsewhere is taken to be that.
#[inline]
fn decodes(standing: &LoadSnapshot) -> f64 {
    f64::from(standing.decodes.saturating_add(standing.foreign_requests))
}

fn wait_ms(task: &Task<'_>, candidate: &Candidate<'_>) -> Option<f64> {
    if task.role == Role::Decode {
        return None;
    }
    let standing = &candidate.standing;
    let seconds = standing.queued_tokens * task.pace?.per_token * standing.slowness;
    Some(seconds * 1000.0)
}
