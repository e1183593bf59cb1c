//! Owns what this router tells its like in other VMs, and what it hears of them: load, and who was given which prompt.

use std::rc::Rc;

use super::Router;
use super::choice::Chosen;
use crate::fleet::{Role, TargetKey, Worker};
use crate::load::{Load, PrefillRate, ThreadLoad};
use crate::prefix::index::Index;
use crate::prefix::{Blocks, Decision, MOST_BLOCKS_TOLD};

/// Decisions that may wait to be taken: those of a second of one busy thread.
const MOST_PENDING: usize = 4096;

/// The decisions that others are to hear of.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// None: nobody asks for them.
    pending: Option<Vec<Decision>>,
    dropped: u64,
}

impl Kept {
    /// A rank was given this prompt, the last `added` blocks of which are new to it.
    fn add(&mut self, key: TargetKey, blocks: &Blocks, added: u32) {
        let Some(pending) = &mut self.pending else {
            return;
        };
        let known = blocks.sequence.len().saturating_sub(added as usize);
        if added == 0 || known >= MOST_BLOCKS_TOLD {
            return;
        }
        if pending.len() >= MOST_PENDING {
            self.dropped = self.dropped.saturating_add(1);
            return;
        }
        pending.push(Decision {
            key,
            path: Index::path(blocks, MOST_BLOCKS_TOLD),
        });
    }
}

impl Router {
    /// What is booked here, of every worker rank that has anything; what is left of its prompts as it is thought now. To be
    /// told to other VMs.
    pub fn shares(&self) -> Vec<ThreadLoad> {
        if self.ledger.total().is_idle() {
            return Vec::new();
        }
        let mut paces: Vec<(Option<PrefillRate>, f64)> = Vec::new();
        // A decode worker reads prompts only where it runs whole requests, and is among those then.
        for role in [Role::Prefill, Role::Aggregated] {
            for roster in self.rosters.values() {
                let (pace, slowness) = roster.pace(role, &self.ledger);
                for (member, slowness) in roster.of_role(role).iter().zip(slowness.iter()) {
                    if member.slot >= paces.len() {
                        paces.resize(member.slot.saturating_add(1), (None, 1.0));
                    }
                    if let Some(place) = paces.get_mut(member.slot) {
                        *place = (pace, f64::from(*slowness));
                    }
                }
            }
        }
        let pace_of = |slot: usize| paces.get(slot).copied().unwrap_or((None, 1.0));
        self.ledger.shares(pace_of)
    }

    /// What all other VMs have booked, in place of what was heard before: choices, thresholds and back-pressure count it with
    /// what is booked here. Ranks that are not known here are passed over.
    pub fn hear_shares(&mut self, others: &[ThreadLoad]) {
        self.ledger.hear_shares(others);
    }

    /// What other VMs have booked on a worker, on all its ranks together, as far as they have told.
    pub fn worker_load_elsewhere(&self, worker: &Rc<Worker>) -> Load {
        self.ledger.worker_load_elsewhere(worker)
    }

    /// From now on decisions are kept for [`Router::take_decisions`], those that were new to the worker.
    pub fn keep_decisions(&mut self) {
        self.kept.pending.get_or_insert_default();
    }

    /// The decisions since this was last asked. To be told to other VMs.
    pub fn take_decisions(&mut self) -> Vec<Decision> {
        let pending = self.kept.pending.as_mut();
        pending.map(std::mem::take).unwrap_or_default()
    }

    /// Decisions that were not kept, since nobody took those before them.
    pub fn dropped_decisions(&self) -> u64 {
        self.kept.dropped
    }

    /// Another VM has decided so: what the worker will hold is remembered, and told to nobody. A rank that is not known here is
    /// passed over.
    pub fn hear_decision(&mut self, decision: &Decision) {
        if let Some(opened) = self.opened.get(&decision.key) {
            let now = self.ledger.now();
            self.prefixes.learn_path(opened.slot, &decision.path, now);
        }
    }

    /// What was chosen will hold these blocks.
    pub(super) fn remember(&mut self, chosen: &Chosen, blocks: &Blocks) {
        let added = self.prefixes.learn(chosen.slot, blocks, self.ledger.now());
        self.kept.add(chosen.key(), blocks, added);
    }
}
