//! Owns the holders of each block.
//!
//! Most blocks have one holder, stored in the node itself. A few more form a list. A block with many holders (a system
//! prompt) has a *crowd*: a bit for each holder, so that whole words are compared at once, and the paths of its members in
//! the order of the bits.

use std::mem::size_of;

use super::slab::{NONE, Slab, Vacant};
use super::tree::{CROWD, Node};

/// Up to this many holders always form a list: walking it is no slower than counting bits.
const LIST_AT_MOST: u16 = 8;
/// A crowd has one bit for each holder in the index; with fewer than one member in this many it would be larger than a list.
const HOLDERS_PER_MEMBER: u16 = 128;

/// A further holder in a list.
#[derive(Debug, Clone, Copy)]
struct Further {
    holder: u16,
    path: u32,
    next: u32,
}

impl Vacant for Further {
    const BLANK: Self = Self {
        holder: 0,
        path: NONE,
        next: NONE,
    };

    fn next(&mut self) -> &mut u32 {
        &mut self.next
    }
}

/// Many holders of one block.
#[derive(Debug, Default)]
pub(super) struct Crowd {
    /// A bit for each holder.
    members: Vec<u64>,
    /// The path of each member, in the order of the members.
    paths: Vec<u32>,
}

impl Crowd {
    pub(super) fn members(&self) -> &[u64] {
        &self.members
    }

    /// The path of a member; [`NONE`] of others.
    pub(super) fn path(&self, holder: u16) -> u32 {
        let path = self.place(holder).and_then(|place| self.paths.get(place));
        path.copied().unwrap_or(NONE)
    }

    fn path_mut(&mut self, holder: u16) -> Option<&mut u32> {
        let place = self.place(holder)?;
        self.paths.get_mut(place)
    }

    fn add(&mut self, holder: u16, path: u32) {
        let (word, bit) = bit(holder);
        if word >= self.members.len() {
            self.members.resize(word + 1, 0);
        }
        let place = self.before(holder);
        if let Some(members) = self.members.get_mut(word) {
            *members |= bit;
        }
        self.paths.insert(place.min(self.paths.len()), path);
    }

    fn remove(&mut self, holder: u16) {
        let Some(place) = self.place(holder) else {
            return;
        };
        let (word, bit) = bit(holder);
        if let Some(members) = self.members.get_mut(word) {
            *members &= !bit;
        }
        self.paths.remove(place);
        if self.paths.capacity() > self.paths.len().saturating_mul(4) {
            self.paths.shrink_to(self.paths.len().saturating_mul(2));
        }
    }

    /// A member's position in `paths`.
    fn place(&self, holder: u16) -> Option<usize> {
        let (word, bit) = bit(holder);
        let member = self.members.get(word)? & bit != 0;
        let place = self.before(holder);
        (member && place < self.paths.len()).then_some(place)
    }

    /// Number of members before `holder`.
    fn before(&self, holder: u16) -> usize {
        let (word, bit) = bit(holder);
        let whole = self.members.iter().take(word);
        let part = self.members.get(word).copied().unwrap_or(0) & (bit - 1);
        let ones: u32 = whole.map(|members| members.count_ones()).sum();
        (ones + part.count_ones()) as usize
    }

    fn into_list(self) -> impl Iterator<Item = (u16, u32)> {
        bits(self.members.into_iter()).zip(self.paths)
    }

    fn bytes(&self) -> usize {
        self.members.capacity() * size_of::<u64>() + self.paths.capacity() * size_of::<u32>()
    }
}

/// The holders whose bits are set, word by word.
fn bits(words: impl Iterator<Item = u64>) -> impl Iterator<Item = u16> {
    (0_u16..).zip(words).flat_map(|(at, word)| {
        (0..64_u16).filter_map(move |bit| (word >> bit & 1 == 1).then_some(at * 64 + bit))
    })
}

#[inline]
pub(super) fn bit(holder: u16) -> (usize, u64) {
    (usize::from(holder / 64), 1 << (holder % 64))
}

/// The holders of all nodes, beyond the one stored in a node itself.
#[derive(Debug)]
pub(super) struct Holders {
    further: Slab<Further>,
    crowds: Vec<Crowd>,
    /// Indexes into `crowds` that no node uses.
    vacant: Vec<u32>,
    /// A list with more members becomes a crowd.
    list_at_most: u16,
}

/// All holders of one node.
pub(super) enum NodeHolders<'a> {
    /// A few, each with its path.
    List(List<'a>),
    Crowd(&'a Crowd),
}

/// The holders of a node with only a few.
pub(super) struct List<'a> {
    further: &'a Slab<Further>,
    first: Option<(u16, u32)>,
    next: u32,
}

impl Iterator for List<'_> {
    type Item = (u16, u32);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        if self.next == NONE {
            return None;
        }
        let further = self.further.get(self.next);
        self.next = further.next;
        Some((further.holder, further.path))
    }
}

impl Holders {
    pub(super) fn new() -> Self {
        Self {
            further: Slab::new(),
            crowds: Vec::new(),
            vacant: Vec::new(),
            list_at_most: LIST_AT_MOST,
        }
    }

    /// Sets the list bound for `count` holders in all.
    pub(super) fn expect(&mut self, count: u16) {
        self.list_at_most = LIST_AT_MOST.max(count / HOLDERS_PER_MEMBER);
    }

    /// All holders of a node.
    #[inline]
    pub(super) fn of(&self, node: &Node) -> NodeHolders<'_> {
        if node.holder == CROWD
            && let Some(crowd) = self.crowds.get(node.more as usize)
        {
            return NodeHolders::Crowd(crowd);
        }
        NodeHolders::List(List {
            further: &self.further,
            first: (node.count > 0).then_some((node.holder, node.path)),
            next: node.more,
        })
    }

    /// Moves the pair of a node and its holder to another path. Returns the former path, or none if there is no such pair.
    pub(super) fn renew(&mut self, node: &mut Node, holder: u16, path: u32) -> Option<u32> {
        let place = self.path_mut(node, holder)?;
        Some(std::mem::replace(place, path))
    }

    /// Adds a holder to the node, which must not have it yet.
    pub(super) fn add(&mut self, node: &mut Node, holder: u16, path: u32) {
        node.count += 1;
        if let Some(crowd) = self.crowd_mut(node) {
            crowd.add(holder, path);
        } else if node.count == 1 {
            node.holder = holder;
            node.path = path;
        } else {
            node.more = self.further.put(Further {
                holder,
                path,
                next: node.more,
            });
            if node.count > self.list_at_most {
                self.gather(node);
            }
        }
    }

    /// Removes the pair of a node and its holder, provided that `path` used it last. Returns whether it did.
    pub(super) fn remove(&mut self, node: &mut Node, holder: u16, path: u32) -> bool {
        if self.path_mut(node, holder).is_none_or(|own| *own != path) {
            return false;
        }
        node.count -= 1;
        if let Some(crowd) = self.crowd_mut(node) {
            crowd.remove(holder);
            if node.count <= self.list_at_most / 2 {
                self.scatter(node);
            }
        } else if node.holder == holder {
            self.promote(node);
        } else {
            self.unlist(node, holder);
        }
        true
    }

    pub(super) fn bytes(&self) -> usize {
        self.further.bytes()
            + self.crowds.capacity() * size_of::<Crowd>()
            + self.crowds.iter().map(Crowd::bytes).sum::<usize>()
            + self.vacant.capacity() * size_of::<u32>()
    }

    /// Number of further holders in lists, and of crowds.
    #[cfg(test)]
    pub(super) fn count(&self) -> (u32, usize) {
        (self.further.used(), self.crowds.len() - self.vacant.len())
    }

    #[inline]
    fn path_mut<'a>(&'a mut self, node: &'a mut Node, holder: u16) -> Option<&'a mut u32> {
        if node.holder == CROWD {
            return self.crowd_mut(node)?.path_mut(holder);
        }
        if node.holder == holder {
            return (node.count > 0).then_some(&mut node.path);
        }
        let mut at = node.more;
        while at != NONE {
            let further = self.further.get(at);
            if further.holder == holder {
                return Some(&mut self.further.get_mut(at).path);
            }
            at = further.next;
        }
        None
    }

    #[inline]
    fn crowd_mut(&mut self, node: &Node) -> Option<&mut Crowd> {
        if node.holder != CROWD {
            return None;
        }
        self.crowds.get_mut(node.more as usize)
    }

    fn put(&mut self, crowd: Crowd) -> u32 {
        let vacant = self.vacant.pop();
        let at = vacant.unwrap_or(u32::try_from(self.crowds.len()).unwrap_or(NONE));
        match self.crowds.get_mut(at as usize) {
            Some(place) => *place = crowd,
            None => self.crowds.push(crowd),
        }
        at
    }

    /// Replaces the first holder, which is gone, by the second.
    fn promote(&mut self, node: &mut Node) {
        if node.more == NONE {
            return;
        }
        let second = *self.further.get(node.more);
        self.further.free(node.more);
        node.holder = second.holder;
        node.path = second.path;
        node.more = second.next;
    }

    /// Removes a further holder from the list.
    fn unlist(&mut self, node: &mut Node, holder: u16) {
        let (mut at, mut before) = (node.more, NONE);
        while at != NONE {
            let further = *self.further.get(at);
            if further.holder == holder {
                let link = if before == NONE {
                    &mut node.more
                } else {
                    &mut self.further.get_mut(before).next
                };
                *link = further.next;
                self.further.free(at);
                return;
            }
            before = at;
            at = further.next;
        }
    }

    /// Turns a list that is too long into a crowd.
    fn gather(&mut self, node: &mut Node) {
        let mut crowd = Crowd::default();
        crowd.add(node.holder, node.path);
        let mut at = node.more;
        while at != NONE {
            let further = *self.further.get(at);
            crowd.add(further.holder, further.path);
            self.further.free(at);
            at = further.next;
        }
        node.holder = CROWD;
        node.path = NONE;
        node.more = self.put(crowd);
    }

    /// Turns a crowd that is small into a list again.
    fn scatter(&mut self, node: &mut Node) {
        let Some(crowd) = self.crowd_mut(node).map(std::mem::take) else {
            return;
        };
        self.vacant.push(node.more);
        node.more = NONE;
        node.holder = 0;
        node.count = 0;
        for (holder, path) in crowd.into_list() {
            self.add(node, holder, path);
        }
    }
}
