//! Owns the order in which each worker's blocks are evicted.
//!
//! A prompt sent to a worker is a *path*: its blocks from the first to the last. Each pair of a worker and a block belongs
//! to the newest path through it. So a path always owns its last part, and the oldest path of a worker ends in a block after
//! which the worker holds none: the one to evict first.

use std::time::Duration;

use super::slab::{NONE, Slab, Vacant};

/// Time in tenths of a second since 1970, modulo 2^32 (about 13 years): enough to compare two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tick(u32);

impl Tick {
    pub(super) fn of(time: Duration) -> Self {
        let tenths = time
            .as_secs()
            .wrapping_mul(10)
            .wrapping_add(u64::from(time.subsec_millis() / 100));
        Self((tenths & u64::from(u32::MAX)) as u32)
    }

    /// Whether more than `ttl` tenths of a second lie between the two. A clock that steps back expires nothing.
    pub(super) fn is_past(self, now: Self, ttl: u32) -> bool {
        let age = now.0.wrapping_sub(self.0);
        age <= u32::MAX / 2 && age > ttl
    }
}

/// The blocks of a worker, or of one that was forgotten.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holder {
    /// The worker's slot; none: the worker was forgotten.
    pub(super) slot: Option<u16>,
    /// Sequence hashes held.
    pub(super) pairs: u32,
    /// Blocks that these hashes stand for.
    pub(super) blocks: u32,
    /// Capacity in blocks, if known.
    pub(super) capacity: Option<u32>,
    oldest: u32,
    newest: u32,
}

impl Holder {
    pub(super) fn new(slot: u16, capacity: Option<u32>) -> Self {
        Self {
            slot: Some(slot),
            pairs: 0,
            blocks: 0,
            capacity,
            oldest: NONE,
            newest: NONE,
        }
    }

    /// The path to evict first, or [`NONE`].
    pub(super) fn oldest(&self) -> u32 {
        self.oldest
    }
}

/// One prompt of one holder.
#[derive(Debug, Clone, Copy)]
pub(super) struct Path {
    /// The last node of the path.
    pub(super) end: u32,
    pub(super) learnt: Tick,
    older: u32,
    newer: u32,
}

impl Vacant for Path {
    const BLANK: Self = Self {
        end: NONE,
        learnt: Tick(0),
        older: NONE,
        newer: NONE,
    };

    fn next(&mut self) -> &mut u32 {
        &mut self.older
    }
}

/// All paths.
#[derive(Debug)]
pub(super) struct Paths(Slab<Path>);

impl Paths {
    pub(super) fn new() -> Self {
        Self(Slab::new())
    }

    #[inline]
    pub(super) fn get(&self, path: u32) -> &Path {
        self.0.get(path)
    }

    /// Begins the newest path of a holder.
    pub(super) fn begin(&mut self, holder: &mut Holder, learnt: Tick) -> u32 {
        let before = holder.newest;
        let path = self.0.put(Path {
            learnt,
            older: before,
            ..Path::BLANK
        });
        if before == NONE {
            holder.oldest = path;
        } else {
            self.0.get_mut(before).newer = path;
        }
        holder.newest = path;
        path
    }

    pub(super) fn end_in(&mut self, path: u32, node: u32) {
        self.0.get_mut(path).end = node;
    }

    /// Removes a path that owns no block any more.
    pub(super) fn remove(&mut self, holder: &mut Holder, path: u32) {
        let Path { older, newer, .. } = *self.0.get(path);
        if older == NONE {
            holder.oldest = newer;
        } else {
            self.0.get_mut(older).newer = newer;
        }
        if newer == NONE {
            holder.newest = older;
        } else {
            self.0.get_mut(newer).older = older;
        }
        self.0.free(path);
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> u32 {
        self.0.used()
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }
}
