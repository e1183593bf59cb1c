//! Owns what has been decided since it was last asked, as counts: who was picked, and what of prompts' prefixes was possible and
//! was chosen.

use std::collections::BTreeMap;
use std::rc::Rc;

use hashbrown::HashMap;

use super::Router;
use super::ask::SelectionContext;
use super::choice::Chosen;
use crate::fleet::{Role, Worker, WorkerId};

/// Counts of decisions.
#[derive(Debug, Default)]
pub struct Tally {
    /// Full KV blocks of the prompts for which a worker that reads them was picked.
    pub prompt_blocks: u64,
    /// Leading blocks of them that some worker was thought to hold, of all who could have been picked.
    pub possible_blocks: u64,
    /// Leading blocks of them that the worker which was picked was thought to hold.
    pub chosen_blocks: u64,
    /// Bytes of requests' bodies that were read.
    pub body_bytes: u64,
    /// How many of these prompts were thought to be held so far by the worker that was picked, by whole percents of their blocks.
    pub hits: BTreeMap<u8, u64>,
    /// How often each worker was picked.
    pub picks: HashMap<(WorkerId, Role), Picks>,
}

/// Picks of one worker.
#[derive(Debug)]
pub struct Picks {
    /// The worker.
    pub worker: Rc<Worker>,
    /// How often it was.
    pub count: u64,
}

/// What a request is counted under when it ends.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The model that it was routed to, which workers serve; none: it was not, or its interface names none.
    pub model: Option<Rc<str>>,
    /// Tokens of its prompt, as the router counts them: exact where they came as ids.
    pub prompt_tokens: u64,
}

impl Tally {
    /// A body of so many bytes is read.
    pub(super) fn read(&mut self, bytes: usize) {
        self.body_bytes = self.body_bytes.saturating_add(bytes as u64);
    }
}

impl Router {
    /// What has been counted since this was last asked.
    pub fn take_tally(&mut self) -> Tally {
        std::mem::take(&mut self.tally)
    }

    /// A worker is taken for a request.
    pub(super) fn count(&mut self, role: Role, case: &SelectionContext<'_>, chosen: &Chosen) {
        let worker = &chosen.target.worker;
        let picks = self.tally.picks.entry((worker.id, role));
        let picks = picks.or_insert_with(|| Picks {
            worker: Rc::clone(worker),
            count: 0,
        });
        picks.count = picks.count.saturating_add(1);
        // The prompt is read once, by whoever prefills.
        if role == Role::Decode || case.asked.blocks.sequence.is_empty() {
            return;
        }
        let blocks = u64::from(case.asked.blocks.count());
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
