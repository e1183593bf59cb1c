//! Owns what this router exchanges with those of other VMs: load, and decisions on which worker was sent which prompt.

use std::rc::Rc;

use super::Router;
use super::choice::Chosen;
use crate::fleet::{Role, TargetKey, Worker};
use crate::load::{Load, PrefillRate, ThreadLoad};
use crate::prefix::index::Index;
use crate::prefix::{Blocks, Decision, MOST_BLOCKS_TOLD};

/// Decisions pending at most: those of a second of one busy thread.
const MOST_PENDING: usize = 4096;

/// The decisions to be shared with other VMs.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// None: decisions are not shared.
    pending: Option<Vec<Decision>>,
}

impl Kept {
    /// Records that a rank was sent this prompt, the last `added` hashes of which are new to it.
    fn add(&mut self, key: TargetKey, blocks: &Blocks, added: u32) {
        let Some(pending) = &mut self.pending else {
            return;
        };
        let known = blocks.sequence.len().saturating_sub(added as usize);
        if added == 0 || known >= MOST_BLOCKS_TOLD {
            return;
        }
        if pending.len() >= MOST_PENDING {
            return;
        }
        pending.push(Decision {
            key,
            path: Index::path(blocks, MOST_BLOCKS_TOLD),
        });
    }
}

impl Router {
    /// This VM's bookings on every worker rank that has any, with the estimated tokens left now. To be shared with other VMs.
    pub fn shares(&self) -> Vec<ThreadLoad> {
        if self.ledger.total().is_idle() {
            return Vec::new();
        }
        let mut rates: Vec<(Option<PrefillRate>, f64)> = Vec::new();
        // A decode worker reads prompts only if it runs requests aggregated, and is then listed for that role.
        for role in [Role::Prefill, Role::Aggregated] {
            for model_workers in self.models_workers.values() {
                let (rate, slowness) = model_workers.rate(role, &self.ledger);
                for (member, slowness) in model_workers.of_role(role).iter().zip(slowness.iter()) {
                    if member.slot >= rates.len() {
                        rates.resize(member.slot.saturating_add(1), (None, 1.0));
                    }
                    if let Some(place) = rates.get_mut(member.slot) {
                        *place = (rate, f64::from(*slowness));
                    }
                }
            }
        }
        let rate_of = |slot: usize| rates.get(slot).copied().unwrap_or((None, 1.0));
        self.ledger.shares(rate_of)
    }

    /// Replaces the bookings of all other VMs: choices, thresholds and back-pressure add them to this VM's own. Ranks
    /// unknown here are skipped.
    pub fn apply_shares(&mut self, others: &[ThreadLoad]) {
        self.ledger.apply_shares(others);
    }

    /// Bookings of other VMs on a worker, over all its ranks, as last received.
    pub fn worker_load_elsewhere(&self, worker: &Rc<Worker>) -> Load {
        self.ledger.worker_load_elsewhere(worker)
    }

    /// Starts to keep decisions for [`Router::take_decisions`], those that were new to the worker.
    pub fn keep_decisions(&mut self) {
        self.kept.pending.get_or_insert_default();
    }

    /// Takes the decisions since the last call. To be shared with other VMs.
    pub fn take_decisions(&mut self) -> Vec<Decision> {
        let pending = self.kept.pending.as_mut();
        pending.map(std::mem::take).unwrap_or_default()
    }

    /// Records a decision of another VM in the prefix index, without sharing it again. A rank unknown here is skipped.
    pub fn apply_decision(&mut self, decision: &Decision) {
        if let Some(opened) = self.opened.get(&decision.key) {
            let now = self.ledger.now();
            self.prefixes.learn_path(opened.slot, &decision.path, now);
        }
    }

    /// Records that the chosen rank will hold these blocks.
    pub(super) fn remember(&mut self, chosen: &Chosen, blocks: &Blocks) {
        let added = self.prefixes.learn(chosen.slot, blocks, self.ledger.now());
        self.kept.add(chosen.key(), blocks, added);
    }
}
