//! Owns the charge of an answer on a decode worker: the KV blocks held, and their weight in a choice.
//!
//! Held blocks are all blocks in the worker's cache until the answer ends: thresholds, capacities and gauges use them. The
//! weight is the part expected to remain: as the end nears, the expected part of the output fades. The prompt never fades,
//! nor does output beyond the expected length.

use std::sync::Arc;

use super::Ledger;
use super::table::LoadTable;
use crate::fleet::TargetKey;

/// Thousandths of a block: weights change by less than one block, and still add up exactly.
pub(super) const PARTS: u64 = 1000;

/// Capacity of a decode worker occupied by one answer, or by several together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Occupied {
    /// KV blocks.
    pub blocks: u64,
    /// Weight in a choice, in thousandths of a block; never more than `blocks`.
    pub weight: u64,
}

impl Occupied {
    /// Sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            blocks: self.blocks.saturating_add(other.blocks),
            weight: self.weight.saturating_add(other.weight),
        }
    }

    /// The sum with its part `from` replaced by `to`.
    pub(super) fn moved(self, from: Self, to: Self) -> Self {
        let rest = Self {
            blocks: self.blocks.saturating_sub(from.blocks),
            weight: self.weight.saturating_sub(from.weight),
        };
        rest.plus(to)
    }
}

/// Parameters of an answer at booking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BookedAnswer {
    /// Tokens of the prompt, whose KV the decode worker holds.
    pub prompt_tokens: u64,
    /// Tokens in one KV block.
    pub block_tokens: u32,
    /// Expected output tokens of each sequence, if a source gives them.
    pub expected_tokens: Option<u64>,
    /// Sequences generated for the prompt, each with its own blocks after the prompt's.
    pub sequences: u64,
}

impl BookedAnswer {
    /// Blocks and weight after `generated` tokens, counted over all sequences.
    pub(super) fn held(self, generated: u64) -> Occupied {
        let blocks = self.blocks(generated);
        Occupied {
            blocks,
            weight: blocks
                .saturating_mul(PARTS)
                .saturating_sub(self.faded(generated)),
        }
    }

    /// Sequences share the prompt's full blocks, and are assumed equally long.
    fn blocks(self, generated: u64) -> u64 {
        let block = u64::from(self.block_tokens.max(1));
        let (shared, tail) = (self.prompt_tokens / block, self.prompt_tokens % block);
        let sequences = self.sequences.max(1);
        let each = tail.saturating_add(generated.div_ceil(sequences));
        let own = each.div_ceil(block).saturating_mul(sequences);
        shared.saturating_add(own).max(1)
    }

    /// Weight that has faded, in thousandths of a block: the expected blocks written so far, times the written share of the
    /// expected tokens.
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

/// A request being answered by a decode worker. Dropping it ends the charge.
#[derive(Debug)]
#[must_use = "dropping a charge ends it"]
pub struct DecodeCharge {
    table: Arc<LoadTable>,
    lease: u64,
    slot: usize,
    key: TargetKey,
    answer: BookedAnswer,
    generated: u64,
}

impl DecodeCharge {
    pub(super) fn new(
        table: &Arc<LoadTable>,
        slot: usize,
        key: TargetKey,
        answer: BookedAnswer,
    ) -> Self {
        Self {
            lease: table.begin_answer(slot, key, answer.held(0)),
            table: Arc::clone(table),
            slot,
            key,
            answer,
            generated: 0,
        }
    }

    /// The worker rank that is charged.
    pub fn target(&self) -> TargetKey {
        self.key
    }

    /// Renews the lease on a new piece of the answer; `generated`: output tokens so far.
    pub fn renew(&mut self, generated: u64) {
        self.generated = generated;
        self.table
            .renew_answer(self.lease, self.answer.held(generated));
    }

    /// Moves the charge to the worker that actually serves, after the proxy has failed over there.
    pub fn moved_to(self, key: TargetKey, ledger: &mut Ledger) -> Self {
        if self.key == key && ledger.has(key, self.slot) {
            return self;
        }
        let mut moved = ledger.charge_decode(key, self.answer);
        moved.renew(self.generated);
        moved
    }
}

impl Drop for DecodeCharge {
    fn drop(&mut self) {
        self.table.end_answer(self.lease);
    }
}
