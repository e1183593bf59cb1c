//! Owns who is busy: bookings that free themselves.
//!
//! A request makes two charges. Prefill's is in tokens and belongs to the prefill call; decode's is in blocks and belongs
//! to the client's stream. Each is a value that releases its share exactly once, when it is dropped.

use std::cell::Cell;
use std::rc::Rc;

use hashbrown::HashMap;

use crate::fleet::{Fleet, TargetKey, WorkerId};

/// What is booked on one worker rank, or on all together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Prompt tokens whose prefill is not known to be done.
    pub prefill_tokens: u64,
    /// Prefills under way.
    pub prefills: u64,
    /// KV blocks of requests being decoded.
    pub decode_blocks: u64,
    /// Requests being decoded.
    pub decodes: u64,
}

impl Load {
    /// Whether nothing is booked.
    pub fn is_idle(&self) -> bool {
        *self == Self::default()
    }

    fn plus(self, other: Self) -> Self {
        Self {
            prefill_tokens: self.prefill_tokens.saturating_add(other.prefill_tokens),
            prefills: self.prefills.saturating_add(other.prefills),
            decode_blocks: self.decode_blocks.saturating_add(other.decode_blocks),
            decodes: self.decodes.saturating_add(other.decodes),
        }
    }
}

/// A load that several charges share.
#[derive(Debug, Default)]
struct Slot(Cell<Load>);

impl Slot {
    fn change(&self, change: impl FnOnce(Load) -> Load) {
        self.0.set(change(self.0.get()));
    }
}

/// All bookings of one VM.
#[derive(Debug, Default)]
pub struct Ledger {
    slots: HashMap<TargetKey, Rc<Slot>>,
    total: Rc<Slot>,
}

impl Ledger {
    /// Books a prompt of `tokens` on a prefill worker.
    pub fn charge_prefill(&mut self, target: TargetKey, tokens: u64) -> PrefillCharge {
        let charge = PrefillCharge {
            share: self.share(target),
            tokens,
        };
        charge.share.change(|load| Load {
            prefill_tokens: load.prefill_tokens.saturating_add(tokens),
            prefills: load.prefills.saturating_add(1),
            ..load
        });
        charge
    }

    /// Books a request of `blocks` on a decode worker.
    pub fn charge_decode(&mut self, target: TargetKey, blocks: u64) -> DecodeCharge {
        let charge = DecodeCharge {
            share: self.share(target),
            target,
            blocks,
        };
        charge.share.change(|load| Load {
            decode_blocks: load.decode_blocks.saturating_add(blocks),
            decodes: load.decodes.saturating_add(1),
            ..load
        });
        charge
    }

    /// What is booked on `target`.
    pub fn load(&self, target: TargetKey) -> Load {
        self.slots
            .get(&target)
            .map(|slot| slot.0.get())
            .unwrap_or_default()
    }

    /// What is booked on a worker, on all its ranks together.
    pub fn worker_load(&self, worker: WorkerId) -> Load {
        let ranks = self
            .slots
            .iter()
            .filter(|(target, _)| target.worker == worker);
        ranks.fold(Load::default(), |sum, (_, slot)| sum.plus(slot.0.get()))
    }

    /// What is booked on all workers together, those that left included.
    pub fn total(&self) -> Load {
        self.total.0.get()
    }

    /// Forgets workers that left and on which nothing is booked any more.
    pub fn keep(&mut self, fleet: &Fleet) {
        self.slots
            .retain(|target, slot| fleet.contains(target.worker) || !slot.0.get().is_idle());
    }

    fn share(&mut self, target: TargetKey) -> Share {
        Share {
            slot: Rc::clone(self.slots.entry(target).or_default()),
            total: Rc::clone(&self.total),
        }
    }
}

/// Where a charge is counted: on its worker, and in all.
#[derive(Debug)]
struct Share {
    slot: Rc<Slot>,
    total: Rc<Slot>,
}

impl Share {
    fn change(&self, change: impl Fn(Load) -> Load) {
        self.slot.change(&change);
        self.total.change(&change);
    }
}

/// A prompt being read by a prefill worker. Dropping it ends the charge.
#[derive(Debug)]
#[must_use = "dropping a charge ends it"]
pub struct PrefillCharge {
    share: Share,
    tokens: u64,
}

impl Drop for PrefillCharge {
    fn drop(&mut self) {
        self.share.change(|load| Load {
            prefill_tokens: load.prefill_tokens.saturating_sub(self.tokens),
            prefills: load.prefills.saturating_sub(1),
            ..load
        });
    }
}

/// A request being answered by a decode worker. Dropping it ends the charge.
#[derive(Debug)]
#[must_use = "dropping a charge ends it"]
pub struct DecodeCharge {
    share: Share,
    target: TargetKey,
    blocks: u64,
}

impl DecodeCharge {
    /// The worker rank that is charged.
    pub fn target(&self) -> TargetKey {
        self.target
    }

    /// The same charge on the worker that really serves, after the proxy has moved on to it.
    pub fn moved_to(self, target: TargetKey, ledger: &mut Ledger) -> Self {
        if self.target == target {
            return self;
        }
        ledger.charge_decode(target, self.blocks)
    }
}

impl Drop for DecodeCharge {
    fn drop(&mut self) {
        self.share.change(|load| Load {
            decode_blocks: load.decode_blocks.saturating_sub(self.blocks),
            decodes: load.decodes.saturating_sub(1),
            ..load
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(worker: u64) -> TargetKey {
        TargetKey {
            worker: WorkerId(worker),
            rank: 0,
        }
    }

    #[test]
    fn a_charge_is_released_once_however_it_ends() {
        let mut ledger = Ledger::default();
        let prefill = ledger.charge_prefill(key(1), 100);
        let decode = ledger.charge_decode(key(2), 7);
        assert_eq!(ledger.load(key(1)).prefill_tokens, 100);
        assert_eq!(ledger.load(key(2)).decode_blocks, 7);
        drop(prefill);
        let decode = decode.moved_to(key(3), &mut ledger);
        assert!(ledger.load(key(2)).is_idle());
        assert_eq!(ledger.load(key(3)).decodes, 1);
        assert_eq!(ledger.total().decodes, 1);
        drop(decode);
        assert!(ledger.total().is_idle());
    }

    #[test]
    fn a_worker_that_left_is_forgotten_when_its_last_charge_ends() {
        let mut ledger = Ledger::default();
        let charge = ledger.charge_decode(key(1), 1);
        ledger.keep(&Fleet::default());
        assert_eq!(ledger.load(key(1)).decodes, 1);
        drop(charge);
        ledger.keep(&Fleet::default());
        assert!(ledger.slots.is_empty());
    }

    enum Charge {
        Prefill(#[expect(dead_code, reason = "held to be dropped")] PrefillCharge),
        Decode(DecodeCharge),
    }

    proptest! {
        #[test]
        fn totals_are_the_sum_of_the_open_charges(
            steps in proptest::collection::vec((0u8..4, 0u64..5, 0u64..1000), 0..300),
        ) {
            let mut ledger = Ledger::default();
            let mut open: Vec<(Charge, u64)> = Vec::new();
            for (kind, worker, amount) in steps {
                match kind {
                    0 => open.push((Charge::Prefill(ledger.charge_prefill(key(worker), amount)), amount)),
                    1 => open.push((Charge::Decode(ledger.charge_decode(key(worker), amount)), amount)),
                    2 if !open.is_empty() => {
                        let at = amount as usize % open.len();
                        open.swap_remove(at);
                    }
                    3 if !open.is_empty() => {
                        let at = amount as usize % open.len();
                        let (charge, amount) = open.swap_remove(at);
                        let charge = match charge {
                            Charge::Decode(charge) => Charge::Decode(charge.moved_to(key(worker), &mut ledger)),
                            prefill => prefill,
                        };
                        open.push((charge, amount));
                    }
                    _ => {}
                }
                let sum = |prefill: bool| open.iter()
                    .filter(|(charge, _)| matches!(charge, Charge::Prefill(_)) == prefill)
                    .map(|(_, amount)| amount).sum::<u64>();
                prop_assert_eq!(ledger.total().prefill_tokens, sum(true));
                prop_assert_eq!(ledger.total().decode_blocks, sum(false));
                let by_worker: u64 = (0..5).map(|w| ledger.load(key(w)).decode_blocks).sum();
                prop_assert_eq!(by_worker, sum(false));
            }
            open.clear();
            prop_assert!(ledger.total().is_idle());
            prop_assert!((0..5).all(|worker| ledger.load(key(worker)).is_idle()));
        }
    }
}
