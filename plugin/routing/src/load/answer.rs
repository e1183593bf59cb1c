//! Owns the charge of an answer: it grows with what is written, and shrinks as the end that is expected comes near.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::Ledger;
use super::books::{Books, PARTS};
use crate::fleet::TargetKey;

/// What is known of an answer when it is booked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Tokens of the prompt, whose KV the decode worker holds.
    pub prompt_tokens: u64,
    /// Tokens in one KV block.
    pub block_tokens: u32,
    /// How many tokens the answer is expected to have, where something says so.
    pub expected_tokens: Option<u64>,
}

impl Answer {
    /// What it weighs once `generated` tokens are written, in thousandths of a block. A request close to its expected end
    /// counts for little: its blocks will soon be free.
    fn parts(self, generated: u64) -> u64 {
        let tokens = self.prompt_tokens.saturating_add(generated);
        let blocks = tokens.div_ceil(u64::from(self.block_tokens.max(1))).max(1);
        let whole = blocks.saturating_mul(PARTS);
        let Some(expected) = self.expected_tokens.filter(|expected| *expected > 0) else {
            return whole;
        };
        let left = expected.saturating_sub(generated);
        let share = u128::from(whole) * u128::from(left) / u128::from(expected);
        u64::try_from(share).unwrap_or(whole)
    }
}

/// An answer as it is booked.
#[derive(Debug)]
pub(super) struct Booking {
    books: Rc<Books>,
    slot: usize,
    key: TargetKey,
    answer: Answer,
    generated: Cell<u64>,
    renewed: Cell<Duration>,
    /// What is counted of it; nothing while its lease has run out.
    counted: Cell<Option<u64>>,
}

impl Booking {
    fn count(&self) {
        let parts = self.answer.parts(self.generated.get());
        match self.counted.get() {
            Some(before) => {
                self.books.change_answer(self.slot, before, parts);
                self.counted.set(Some(parts));
            }
            None if self.books.begin_answer(self.slot, self.key, parts) => {
                self.counted.set(Some(parts));
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
        if let Some(parts) = self.counted.take() {
            self.books.end_answer(self.slot, parts);
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
    pub(super) fn new(books: &Rc<Books>, slot: usize, key: TargetKey, answer: Answer) -> Self {
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
