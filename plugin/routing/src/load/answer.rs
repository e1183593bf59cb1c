//! Owns the charge of an answer: the KV blocks that it holds, and what it weighs in a choice.
//!
//! They answer two questions. Held is all that lies in the worker's cache, until the answer ends: thresholds, capacities and
//! gauges go by it. The weight is what is thought to stay: of what is written, the part that was expected fades as the end
//! comes near. The prompt never fades, nor does what is written beyond what was expected.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::Ledger;
use super::books::LoadTable;
use crate::fleet::TargetKey;

/// Thousandths of a block: weights shrink and grow by less than one, and still add up exactly.
pub(super) const PARTS: u64 = 1000;

/// What an answer, or several together, occupy of a decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// KV blocks.
    pub blocks: u64,
    /// What they weigh in a choice, in thousandths of a block; never more than they are.
    pub weight: u64,
}

impl Held {
    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            blocks: self.blocks.saturating_add(other.blocks),
            weight: self.weight.saturating_add(other.weight),
        }
    }

    /// The sum once one of its parts is another.
    pub(super) fn moved(self, from: Self, to: Self) -> Self {
        let rest = Self {
            blocks: self.blocks.saturating_sub(from.blocks),
            weight: self.weight.saturating_sub(from.weight),
        };
        rest.plus(to)
    }
}

/// What is known of an answer when it is booked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Tokens of the prompt, whose KV the decode worker holds.
    pub prompt_tokens: u64,
    /// Tokens in one KV block.
    pub block_tokens: u32,
    /// How many tokens each of its sequences is expected to have, where something says so.
    pub expected_tokens: Option<u64>,
    /// How many sequences are written for the prompt, each with blocks of its own behind those of the prompt.
    pub sequences: u64,
}

impl Answer {
    /// What it occupies once `generated` tokens are written, those of all sequences together.
    fn held(self, generated: u64) -> Held {
        let blocks = self.blocks(generated);
        Held {
            blocks,
            weight: blocks
                .saturating_mul(PARTS)
                .saturating_sub(self.faded(generated)),
        }
    }

    /// Sequences share the prompt's full blocks, and are taken to be of one length.
    fn blocks(self, generated: u64) -> u64 {
        let block = u64::from(self.block_tokens.max(1));
        let (shared, tail) = (self.prompt_tokens / block, self.prompt_tokens % block);
        let sequences = self.sequences.max(1);
        let each = tail.saturating_add(generated.div_ceil(sequences));
        let own = each.div_ceil(block).saturating_mul(sequences);
        shared.saturating_add(own).max(1)
    }

    /// What the blocks written so far do not weigh, in thousandths of a block: of those that were expected, the share that is
    /// written.
    fn faded(self, generated: u64) -> u64 {
        let expected = self.expected_tokens.unwrap_or(0);
        let expected = expected.saturating_mul(self.sequences.max(1));
        let written = generated.min(expected);
        if written == 0 {
            return 0;
        }
        let blocks = self.blocks(written).saturating_sub(self.blocks(0));
        let parts = u128::from(blocks.saturating_mul(PARTS));
        let faded = parts * u128::from(written) / u128::from(expected);
        u64::try_from(faded).unwrap_or(u64::MAX)
    }
}

/// An answer as it is booked.
#[derive(Debug)]
pub(super) struct Booking {
    books: Rc<LoadTable>,
    slot: usize,
    key: TargetKey,
    answer: Answer,
    generated: Cell<u64>,
    renewed: Cell<Duration>,
    /// What is counted of it; nothing while its lease has run out.
    counted: Cell<Option<Held>>,
}

impl Booking {
    fn count(&self) {
        let held = self.answer.held(self.generated.get());
        match self.counted.get() {
            Some(before) => {
                self.books.change_answer(self.slot, before, held);
                self.counted.set(Some(held));
            }
            None if self.books.begin_answer(self.slot, self.key, held) => {
                self.counted.set(Some(held));
            }
            None => {}
        }
    }

    /// Counts no more, if nothing has renewed it since `then`.
    pub(super) fn expire(&self, then: Duration) {
        if self.renewed.get() < then {
            self.end();
        }
    }

    fn end(&self) {
        if let Some(held) = self.counted.take() {
            self.books.end_answer(self.slot, held);
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.end();
    }
}

/// A request being answered by a decode worker. Dropping it ends the charge.
#[derive(Debug)]
#[must_use = "dropping a charge ends it"]
pub struct DecodeCharge {
    booking: Rc<Booking>,
}

impl DecodeCharge {
    pub(super) fn new(books: &Rc<LoadTable>, slot: usize, key: TargetKey, answer: Answer) -> Self {
        let booking = Rc::new(Booking {
            books: Rc::clone(books),
            slot,
            key,
            answer,
            generated: Cell::new(0),
            renewed: Cell::new(books.now()),
            counted: Cell::new(None),
        });
        booking.count();
        books.lease(Rc::downgrade(&booking));
        Self { booking }
    }

    /// The worker rank that is charged.
    pub fn target(&self) -> TargetKey {
        self.booking.key
    }

    /// Something of the answer came; `generated` tokens of it in all.
    pub fn renew(&self, generated: u64) {
        let booking = &self.booking;
        booking.renewed.set(booking.books.now());
        let grew = booking.generated.replace(generated) != generated;
        if grew || booking.counted.get().is_none() {
            booking.count();
        }
    }

    /// The same charge on the worker that really serves, after the proxy has moved on to it.
    pub fn moved_to(self, key: TargetKey, ledger: &mut Ledger) -> Self {
        if self.target() == key && ledger.has(key, self.booking.slot) {
            return self;
        }
        let moved = ledger.charge_decode(key, self.booking.answer);
        moved.renew(self.booking.generated.get());
        moved
    }
}
