//! Owns the prefix index: which blocks each worker's cache holds, and which are evicted first.
//!
//! Engines keep blocks until room is needed, and then evict the least recently used, the last of a prompt first. The index
//! does the same, up to the worker's capacity. If that is unknown, a block counts for a time after its last use. Further
//! back in a prompt, one node stands for a run of blocks, which is held, found and evicted as one.

mod holders;
mod paths;
mod reach;
mod slab;
#[cfg(test)]
mod tests;
mod tree;

use std::mem::size_of;
use std::time::Duration;

use self::holders::Holders;
use self::paths::{Holder, Paths, Tick};
use self::reach::{Moment, Reach};
use self::slab::NONE;
use self::tree::{CROWD, FETCHED, ROOT, Tree, tag, weight};
use super::Blocks;

/// Holders are numbered in 16 bits, which bounds the slots open at once.
const MOST_HOLDERS: usize = CROWD as usize;
/// Largest bound on pairs, so that nodes can be numbered in 32 bits.
const MOST_PAIRS: usize = 1 << 30;
/// Each prompt learnt sweeps as many pairs as it has hashes, plus this many: of forgotten workers, and expired ones.
const SWEPT_BESIDES: usize = 16;
/// At the bound on pairs, the worker that holds most loses at most one part in this many at once.
const SHARE_GIVEN_UP: u32 = 8;

/// Bounds of the index.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Pairs of a worker and a block that it holds, over all workers.
    pub max_pairs: usize,
    /// Time for which a block counts after its last use, on workers of unknown capacity.
    pub ttl: Duration,
}

/// State of a slot.
#[derive(Debug, Clone, Copy)]
enum Slot {
    /// No worker.
    Closed,
    /// A worker without blocks, with its capacity in blocks.
    Empty(Option<u32>),
    /// A worker that was sent prompts, with its holder.
    Known(u16),
}

/// The blocks that each worker is estimated to hold.
#[derive(Debug)]
pub struct Index {
    max_pairs: usize,
    /// Tenths of a second.
    ttl: u32,
    slots: Vec<Slot>,
    holders: Vec<Holder>,
    /// Holders that no slot and no pair refers to.
    vacant: Vec<u16>,
    /// Holders of forgotten workers with pairs left.
    gone: Vec<u16>,
    /// The holder whose expiry is checked next.
    turn: usize,
    pairs: usize,
    tree: Tree,
    held: Holders,
    paths: Paths,
    /// Scratch: the nodes of the prompt being looked up.
    trail: Vec<u32>,
    /// Scratch: a bit for each holder met.
    met: Vec<u64>,
}

impl Index {
    /// An empty index.
    pub fn new(bounds: Bounds) -> Self {
        let ttl = bounds.ttl.as_millis() / 100;
        Self {
            max_pairs: bounds.max_pairs.min(MOST_PAIRS),
            ttl: u32::try_from(ttl).unwrap_or(u32::MAX),
            slots: Vec::new(),
            holders: Vec::new(),
            vacant: Vec::new(),
            gone: Vec::new(),
            turn: 0,
            pairs: 0,
            tree: Tree::new(),
            held: Holders::new(),
            paths: Paths::new(),
            trail: Vec::new(),
            met: Vec::new(),
        }
    }

    /// Opens `slot` for a worker: a small number, at most 65,534, since memory is kept for all below it too. `capacity`:
    /// blocks that fit into its cache, if known. A slot that is open already keeps its blocks, up to the new capacity.
    pub fn open(&mut self, slot: usize, capacity: Option<u32>) {
        if slot >= MOST_HOLDERS {
            return;
        }
        if slot >= self.slots.len() {
            self.slots.resize(slot + 1, Slot::Closed);
        }
        if let Some(Slot::Known(id)) = self.slots.get(slot).copied() {
            if let Some(holder) = self.holders.get_mut(usize::from(id)) {
                holder.capacity = capacity;
            }
            self.keep_to_capacity(id);
        } else if let Some(place) = self.slots.get_mut(slot) {
            *place = Slot::Empty(capacity);
        }
    }

    /// Closes the slot of a worker that left or lost its cache. The time does not depend on how much it holds: later calls
    /// of [`Index::learn`] sweep its blocks little by little. The slot may be opened again at once, empty.
    pub fn forget(&mut self, slot: usize) {
        let Some(place) = self.slots.get_mut(slot) else {
            return;
        };
        if let Slot::Known(id) = std::mem::replace(place, Slot::Closed) {
            if let Some(holder) = self.holders.get_mut(usize::from(id)) {
                holder.slot = None;
            }
            self.gone.push(id);
        }
    }

    /// Records that the worker was sent this prompt, so that it holds its blocks, as many of the first ones as fit. `now`:
    /// time since 1970. A closed slot learns nothing. Returns how many of the prompt's hashes were new to the worker.
    pub fn learn(&mut self, slot: usize, blocks: &Blocks, now: Duration) -> u32 {
        self.learn_tags(slot, tags(blocks), now)
    }

    /// The same for a prompt given by the tags that [`Index::path`] returned, here or in another VM.
    pub fn learn_path(&mut self, slot: usize, path: &[u32], now: Duration) -> u32 {
        self.learn_tags(slot, path.iter().copied(), now)
    }

    /// The tags of a prompt's leading blocks, at most `most`.
    pub fn path(blocks: &Blocks, most: usize) -> Vec<u32> {
        tags(blocks).take(most).collect()
    }

    fn learn_tags(
        &mut self,
        slot: usize,
        tags: impl ExactSizeIterator<Item = u32> + Clone,
        now: Duration,
    ) -> u32 {
        let Some(id) = self.holder_of(slot) else {
            return 0;
        };
        let now = Tick::of(now);
        let (learnt, added) = self.walk(id, tags, now);
        self.expire(id, now, learnt + SWEPT_BESIDES);
        self.keep_to_capacity(id);
        self.sweep(now, learnt + SWEPT_BESIDES);
        self.keep_to_bound();
        added
    }

    /// How many leading blocks of a prompt each worker holds, by slot: `depths` is cleared, and gets one entry per slot.
    /// Takes time in proportion to the sum of blocks and workers, not to their product.
    pub fn depths(&mut self, blocks: &Blocks, now: Duration, depths: &mut Vec<u32>) {
        depths.clear();
        depths.resize(self.slots.len(), 0);
        self.follow(blocks);
        let Some(first) = self.trail.first() else {
            return;
        };
        let most = self.tree.node(*first).count;
        let mut depth = self.blocks_of_trail();
        self.met.clear();
        self.met.resize(self.holders.len().div_ceil(64), 0);
        let mut reach = Reach {
            moment: Moment {
                holders: &self.holders,
                paths: &self.paths,
                now: Tick::of(now),
                ttl: self.ttl,
            },
            met: &mut self.met,
            count: 0,
            depths,
        };
        for node in self.trail.iter().rev() {
            let node = self.tree.node(*node);
            if node.count > reach.count {
                reach.meet(self.held.of(node), depth);
            }
            if reach.count >= most {
                return;
            }
            depth = depth.saturating_sub(node.blocks());
        }
    }

    /// Leading blocks of the looked-up prompt that the tree knows.
    fn blocks_of_trail(&self) -> u32 {
        let nodes = self.trail.iter().map(|at| self.tree.node(*at).blocks());
        nodes.fold(0, u32::saturating_add)
    }

    /// Blocks held by the worker at `slot`. For unknown capacity they include some that expired a moment ago.
    pub fn held(&self, slot: usize) -> usize {
        let Some(Slot::Known(id)) = self.slots.get(slot) else {
            return 0;
        };
        self.holder(*id).map_or(0, |holder| holder.blocks as usize)
    }

    /// Pairs of a worker and a sequence hash in memory, including those of forgotten workers until they are swept.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Heap bytes in use: about 29 for each pair where prompts of a few dozen blocks mostly have one holder, and fewer where
    /// several hold the same; equal in wasm32 and natively. Walks all crowds, so it is for occasional use.
    pub fn bytes(&self) -> usize {
        self.tree.bytes()
            + self.held.bytes()
            + self.paths.bytes()
            + self.slots.capacity() * size_of::<Slot>()
            + self.holders.capacity() * size_of::<Holder>()
            + (self.vacant.capacity() + self.gone.capacity()) * size_of::<u16>()
            + self.trail.capacity() * size_of::<u32>()
            + self.met.capacity() * size_of::<u64>()
    }

    /// Collects the nodes of a prompt's known blocks in `trail`.
    fn follow(&mut self, blocks: &Blocks) {
        self.trail.clear();
        let mut at = ROOT;
        for tag in tags(blocks) {
            at = self.tree.child(at, tag);
            if at == NONE {
                return;
            }
            self.trail.push(at);
        }
    }

    /// Makes a prompt's blocks the newest path of a holder. Returns how many hashes fit, and how many of those were new.
    fn walk(
        &mut self,
        id: u16,
        tags: impl ExactSizeIterator<Item = u32> + Clone,
        now: Tick,
    ) -> (usize, u32) {
        let Some(holder) = self.holders.get_mut(usize::from(id)) else {
            return (0, 0);
        };
        let room = match holder.capacity {
            Some(capacity) => fitting(tags.clone(), capacity),
            None => tags.len(),
        };
        let count = room.min(self.max_pairs);
        if count == 0 {
            return (0, 0);
        }
        let path = self.paths.begin(holder, now);
        let mut at = ROOT;
        let mut added = 0;
        let mut blocks = 0_u32;
        let tags = tags.take(count);
        let mut ahead = tags.clone();
        // A new node has no children: from there on no look-up is needed.
        let mut is_known = true;
        for (nth, tag) in tags.enumerate() {
            if nth % FETCHED == 0 {
                let next = ahead.by_ref().take(FETCHED);
                match is_known {
                    true => self.tree.fetch(next),
                    false => self.tree.fetch_heads(next),
                }
            }
            let child = match is_known {
                true => self.tree.child(at, tag),
                false => NONE,
            };
            is_known = child != NONE;
            at = match is_known {
                true => child,
                false => self.tree.add(at, tag),
            };
            let node = self.tree.node_mut(at);
            // After the first block that the holder lacks, it holds none.
            let renewed = if added == 0 {
                self.held.renew(node, id, path)
            } else {
                None
            };
            match renewed {
                Some(old) if self.paths.get(old).end == at => self.paths.remove(holder, old),
                Some(_) => {}
                None => {
                    blocks = blocks.saturating_add(node.blocks());
                    self.held.add(node, id, path);
                    added += 1;
                }
            }
        }
        self.paths.end_in(path, at);
        holder.pairs += added;
        holder.blocks = holder.blocks.saturating_add(blocks);
        self.pairs += added as usize;
        (count, added)
    }

    /// Removes up to `most` pairs of a holder, in eviction order. Returns how many.
    fn give_up(&mut self, id: u16, most: usize) -> usize {
        let mut given = 0;
        while given < most && self.holder(id).is_some_and(|holder| holder.pairs > 0) {
            given += self.shorten(id, most - given, 0);
        }
        given
    }

    /// Removes up to `most` pairs from the end of a holder's oldest path, but leaves the holder `kept` blocks. Returns how many.
    fn shorten(&mut self, id: u16, most: usize, kept: u32) -> usize {
        let Some(holder) = self.holders.get_mut(usize::from(id)) else {
            return 0;
        };
        let path = holder.oldest();
        let mut end = self.paths.get(path).end;
        let mut taken = 0;
        let mut blocks = holder.blocks;
        while taken < most && blocks > kept && end != ROOT {
            if taken % FETCHED == 0 {
                self.tree.fetch_path(end);
            }
            let node = self.tree.node_mut(end);
            let parent = node.parent;
            if !self.held.remove(node, id, path) {
                // From here on the blocks belong to newer paths.
                end = ROOT;
                break;
            }
            blocks = blocks.saturating_sub(node.blocks());
            if node.count == 0 {
                self.tree.remove(end);
            }
            taken += 1;
            end = parent;
        }
        if end == ROOT {
            self.paths.remove(holder, path);
        } else {
            self.paths.end_in(path, end);
        }
        holder.pairs -= taken as u32;
        holder.blocks = blocks;
        self.pairs -= taken;
        taken
    }

    fn keep_to_capacity(&mut self, id: u16) {
        let Some(holder) = self.holder(id) else {
            return;
        };
        let Some(capacity) = holder.capacity else {
            return;
        };
        while self
            .holder(id)
            .is_some_and(|holder| holder.pairs > 0 && holder.blocks > capacity)
        {
            self.shorten(id, usize::MAX, capacity);
        }
    }

    fn keep_to_bound(&mut self) {
        while self.pairs > self.max_pairs {
            let excess = self.pairs - self.max_pairs;
            if self.sweep_gone(excess) > 0 {
                continue;
            }
            let Some((id, pairs)) = self.fullest() else {
                return;
            };
            self.give_up(id, excess.min(pairs.div_ceil(SHARE_GIVEN_UP) as usize));
        }
    }

    /// The worker with the most pairs, and their number. Of several, the one with the lowest slot.
    fn fullest(&self) -> Option<(u16, u32)> {
        let mut fullest = None;
        let mut most = 0;
        for slot in &self.slots {
            if let Slot::Known(id) = slot
                && let Some(holder) = self.holder(*id)
                && holder.pairs > most
            {
                most = holder.pairs;
                fullest = Some((*id, most));
            }
        }
        fullest
    }

    /// Sweeps up to `most` pairs: of forgotten workers, and expired ones of the next holder.
    fn sweep(&mut self, now: Tick, most: usize) {
        let swept = self.sweep_gone(most);
        self.turn = if self.turn < self.holders.len() {
            self.turn
        } else {
            0
        };
        self.expire(self.turn as u16, now, most - swept);
        self.turn += 1;
    }

    /// Sweeps up to `most` pairs of forgotten workers. Returns how many.
    fn sweep_gone(&mut self, most: usize) -> usize {
        let mut swept = 0;
        while let Some(id) = self.gone.last().copied() {
            swept += self.give_up(id, most - swept);
            if self.holder(id).is_some_and(|holder| holder.pairs > 0) {
                break;
            }
            self.gone.pop();
            self.vacant.push(id);
        }
        swept
    }

    /// Removes up to `most` expired pairs of a holder of unknown capacity.
    fn expire(&mut self, id: u16, now: Tick, most: usize) {
        let mut left = most;
        while left > 0 && self.is_over(id, now) {
            left -= self.shorten(id, left, 0);
        }
    }

    /// Whether a holder's oldest path has expired.
    fn is_over(&self, id: u16, now: Tick) -> bool {
        self.holder(id).is_some_and(|holder| {
            let oldest = holder.oldest();
            holder.capacity.is_none()
                && oldest != NONE
                && self.paths.get(oldest).learnt.is_past(now, self.ttl)
        })
    }

    fn holder(&self, id: u16) -> Option<&Holder> {
        self.holders.get(usize::from(id))
    }

    /// The holder of an open slot; none while all numbers are in use, until forgotten workers are swept.
    fn holder_of(&mut self, slot: usize) -> Option<u16> {
        let capacity = match self.slots.get(slot)? {
            Slot::Closed => return None,
            Slot::Known(id) => return Some(*id),
            Slot::Empty(capacity) => *capacity,
        };
        let holder = Holder::new(u16::try_from(slot).ok()?, capacity);
        let id = self.add_holder(holder)?;
        *self.slots.get_mut(slot)? = Slot::Known(id);
        Some(id)
    }

    fn add_holder(&mut self, holder: Holder) -> Option<u16> {
        if let Some(id) = self.vacant.pop() {
            *self.holders.get_mut(usize::from(id))? = holder;
            return Some(id);
        }
        let id = u16::try_from(self.holders.len())
            .ok()
            .filter(|id| *id < CROWD)?;
        self.holders.push(holder);
        self.held.expect(id);
        Some(id)
    }
}

/// The tags by which the tree identifies a prompt's blocks.
fn tags(blocks: &Blocks) -> impl ExactSizeIterator<Item = u32> + Clone {
    // A scope is a small number or a hash: spread over all bits, so that the block hash cannot cancel it.
    let scope = blocks.scope.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let run_length = blocks.run_length;
    let hashes = blocks.sequence.iter().enumerate();
    hashes.map(move |(nth, hash)| {
        let mixed = hash ^ scope;
        tag((mixed ^ (mixed >> 32)) as u32, run_length.kind(nth))
    })
}

/// Number of leading tags that together stand for at most `room` blocks.
fn fitting(tags: impl Iterator<Item = u32>, room: u32) -> usize {
    let mut left = room;
    tags.map_while(|tag| {
        left = left.checked_sub(weight(tag))?;
        Some(())
    })
    .count()
}
