//! Owns what is on a worker rank beside this VM's own bookings: what the proxy's other VMs have booked there, and what its
//! engine has that no VM of this proxy has booked.
//!
//! They are three separate numbers, and none of them is ever corrected by another. A choice looks at their sum.

use std::rc::Rc;

use super::answer::{Held, PARTS};
use super::books::Load;
use super::{Ledger, PrefillRate};
use crate::fleet::{Target, TargetKey, Worker};

/// What one VM, or several together, have booked on a worker rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadLoad {
    /// The rank.
    pub key: TargetKey,
    /// Prompt tokens booked.
    pub booked_tokens: u64,
    /// What is thought to be left of them, in tokens, with what each prompt takes beside its tokens.
    pub queued_tokens: u64,
    /// Prefills under way.
    pub prefills: u32,
    /// What requests being decoded hold and weigh.
    pub decoding: Held,
    /// Requests being decoded.
    pub decodes: u32,
}

impl ThreadLoad {
    /// Nothing, on that rank.
    pub fn nothing(key: TargetKey) -> Self {
        Self {
            key,
            booked_tokens: 0,
            queued_tokens: 0,
            prefills: 0,
            decoding: Held::default(),
            decodes: 0,
        }
    }

    /// What another VM has booked on the same rank comes on top.
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

/// What an engine has, on one rank, that no VM of this proxy has booked.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExternalLoad {
    /// Requests.
    pub requests: u32,
    /// Prompt tokens that are thought to wait.
    pub queued_tokens: f64,
    /// KV blocks in use.
    pub decode_blocks: f64,
}

/// All that is on a rank beside what is booked here.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ThreadLoads {
    pub(super) shared: Option<ThreadLoad>,
    pub(super) foreign: ExternalLoad,
}

impl ThreadLoads {
    /// What other VMs have booked.
    pub(super) fn load(&self) -> Load {
        self.shared
            .as_ref()
            .map(ThreadLoad::load)
            .unwrap_or_default()
    }

    /// The same, with the engine's own on top; what that does is not known, and counts as decoded.
    pub(super) fn load_with_foreign(&self) -> Load {
        self.load().plus(Load {
            decode_blocks: self.foreign.decode_blocks.ceil() as u64,
            decode_weight: self.foreign.decode_blocks.ceil() as u64,
            decodes: self.foreign.requests.into(),
            ..Load::default()
        })
    }

    pub(super) fn add(&mut self, share: &ThreadLoad) {
        let nothing = ThreadLoad::nothing(share.key);
        self.shared.get_or_insert(nothing).add(share);
    }
}

impl Ledger {
    /// What is booked here on every rank that has anything, what is left of it at the pace and slowness of its slot.
    pub fn shares(&self, pace_of: impl Fn(usize) -> (Option<PrefillRate>, f64)) -> Vec<ThreadLoad> {
        self.books.shares(pace_of)
    }

    /// What other VMs have booked, in place of what was heard before. Ranks that are not known here are passed over.
    pub fn hear_shares(&mut self, others: &[ThreadLoad]) {
        for slot in self.heard.drain(..) {
            self.books.hear_nothing(slot);
        }
        for share in others {
            if let Some(slot) = self.slots.get(&share.key) {
                self.books.hear(*slot, share);
                self.heard.push(*slot);
            }
        }
    }

    /// What the engine of a rank has that nobody here has booked, in place of what was known before.
    pub fn set_foreign(&mut self, key: TargetKey, foreign: ExternalLoad) {
        if let Some(slot) = self.slots.get(&key) {
            self.books.set_foreign(*slot, foreign);
        }
    }

    /// What other VMs have booked on a worker, on all its ranks together.
    pub fn worker_load_elsewhere(&self, worker: &Rc<Worker>) -> Load {
        self.sum(worker, |slot| self.books.elsewhere(slot).load())
    }

    /// What is on a rank whoever sent it: prompt tokens as far as some VM booked them, the rest as the engine tells too.
    pub fn load_in_all(&self, key: TargetKey) -> Load {
        let slot = self.slots.get(&key);
        slot.map(|slot| self.in_all(*slot)).unwrap_or_default()
    }

    /// The same of a worker, on all its ranks together.
    pub fn worker_load_in_all(&self, worker: &Rc<Worker>) -> Load {
        self.sum(worker, |slot| self.in_all(slot))
    }

    /// How many tokens a prompt had that was read lately, all in all; 0 where none was.
    pub fn mean_prompt_tokens(&self) -> f64 {
        self.books.mean_prompt_tokens()
    }

    fn in_all(&self, slot: usize) -> Load {
        let elsewhere = self.books.elsewhere(slot).load_with_foreign();
        self.books.load(slot).plus(elsewhere)
    }

    fn sum(&self, worker: &Rc<Worker>, load: impl Fn(usize) -> Load) -> Load {
        let keys = worker.targets().map(|target: Target| target.key());
        let slots = keys.filter_map(|key| self.slots.get(&key).copied());
        slots.fold(Load::default(), |sum, slot| sum.plus(load(slot)))
    }
}
