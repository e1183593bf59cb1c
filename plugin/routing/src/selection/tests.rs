//! Tests of the policies, and what they share: targets, loads, tasks.

use std::rc::Rc;

use super::*;
use crate::fleet::{Worker, WorkerId};

static NO_BLOCKS: Blocks = Blocks {
    scope: 0,
    sequence: Vec::new(),
};

/// A prompt of 1,000 tokens of which nothing is known.
pub const TASK: Task<'static> = Task {
    role: Role::Prefill,
    prompt_tokens: 1000,
    block_tokens: 16,
    blocks: &NO_BLOCKS,
    session: None,
    weights: KvWeights {
        overlap_score_credit: 1.0,
        overlap_score_credit_decay: 0.0,
        prefill_load_scale: 1.0,
        decode_active_request_weight: 0.0,
        router_temperature: 0.0,
    },
    tracking: Tracking::Prefill,
    decode_credit: DecodeCredit::Nothing,
    speed: None,
};

/// Workers of these ids.
pub fn targets(ids: std::ops::Range<u64>) -> Vec<Target> {
    let worker = |id: u64| Worker {
        id: WorkerId(id),
        name: id.to_string(),
        address: None,
        role: Role::Prefill,
        model: None,
        namespace: String::new(),
        dp_size: 1,
        set: String::new(),
        bootstrap_port: None,
        topology: None,
        capacity: Default::default(),
        adapters: Vec::new(),
    };
    ids.map(|id| Target::whole(&Rc::new(worker(id)))).collect()
}

/// Candidates on which nothing is booked.
pub fn idle(targets: &[Target]) -> Vec<Candidate<'_>> {
    let candidate = |target| Candidate {
        target,
        standing: Standing::default(),
        overlap: 0,
        factor: 1.0,
    };
    targets.iter().map(candidate).collect()
}
