//! Owns who is busy: bookings that free themselves.
//!
//! A request makes two charges. Prefill's is in tokens and belongs to the prefill call; decode's is in blocks and belongs
//! to the client's stream. Each is a value that releases its share exactly once, when it is dropped. A charge that nothing
//! renews for long counts no more, until something does.

mod answer;
mod backlog;
mod books;
mod elsewhere;
mod pace;

pub use answer::{Answer, DecodeCharge, Held};
pub use books::{Load, LoadSnapshot, Standings};
pub use elsewhere::{ExternalLoad, ThreadLoad};
pub use pace::PrefillRate;

use std::rc::Rc;
use std::time::Duration;

use hashbrown::HashMap;

use crate::fleet::{Fleet, Target, TargetKey, Worker, WorkerId};
use backlog::Ticket;
use books::LoadTable;

/// All bookings of one VM.
#[derive(Debug, Default)]
pub struct Ledger {
    slots: HashMap<TargetKey, usize>,
    free: Vec<usize>,
    /// Slots of workers whose ids live on in other workers, until nothing is booked on them any more.
    retired: Vec<usize>,
    /// On whose ranks other VMs have booked something, as far as it was heard.
    heard: Vec<usize>,
    books: Rc<LoadTable>,
}

impl Ledger {
    /// The small number under which a worker rank is kept here, the same while it is in the fleet or anything is booked
    /// on it.
    pub fn slot(&mut self, key: TargetKey) -> usize {
        if let Some(slot) = self.slots.get(&key) {
            return *slot;
        }
        let slot = self.free.pop().unwrap_or_else(|| self.books.add());
        self.books.open(slot, key);
        self.slots.insert(key, slot);
        slot
    }

    /// It is `now`, since 1970: work under way has come further, and charges that nothing has renewed for `patience`
    /// count no more.
    pub fn advance(&self, now: Duration, patience: Duration) {
        self.books.advance(now, patience);
    }

    /// What was told last of the time.
    pub fn now(&self) -> Duration {
        self.books.now()
    }

    /// Books `tokens` of a prompt, those that must be computed, on a prefill worker.
    pub fn charge_prefill(&mut self, key: TargetKey, tokens: u64) -> PrefillCharge {
        let slot = self.slot(key);
        PrefillCharge {
            ticket: self.books.push(slot, tokens),
            books: Rc::clone(&self.books),
            slot,
        }
    }

    /// Books an answer on a decode worker.
    pub fn charge_decode(&mut self, key: TargetKey, answer: Answer) -> DecodeCharge {
        let slot = self.slot(key);
        DecodeCharge::new(&self.books, slot, key, answer)
    }

    /// What is booked here on `key`.
    pub fn load(&self, key: TargetKey) -> Load {
        self.slots
            .get(&key)
            .map(|slot| self.books.load(*slot))
            .unwrap_or_default()
    }

    /// What is booked here on a worker, on all its ranks together.
    pub fn worker_load(&self, worker: &Rc<Worker>) -> Load {
        let ranks = worker.targets().map(|target: Target| target.key());
        ranks.fold(Load::default(), |sum, key| sum.plus(self.load(key)))
    }

    /// How quickly the workers of these slots read prompts all in all; none where nothing has been observed of any.
    pub fn pace(&self, slots: impl Iterator<Item = usize> + Clone) -> Option<PrefillRate> {
        self.books.pace(slots)
    }

    /// How many times slower than that pace the worker of a slot is.
    pub fn slowness(&self, slot: usize, pace: Option<PrefillRate>) -> f64 {
        self.books.slowness(slot, pace)
    }

    /// How things stand now, at the `pace` of all. Nothing may be booked while this is held.
    pub fn standings(&self, pace: Option<PrefillRate>) -> Standings<'_> {
        self.books.standings(pace)
    }

    /// What is booked here on all workers together, those that left included.
    pub fn total(&self) -> Load {
        self.books.total()
    }

    /// Whether a rank is kept under that number.
    pub(super) fn has(&self, key: TargetKey, slot: usize) -> bool {
        self.slots.get(&key) == Some(&slot)
    }

    /// Forgets workers that left and on which nothing is booked any more.
    pub fn keep(&mut self, fleet: &Fleet) {
        let Self {
            slots, free, books, ..
        } = self;
        slots.retain(|key, slot| {
            let stays = fleet.contains(key.worker) || !books.load(*slot).is_idle();
            if !stays {
                books.close(*slot);
                free.push(*slot);
            }
            stays
        });
        self.free_retired();
    }

    /// These workers have come to the end of a life: what is booked on them is no part of the next one's.
    pub fn retire(&mut self, ended: &[WorkerId]) {
        let Self {
            slots,
            retired,
            books,
            ..
        } = self;
        slots.retain(|key, slot| {
            let stays = !ended.contains(&key.worker);
            if !stays {
                books.close(*slot);
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
            books,
            ..
        } = self;
        retired.retain(|slot| {
            let is_idle = books.load(*slot).is_idle();
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
    books: Rc<LoadTable>,
    slot: usize,
    ticket: Ticket,
}

impl PrefillCharge {
    /// The first token was seen at `now`: the charge ends, and tells how quick the worker is.
    pub fn finish(self, now: Duration) {
        self.books.finish(self.slot, self.ticket, now);
    }
}

impl Drop for PrefillCharge {
    fn drop(&mut self) {
        self.books.cancel(self.slot, self.ticket);
    }
}

#[cfg(test)]
mod tests;
