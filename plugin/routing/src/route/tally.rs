//! Owns the counts of decisions since they were last taken: picks of each worker, and the possible and chosen overlap of
//! prompts' prefixes.

use std::collections::BTreeMap;
use std::rc::Rc;

use hashbrown::HashMap;

use super::Router;
use super::choice::Chosen;
use super::selection_request::SelectionContext;
use crate::fleet::{Role, Worker, WorkerId};

/// Counts of decisions.
#[derive(Debug, Default)]
pub struct Tally {
    /// Full KV blocks of the prompts for which a worker that reads prompts was picked.
    pub prompt_blocks: u64,
    /// Leading blocks of these prompts that some eligible worker was estimated to hold.
    pub possible_blocks: u64,
    /// Leading blocks of these prompts that the picked worker was estimated to hold.
    pub chosen_blocks: u64,
    /// Bytes of request bodies read.
    pub body_bytes: u64,
    /// Number of these prompts by the part of their blocks that the picked worker was estimated to hold, in whole percents.
    pub hits: BTreeMap<u8, u64>,
    /// How often each worker was picked.
    pub picks: HashMap<(WorkerId, Role), Picks>,
}

/// Picks of one worker.
#[derive(Debug)]
pub struct Picks {
    /// The worker.
    pub worker: Rc<Worker>,
    /// Number of picks.
    pub count: u64,
}

/// What a request is counted under when it ends.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The model that it was routed to, as served by workers; none: not routed, or its API names no model.
    pub model: Option<Rc<str>>,
    /// Tokens of its prompt, as the router counts them: exact if they came as ids.
    pub prompt_tokens: u64,
}

impl Tally {
    /// Counts a body that was read.
    pub(super) fn read(&mut self, bytes: usize) {
        self.body_bytes = self.body_bytes.saturating_add(bytes as u64);
    }
}

impl Router {
    /// Takes the counts since the last call.
    pub fn take_tally(&mut self) -> Tally {
        std::mem::take(&mut self.tally)
    }

    /// Counts a worker taken for a request.
    pub(super) fn count(&mut self, role: Role, context: &SelectionContext<'_>, chosen: &Chosen) {
        let worker = &chosen.target.worker;
        let picks = self.tally.picks.entry((worker.id, role));
        let picks = picks.or_insert_with(|| Picks {
            worker: Rc::clone(worker),
            count: 0,
        });
        picks.count = picks.count.saturating_add(1);
        // The prompt is read once, by the worker that prefills.
        if role == Role::Decode || context.demand.blocks.sequence.is_empty() {
            return;
        }
        let blocks = u64::from(context.demand.blocks.count());
        let Tally {
            prompt_blocks,
            possible_blocks,
            chosen_blocks,
            hits,
            ..
        } = &mut self.tally;
        let percent = u64::from(chosen.overlap).saturating_mul(100) / blocks.max(1);
        let hit = hits.entry(percent.min(100) as u8).or_default();
        *hit = hit.saturating_add(1);
        *prompt_blocks = prompt_blocks.saturating_add(blocks);
        *possible_blocks = possible_blocks.saturating_add(u64::from(chosen.possible));
        *chosen_blocks = chosen_blocks.saturating_add(u64::from(chosen.overlap));
    }
}
