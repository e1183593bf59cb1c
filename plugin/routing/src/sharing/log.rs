//! Owns decisions in the shared store: a ring of segments that one VM writes and all others read.
//!
//! ```text
//! segment  = "pdl1" · owner u64 · number u64 · decision …
//! decision = pool u64 · worker u64 · rank u32 · blocks u32 · tag u32 …
//! ```

use std::collections::VecDeque;

use super::bytes::{Input, put_count, put_u32, put_u64};
use super::store::{SharedStore, WriteResult, log_key};
use super::{Decision, SEGMENT_BYTES, SEGMENTS};
use crate::fleet::{TargetKey, WorkerId};
use crate::prefix::MOST_BLOCKS_TOLD;

const MAGIC: u32 = u32::from_le_bytes(*b"pdl1");
const HEAD_BYTES: usize = 20;
const DECISION_BYTES: usize = 24;

/// Maximum segments written per publication: half the ring, so that a reader of the same rate is not lapped.
const AT_ONCE: usize = 8;

/// Maximum segments that wait to be written.
const MOST_WAITING: usize = 32;

/// The writing end of one VM's log.
#[derive(Debug, Default)]
pub(super) struct Log {
    /// Number of the next segment to be written.
    next: u64,
    /// Waiting segments without their heads, oldest first.
    waiting: VecDeque<Vec<u8>>,
    dropped: u64,
}

impl Log {
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Decisions dropped because the log was full.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Adds decisions to be written.
    pub(super) fn add(&mut self, decisions: &[(u64, Decision)]) {
        for (pool, decision) in decisions {
            let tags = decision.path.get(..MOST_BLOCKS_TOLD);
            let tags = tags.unwrap_or(&decision.path);
            if self.has_room(tags.len())
                && let Some(segment) = self.waiting.back_mut()
            {
                put_decision(segment, *pool, decision.key, tags);
            } else {
                self.dropped = self.dropped.saturating_add(1);
            }
        }
    }

    /// Whether a decision of `blocks` blocks fits into the last waiting segment, or into a new one.
    fn has_room(&mut self, blocks: usize) -> bool {
        let wanted = DECISION_BYTES.saturating_add(blocks.saturating_mul(size_of::<u32>()));
        let fits = |segment: &Vec<u8>| {
            segment.len().saturating_add(wanted) <= SEGMENT_BYTES.saturating_sub(HEAD_BYTES)
        };
        if self.waiting.back().is_some_and(fits) {
            return true;
        }
        if self.waiting.len() >= MOST_WAITING {
            return false;
        }
        self.waiting.push_back(Vec::new());
        true
    }

    /// Writes the waiting segments, as far as the shared store takes them.
    pub(super) fn write(&mut self, store: &dyn SharedStore, slot: u16, owner: u64) {
        for _ in 0..AT_ONCE {
            let Some(body) = self.waiting.front() else {
                return;
            };
            let mut segment = Vec::with_capacity(HEAD_BYTES.saturating_add(body.len()));
            put_u32(&mut segment, MAGIC);
            put_u64(&mut segment, owner);
            put_u64(&mut segment, self.next);
            segment.extend_from_slice(body);
            if store.write(&log_key(slot, self.next), &segment, None) != WriteResult::Done {
                return;
            }
            self.waiting.pop_front();
            self.next = self.next.saturating_add(1);
        }
    }
}

/// The reading end of another VM's log.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Follower {
    /// Number of the next segment to be read; none: nothing read of this log yet.
    wanted: Option<u64>,
}

impl Follower {
    /// Reads up to the segment before `next`. Returns how many segments were lost.
    pub(super) fn read(
        &mut self,
        store: &dyn SharedStore,
        slot: u16,
        owner: u64,
        next: u64,
        out: &mut Vec<(u64, Decision)>,
    ) -> u64 {
        let oldest = next.saturating_sub(SEGMENTS);
        let is_new = self.wanted.is_none();
        let wanted = self.wanted.unwrap_or(oldest);
        let mut lost = oldest.saturating_sub(wanted);
        for number in wanted.max(oldest)..next {
            let read = store.read(&log_key(slot, number));
            match read.and_then(|(bytes, _)| decode(&bytes, owner, number)) {
                Some(decisions) => out.extend(decisions),
                None => lost = lost.saturating_add(1),
            }
        }
        self.wanted = Some(wanted.max(next));
        // Segments from before this reader's first read do not count as lost.
        if is_new { 0 } else { lost }
    }
}

/// A segment's decisions; none where the bytes are another segment, or cannot be read.
pub(super) fn decode(bytes: &[u8], owner: u64, number: u64) -> Option<Vec<(u64, Decision)>> {
    let mut input = Input(bytes);
    let is_wanted = input.u32()? == MAGIC && input.u64()? == owner && input.u64()? == number;
    if !is_wanted || bytes.len() > SEGMENT_BYTES {
        return None;
    }
    let mut decisions = Vec::new();
    while !input.is_empty() {
        decisions.push(read_decision(&mut input)?);
    }
    Some(decisions)
}

fn put_decision(out: &mut Vec<u8>, pool: u64, key: TargetKey, tags: &[u32]) {
    put_u64(out, pool);
    put_u64(out, key.worker.0);
    put_u32(out, key.rank);
    put_count(out, tags.len());
    for tag in tags {
        put_u32(out, *tag);
    }
}

fn read_decision(input: &mut Input<'_>) -> Option<(u64, Decision)> {
    let pool = input.u64()?;
    let key = TargetKey {
        worker: WorkerId(input.u64()?),
        rank: input.u32()?,
    };
    let count = input.count(size_of::<u32>())?;
    let mut path = Vec::with_capacity(count);
    for _ in 0..count {
        path.push(input.u32()?);
    }
    Some((pool, Decision { key, path }))
}
