//! Owns the depth look-up: how many leading blocks of a prompt each worker holds.
//!
//! A holder of a block holds all blocks before it. So the look-up starts with the holders of the last known block, and searches
//! each block before it only for holders not met yet; a block with no more holders than were met already has none of those.

use super::holders::{Crowd, NodeHolders, bit};
use super::paths::{Holder, Paths, Tick};

/// The holders at one moment.
pub(super) struct Moment<'a> {
    pub(super) holders: &'a [Holder],
    pub(super) paths: &'a Paths,
    pub(super) now: Tick,
    /// Tenths of a second.
    pub(super) ttl: u32,
}

/// What a look-up finds for a holder of a block.
enum Find {
    /// A worker.
    Slot(u16),
    /// A worker that was forgotten.
    Nobody,
    /// A worker that may have lost this block, though perhaps not those before it.
    Stale,
}

impl Moment<'_> {
    #[inline]
    fn find(&self, holder: u16, path: impl FnOnce() -> u32) -> Find {
        let Some(found) = self.holders.get(usize::from(holder)) else {
            return Find::Nobody;
        };
        let Some(slot) = found.slot else {
            return Find::Nobody;
        };
        if found.capacity.is_some() || self.is_fresh(found.oldest()) || self.is_fresh(path()) {
            return Find::Slot(slot);
        }
        Find::Stale
    }

    fn is_fresh(&self, path: u32) -> bool {
        !self.paths.get(path).learnt.is_past(self.now, self.ttl)
    }
}

/// One look-up, walking from the last known block to the first.
pub(super) struct Reach<'a> {
    pub(super) moment: Moment<'a>,
    /// A bit for each holder met.
    pub(super) met: &'a mut [u64],
    /// Number of holders met.
    pub(super) count: u16,
    /// Depth by slot, in blocks.
    pub(super) depths: &'a mut [u32],
}

impl Reach<'_> {
    /// Sets `depth` for those holders of a block that were not met deeper down.
    pub(super) fn meet(&mut self, held: NodeHolders<'_>, depth: u32) {
        match held {
            NodeHolders::List(list) => {
                list.for_each(|(holder, path)| self.meet_one(holder, path, depth))
            }
            NodeHolders::Crowd(crowd) => self.meet_crowd(crowd, depth),
        }
    }

    #[inline]
    fn meet_one(&mut self, holder: u16, path: u32, depth: u32) {
        let (word, bit) = bit(holder);
        let Some(met) = self.met.get_mut(word).filter(|met| **met & bit == 0) else {
            return;
        };
        let find = self.moment.find(holder, || path);
        if settle(self.depths, &find, depth) {
            *met |= bit;
            self.count += 1;
        }
    }

    fn meet_crowd(&mut self, crowd: &Crowd, depth: u32) {
        let words = crowd.members().iter().zip(self.met.iter_mut());
        for (at, (members, met)) in (0_u16..).zip(words) {
            let mut left = members & !*met;
            let mut arrived = left;
            while left != 0 {
                let bit = left & left.wrapping_neg();
                left ^= bit;
                let holder = at * 64 + bit.trailing_zeros() as u16;
                let find = self.moment.find(holder, || crowd.path(holder));
                if !settle(self.depths, &find, depth) {
                    arrived ^= bit;
                }
            }
            *met |= arrived;
            self.count += arrived.count_ones() as u16;
        }
    }
}

/// Records the depth of a find. Returns whether this settles the holder.
#[inline]
fn settle(depths: &mut [u32], find: &Find, depth: u32) -> bool {
    match find {
        Find::Slot(slot) => {
            if let Some(place) = depths.get_mut(usize::from(*slot)) {
                *place = depth;
            }
            true
        }
        Find::Nobody => true,
        Find::Stale => false,
    }
}
