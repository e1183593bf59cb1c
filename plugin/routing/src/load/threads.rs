//! Owns the load of a worker rank beyond this VM's own bookings: the bookings of the proxy's other VMs, and the engine's
//! external load, which no VM of this proxy has booked.
//!
//! Own, shared and external load are three separate numbers, and none is ever corrected by another. A choice reads their sum.

use std::sync::Arc;

use super::answer::{Occupied, PARTS};
use super::table::Load;
use super::{Ledger, PrefillRate};
use crate::fleet::{Target, TargetKey, Worker};

/// Bookings of one VM, or of several together, on a worker rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadLoad {
    /// The rank.
    pub key: TargetKey,
    /// Prompt tokens booked.
    pub booked_tokens: u64,
    /// Estimated rest of these tokens, including each prompt's overhead, in tokens.
    pub queued_tokens: u64,
    /// Prefills under way.
    pub prefills: u32,
    /// Blocks and weight of requests being decoded.
    pub decoding: Occupied,
    /// Requests being decoded.
    pub decodes: u32,
}

impl ThreadLoad {
    /// No bookings on that rank.
    pub fn nothing(key: TargetKey) -> Self {
        Self {
            key,
            booked_tokens: 0,
            queued_tokens: 0,
            prefills: 0,
            decoding: Occupied::default(),
            decodes: 0,
        }
    }

    /// Adds another VM's bookings on the same rank.
    pub fn add(&mut self, other: &Self) {
        self.booked_tokens = self.booked_tokens.saturating_add(other.booked_tokens);
        self.queued_tokens = self.queued_tokens.saturating_add(other.queued_tokens);
        self.prefills = self.prefills.saturating_add(other.prefills);
        self.decoding = self.decoding.plus(other.decoding);
        self.decodes = self.decodes.saturating_add(other.decodes);
    }

    fn load(&self) -> Load {
        Load {
            prefill_tokens: self.booked_tokens,
            prefills: self.prefills.into(),
            decode_blocks: self.decoding.blocks,
            decode_weight: self.decoding.weight.div_ceil(PARTS),
            decodes: self.decodes.into(),
        }
    }
}

/// Load of an engine on one rank that no VM of this proxy has booked.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExternalLoad {
    /// Requests.
    pub requests: u32,
    /// Prompt tokens estimated to wait.
    pub queued_tokens: f64,
    /// KV blocks in use.
    pub decode_blocks: f64,
}

/// All load of a rank beyond this VM's bookings.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ThreadLoads {
    pub(super) shared: Option<ThreadLoad>,
    pub(super) external: ExternalLoad,
}

impl ThreadLoads {
    /// Bookings of other VMs.
    pub(super) fn load(&self) -> Load {
        self.shared
            .as_ref()
            .map(ThreadLoad::load)
            .unwrap_or_default()
    }

    /// The same plus the external load, whose kind is unknown and which counts as decode.
    pub(super) fn load_with_external(&self) -> Load {
        self.load().plus(Load {
            decode_blocks: self.external.decode_blocks.ceil() as u64,
            decode_weight: self.external.decode_blocks.ceil() as u64,
            decodes: self.external.requests.into(),
            ..Load::default()
        })
    }

    pub(super) fn add(&mut self, share: &ThreadLoad) {
        let nothing = ThreadLoad::nothing(share.key);
        self.shared.get_or_insert(nothing).add(share);
    }
}

impl Ledger {
    /// This VM's bookings on every rank that has any, with the tokens left at the prefill rate and slowness of its slot.
    pub fn shares(&self, rate_of: impl Fn(usize) -> (Option<PrefillRate>, f64)) -> Vec<ThreadLoad> {
        self.table.shares(rate_of)
    }

    /// Replaces the bookings of other VMs. Ranks unknown here are skipped.
    pub fn apply_shares(&mut self, others: &[ThreadLoad]) {
        for slot in self.shared_slots.drain(..) {
            self.table.clear_shared(slot);
        }
        for share in others {
            if let Some(slot) = self.slots.get(&share.key) {
                self.table.add_shared(*slot, share);
                self.shared_slots.push(*slot);
            }
        }
    }

    /// Replaces the external load of a rank, which no VM of this proxy has booked.
    pub fn set_external(&mut self, key: TargetKey, external: ExternalLoad) {
        if let Some(slot) = self.slots.get(&key) {
            self.table.set_external(*slot, external);
        }
    }

    /// Bookings of other VMs on a worker, over all its ranks.
    pub fn worker_load_elsewhere(&self, worker: &Arc<Worker>) -> Load {
        self.sum(worker, |slot| self.table.elsewhere(slot).load())
    }

    /// Load of a rank from all sources: prompt tokens as booked by any VM, the rest with the external load.
    pub fn load_in_all(&self, key: TargetKey) -> Load {
        let slot = self.slots.get(&key);
        slot.map(|slot| self.in_all(*slot)).unwrap_or_default()
    }

    /// The same for a worker, over all its ranks.
    pub fn worker_load_in_all(&self, worker: &Arc<Worker>) -> Load {
        self.sum(worker, |slot| self.in_all(slot))
    }

    /// Mean tokens of the prompts read lately; 0 if none was.
    pub fn mean_prompt_tokens(&self) -> f64 {
        self.table.mean_prompt_tokens()
    }

    fn in_all(&self, slot: usize) -> Load {
        let elsewhere = self.table.elsewhere(slot).load_with_external();
        self.table.load(slot).plus(elsewhere)
    }

    pub(super) fn sum(&self, worker: &Arc<Worker>, load: impl Fn(usize) -> Load) -> Load {
        let keys = worker.targets().map(|target: Target| target.key());
        let slots = keys.filter_map(|key| self.slots.get(&key).copied());
        slots.fold(Load::default(), |sum, slot| sum.plus(load(slot)))
    }
}
