//! Owns what a worker would cost a request, term by term.
//!
//! The shape, the names and the defaults are those of Dynamo's cost function (routing semantics, C.2). Two things are
//! added. What waits before the prompt is what is thought to be *left* of it now, not what was booked: a prefill under
//! way shrinks at the rate observed on its worker. And where workers differ in that rate, waiting and computing count
//! for as much longer as the worker is slower than all together. So, in units of blocks:
//!
//! ```text
//! wait    = queued_tokens / block_tokens · slowness
//! prefill = max(wait + (prompt_tokens / block_tokens − credit · decay · overlap) · slowness, 0)
//! decode  = decode_blocks + prompt blocks
//! cost    = (prefill_load_scale · prefill + decode + decode_active_request_weight · decodes) · factor
//! ```
//!
//! A prefill worker has no decode term, a decode worker no prefill term.

use serde::Serialize;

use super::{Candidate, Task};
use crate::fleet::Role;

/// Within this ratio two rates are taken for the same: less is noise, and would make one worker of an idle fleet
/// everybody's first choice.
const SAME_RATE: f64 = 1.25;

/// A worker is never thought to be more than this many times slower or quicker than all together.
const MOST_SLOWNESS: f64 = 4.0;

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
    pub decodes: u64,
    /// The factor by what the request prefers.
    pub factor: f64,
    /// The sum. Less is better.
    pub cost: f64,
}

/// The least that is booked on any candidate: the decay of the credit is measured from there.
pub fn least_booked(candidates: &[Candidate<'_>]) -> u64 {
    let booked = candidates.iter().map(|c| c.standing.booked_tokens);
    booked.min().unwrap_or_default()
}

/// What one candidate costs.
pub fn terms(task: &Task<'_>, candidate: &Candidate<'_>, least_booked: u64) -> Terms {
    let weights = task.weights;
    let block = f64::from(task.block_tokens.max(1));
    let standing = &candidate.standing;
    let prompt_blocks = task.prompt_tokens as f64 / block;
    let slowness = slowness(task, candidate);

    let credit_blocks = credit(task, candidate, least_booked);
    let prefill = match (task.role, task.tracking) {
        (Role::Decode, _) | (_, Tracking::DecodeOnly) => 0.0,
        (Role::Prefill | Role::Aggregated, Tracking::Prefill) => {
            let wait = standing.queued_tokens / block * slowness;
            (wait + (prompt_blocks - credit_blocks) * slowness).max(0.0)
        }
    };
    let decode = match (task.role, task.decode_credit) {
        (Role::Prefill, _) => 0.0,
        (Role::Decode, DecodeCredit::Counts) => {
            (standing.decode_blocks + prompt_blocks.ceil() - credit_blocks).max(0.0)
        }
        (Role::Decode | Role::Aggregated, _) => standing.decode_blocks + prompt_blocks.ceil(),
    };
    let requests = match task.role {
        Role::Prefill => 0.0,
        Role::Decode | Role::Aggregated => {
            weights.decode_active_request_weight * standing.decodes as f64
        }
    };
    let sum = weights.prefill_load_scale * prefill + decode + requests;
    Terms {
        booked_tokens: standing.booked_tokens,
        queued_tokens: standing.queued_tokens,
        overlap_blocks: candidate.overlap,
        credit_blocks,
        slowness,
        estimated_wait_ms: wait_ms(task, candidate),
        prefill,
        decode,
        decodes: standing.decodes,
        factor: candidate.factor,
        cost: sum * candidate.factor,
    }
}

/// What the cached blocks are worth: less on a worker that has more booked than the idlest one, where that is wanted.
fn credit(task: &Task<'_>, candidate: &Candidate<'_>, least_booked: u64) -> f64 {
    let decay = task.weights.overlap_score_credit_decay;
    let worth = task.weights.overlap_score_credit * f64::from(candidate.overlap);
    if decay <= 0.0 || task.tracking == Tracking::DecodeOnly {
        return worth;
    }
    let block = f64::from(task.block_tokens.max(1));
    let more = candidate
        .standing
        .booked_tokens
        .saturating_sub(least_booked) as f64
        / block;
    let request = (task.prompt_tokens as f64 / block).max(1.0);
    worth / (1.0 + decay * more / request)
}

fn slowness(task: &Task<'_>, candidate: &Candidate<'_>) -> f64 {
    let (Some(all), Some(own)) = (task.speed, candidate.standing.speed) else {
        return 1.0;
    };
    let ratio = all / own;
    match (1.0 / SAME_RATE..=SAME_RATE).contains(&ratio) {
        true => 1.0,
        false => ratio.clamp(1.0 / MOST_SLOWNESS, MOST_SLOWNESS),
    }
}

fn wait_ms(task: &Task<'_>, candidate: &Candidate<'_>) -> Option<f64> {
    if task.role == Role::Decode {
        return None;
    }
    let speed = candidate.standing.speed.or(task.speed)?;
    Some(candidate.standing.queued_tokens / speed * 1000.0)
}
