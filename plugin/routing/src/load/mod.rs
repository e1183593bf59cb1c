//! Owns the load ledger: bookings that free themselves.
//!
//! A request makes two charges. The prefill charge is in tokens and belongs to the prefill call; the decode charge is in
//! blocks and belongs to the client's stream. Each is a value that releases its share exactly once, when dropped. A charge
//! left unrenewed for long stops counting, until it is renewed.

mod answer;
mod backlog;
mod observed;
mod rate;
mod table;
mod threads;

pub use answer::{BookedAnswer, DecodeCharge, Occupied};
pub use observed::{ObservedRates, RateCache};
pub use rate::PrefillRate;
pub(crate) use rate::middle;
pub(crate) use table::as_u32;
pub use table::{Load, LoadSnapshot, LoadSnapshots};
pub use threads::{ExternalLoad, ThreadLoad};

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use crate::fleet::{Fleet, TargetKey, Worker, WorkerId};
use backlog::Ticket;
use table::LoadTable;

/// All bookings of one VM.
#[derive(Debug, Default)]
pub struct Ledger {
    slots: HashMap<TargetKey, usize>,
    free: Vec<usize>,
    /// Slots of workers whose ids live on in other workers, until no booking on them is left.
    retired: Vec<usize>,
    /// Slots on which other VMs have bookings, as last received.
    shared_slots: Vec<usize>,
    table: Arc<LoadTable>,
}

impl Ledger {
    /// The slot of a worker rank: a small number, constant while the rank is in the fleet or has bookings.
    pub fn slot(&mut self, key: TargetKey) -> usize {
        if let Some(slot) = self.slots.get(&key) {
            return *slot;
        }
        let slot = self.free.pop().unwrap_or_else(|| self.table.add());
        self.table.open(slot, key);
        self.slots.insert(key, slot);
        slot
    }

    /// Advances the clock to `now`, since 1970. Charges not renewed for `patience` stop counting.
    pub fn advance(&self, now: Duration, patience: Duration) {
        self.table.advance(now, patience);
    }

    /// The ledger's clock, since 1970.
    pub fn now(&self) -> Duration {
        self.table.now()
    }

    /// Books the `tokens` of a prompt that must be computed on a prefill worker.
    pub fn charge_prefill(&mut self, key: TargetKey, tokens: u64) -> PrefillCharge {
        let slot = self.slot(key);
        PrefillCharge {
            ticket: self.table.push(slot, tokens),
            table: Arc::clone(&self.table),
            slot,
        }
    }

    /// Books an answer on a decode worker.
    pub fn charge_decode(&mut self, key: TargetKey, answer: BookedAnswer) -> DecodeCharge {
        let slot = self.slot(key);
        DecodeCharge::new(&self.table, slot, key, answer)
    }

    /// This VM's bookings on `key`.
    pub fn load(&self, key: TargetKey) -> Load {
        self.slots
            .get(&key)
            .map(|slot| self.table.load(*slot))
            .unwrap_or_default()
    }

    /// This VM's bookings on a worker, over all its ranks.
    pub fn worker_load(&self, worker: &Arc<Worker>) -> Load {
        self.sum(worker, |slot| self.table.load(slot))
    }

    /// The common prefill rate of the workers of these slots; none without any observation.
    pub fn rate(&self, slots: impl Iterator<Item = usize> + Clone) -> Option<PrefillRate> {
        self.table.rate(slots)
    }

    /// How many times slower than `rate` the worker of a slot is.
    pub fn slowness(&self, slot: usize, rate: Option<PrefillRate>) -> f64 {
        self.table.slowness(slot, rate)
    }

    /// The load of all slots now, at the common `rate`. Nothing may be booked while the result is held.
    pub fn snapshots(&self, rate: Option<PrefillRate>) -> LoadSnapshots<'_> {
        self.table.snapshots(rate)
    }

    /// This VM's bookings on all workers, including those that left.
    pub fn total(&self) -> Load {
        self.table.total()
    }

    /// Whether `slot` is the rank's slot.
    pub(super) fn has(&self, key: TargetKey, slot: usize) -> bool {
        self.slots.get(&key) == Some(&slot)
    }

    /// Forgets workers that left and have no bookings any more.
    pub fn keep(&mut self, fleet: &Fleet) {
        let Self {
            slots, free, table, ..
        } = self;
        slots.retain(|key, slot| {
            let stays = fleet.contains(key.worker) || !table.load(*slot).is_idle();
            if !stays {
                table.close(*slot);
                free.push(*slot);
            }
            stays
        });
        self.free_retired();
    }

    /// Ends the incarnation of these workers: their bookings do not count for the next one.
    pub fn retire(&mut self, ended: &[WorkerId]) {
        let Self {
            slots,
            retired,
            table,
            ..
        } = self;
        slots.retain(|key, slot| {
            let stays = !ended.contains(&key.worker);
            if !stays {
                table.close(*slot);
                retired.push(*slot);
            }
            stays
        });
        self.free_retired();
    }

    fn free_retired(&mut self) {
        let Self {
            retired,
            free,
            table,
            ..
        } = self;
        retired.retain(|slot| {
            let is_idle = table.load(*slot).is_idle();
            if is_idle {
                free.push(*slot);
            }
            !is_idle
        });
    }
}

/// A prompt being read by a prefill worker. Dropping it ends the charge.
#[derive(Debug)]
#[must_use = "dropping a charge ends it"]
pub struct PrefillCharge {
    table: Arc<LoadTable>,
    slot: usize,
    ticket: Ticket,
}

impl PrefillCharge {
    /// Ends the charge at the first token, seen at `now`, and records a sample of the worker's prefill rate.
    pub fn finish(self, now: Duration) {
        self.table.finish(self.slot, self.ticket, now);
    }
}

impl Drop for PrefillCharge {
    fn drop(&mut self) {
        self.table.cancel(self.slot, self.ticket);
    }
}

#[cfg(test)]
mod tests;
