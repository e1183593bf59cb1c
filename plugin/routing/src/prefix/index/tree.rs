//! Owns the tree of known blocks: which block follows which.
//!
//! A block is found by its parent and its hash in a table that grows by one bucket with each node (linear hashing): no
//! look-up waits for a rebuild of the whole table, and no part of it lies unused.

use std::hint::black_box;
use std::iter::successors;

use super::slab::{NONE, Pages, Slab, Vacant};
use crate::prefix::{KINDS, blocks_of};

/// The parent of all first blocks.
pub(super) const ROOT: u32 = NONE;

/// Holder number of a node whose holders are a crowd.
pub(super) const CROWD: u16 = u16::MAX;

/// Blocks fetched together: a processor has about this many reads in flight at a time.
pub(super) const FETCHED: usize = 16;

/// A block with at least one holder.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    /// Half of the block's hash, less the bits for the number of blocks that it stands for. Two blocks are taken for one
    /// only if they agree in this tag and in all before them.
    tag: u32,
    pub(super) parent: u32,
    /// The next node of its bucket.
    next: u32,
    /// Its first holder, or [`CROWD`].
    pub(super) holder: u16,
    /// Number of holders.
    pub(super) count: u16,
    /// The path of the first holder that used the node last.
    pub(super) path: u32,
    /// The further holders: the first of a list, or the crowd.
    pub(super) more: u32,
}

impl Node {
    /// Blocks that the node stands for.
    #[inline]
    pub(super) fn blocks(&self) -> u32 {
        weight(self.tag)
    }
}

/// How many blocks a tag stands for.
#[inline]
pub(super) fn weight(tag: u32) -> u32 {
    blocks_of(tag % KINDS)
}

/// Packs a hash and the kind of its run into a tag.
#[inline]
pub(super) fn tag(hash: u32, kind: u32) -> u32 {
    hash.wrapping_mul(KINDS) | (kind % KINDS)
}

impl Vacant for Node {
    const BLANK: Self = Self {
        tag: 0,
        parent: NONE,
        next: NONE,
        holder: 0,
        count: 0,
        path: NONE,
        more: NONE,
    };

    fn next(&mut self) -> &mut u32 {
        &mut self.next
    }
}

/// All nodes.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: Slab<Node>,
    /// The first node of each bucket.
    heads: Pages<u32>,
    /// Mask of the hash bits that number the buckets, if their number were a power of two.
    mask: u32,
}

impl Tree {
    pub(super) fn new() -> Self {
        Self {
            nodes: Slab::new(),
            heads: Pages::new(NONE),
            mask: 0,
        }
    }

    #[inline]
    pub(super) fn node(&self, at: u32) -> &Node {
        self.nodes.get(at)
    }

    #[inline]
    pub(super) fn node_mut(&mut self, at: u32) -> &mut Node {
        self.nodes.get_mut(at)
    }

    /// Prefetches the memory for looking up these blocks. No read depends on another, so that all wait for memory together;
    /// the look-ups that follow would wait one after another.
    #[inline]
    pub(super) fn fetch(&self, tags: impl Iterator<Item = u32>) {
        let read = tags.fold(0, |read, tag| {
            read ^ self.nodes.get(*self.heads.get(self.bucket(tag))).tag
        });
        black_box(read);
    }

    /// Prefetches the memory for adding these blocks.
    #[inline]
    pub(super) fn fetch_heads(&self, tags: impl Iterator<Item = u32>) {
        let heads = tags.map(|tag| *self.heads.get(self.bucket(tag)));
        black_box(heads.fold(0, |read, head| read ^ head));
    }

    /// Prefetches the memory for removing up to [`FETCHED`] nodes from `end` upwards.
    #[inline]
    pub(super) fn fetch_path(&self, end: u32) {
        let up = successors(Some(end), |at| Some(self.nodes.get(*at).parent));
        let path = up.take_while(|at| *at != ROOT).take(FETCHED);
        self.fetch(path.map(|at| self.nodes.get(at).tag));
    }

    /// The node of the block `tag` after `parent`, or [`NONE`].
    #[inline]
    pub(super) fn child(&self, parent: u32, tag: u32) -> u32 {
        let mut at = *self.heads.get(self.bucket(tag));
        while at != NONE {
            let node = self.nodes.get(at);
            if node.tag == tag && node.parent == parent {
                break;
            }
            at = node.next;
        }
        at
    }

    /// Adds a node for the block `tag` after `parent`, which must not have one yet. The node has no holder.
    #[inline]
    pub(super) fn add(&mut self, parent: u32, tag: u32) -> u32 {
        let at = self.nodes.put(Node {
            tag,
            parent,
            ..Node::BLANK
        });
        if self.heads.count() < self.nodes.most() {
            self.add_bucket();
        }
        self.enter(at);
        at
    }

    /// Removes a node without holders.
    pub(super) fn remove(&mut self, gone: u32) {
        let Node { tag, next, .. } = *self.nodes.get(gone);
        let bucket = self.bucket(tag);
        let head = *self.heads.get(bucket);
        if head == gone {
            *self.heads.get_mut(bucket) = next;
        } else {
            self.skip(head, gone, next);
        }
        self.nodes.free(gone);
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> u32 {
        self.nodes.used()
    }

    /// All nodes with a holder.
    #[cfg(test)]
    pub(super) fn all(&self) -> impl Iterator<Item = u32> {
        (0..self.nodes.most()).filter(|at| self.nodes.get(*at).count > 0)
    }

    pub(super) fn bytes(&self) -> usize {
        self.nodes.bytes() + self.heads.bytes()
    }

    #[inline]
    fn bucket(&self, tag: u32) -> u32 {
        let bucket = spread(tag) & self.mask;
        if bucket < self.heads.count() {
            bucket
        } else {
            bucket & (self.mask >> 1)
        }
    }

    /// Puts a node at the head of its bucket.
    fn enter(&mut self, at: u32) {
        let bucket = self.bucket(self.nodes.get(at).tag);
        let head = std::mem::replace(self.heads.get_mut(bucket), at);
        self.nodes.get_mut(at).next = head;
    }

    /// Unlinks `gone` from the list that begins at `first`.
    fn skip(&mut self, first: u32, gone: u32, next: u32) {
        let mut at = first;
        while at != NONE {
            let node = self.nodes.get_mut(at);
            if node.next == gone {
                node.next = next;
                return;
            }
            at = node.next;
        }
    }

    /// Adds a bucket, and moves its nodes there from the bucket that served for both so far.
    fn add_bucket(&mut self) {
        let new = self.heads.push(NONE);
        self.mask = u32::MAX.checked_shr(new.leading_zeros()).unwrap_or(0);
        let old = new & (self.mask >> 1);
        if old == new {
            return;
        }
        let mut at = std::mem::replace(self.heads.get_mut(old), NONE);
        while at != NONE {
            let next = self.nodes.get(at).next;
            self.enter(at);
            at = next;
        }
    }
}

/// Real hashes are as good as random, but the numbers that stand for them in traces are not.
#[inline]
fn spread(tag: u32) -> u32 {
    let mixed = tag.wrapping_mul(0x9E37_79B1);
    mixed ^ (mixed >> 15)
}
