//! Owns the KV cache of one engine, simulated or in a replay: the blocks in it, and the order of eviction.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Blocks in order of use. A prompt's blocks are used from its end to its start, so that a block is always older than those it
/// builds on: the oldest one is a leaf, and eviction never takes a block that another one needs.
#[derive(Debug)]
pub struct Cache {
    capacity: usize,
    places: HashMap<u64, usize, BuildHasherDefault<IdentityHasher>>,
    nodes: Vec<Node>,
    /// Unused nodes.
    free: Vec<usize>,
    newest: usize,
    oldest: usize,
}

/// A block in a list by time of use, with links to its neighbours.
#[derive(Debug)]
struct Node {
    name: u64,
    newer: usize,
    older: usize,
}

/// No node.
const NONE: usize = usize::MAX;

impl Cache {
    /// An empty cache for `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            places: HashMap::default(),
            nodes: Vec::new(),
            free: Vec::new(),
            newest: NONE,
            oldest: NONE,
        }
    }

    /// Number of leading blocks of a prompt in the cache.
    pub fn depth(&self, sequence: &[u64]) -> usize {
        let held = sequence
            .iter()
            .take_while(|name| self.places.contains_key(name));
        held.count()
    }

    /// Marks a prompt's blocks as used: missing ones enter, and the least recently used are evicted until all fit.
    pub fn enter(&mut self, sequence: &[u64]) {
        for name in sequence.iter().take(self.capacity).rev() {
            self.touch(*name);
        }
        while self.places.len() > self.capacity {
            self.evict();
        }
    }

    fn touch(&mut self, name: u64) {
        if let Some(place) = self.places.get(&name).copied() {
            self.unlink(place);
            self.link(place);
            return;
        }
        let node = Node {
            name,
            newer: NONE,
            older: NONE,
        };
        let place = match self.free.pop() {
            Some(place) => {
                self.nodes[place] = node;
                place
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        self.places.insert(name, place);
        self.link(place);
    }

    fn evict(&mut self) {
        let place = self.oldest;
        self.unlink(place);
        self.places.remove(&self.nodes[place].name);
        self.free.push(place);
    }

    /// Puts a node at the front.
    fn link(&mut self, place: usize) {
        self.nodes[place].newer = NONE;
        self.nodes[place].older = self.newest;
        match self.newest {
            NONE => self.oldest = place,
            newest => self.nodes[newest].newer = place,
        }
        self.newest = place;
    }

    fn unlink(&mut self, place: usize) {
        let Node { newer, older, .. } = self.nodes[place];
        match newer {
            NONE => self.newest = older,
            newer => self.nodes[newer].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.nodes[older].newer = newer,
        }
    }
}

/// Sequence hashes need no further hashing.
#[derive(Debug, Default)]
pub struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, name: u64) {
        self.0 = name;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_least_recently_goes_first() {
        let mut cache = Cache::new(4);
        cache.enter(&[1, 2]);
        cache.enter(&[11, 12]);
        cache.enter(&[1]);
        cache.enter(&[21]);
        assert_eq!(cache.depth(&[1, 2]), 1, "the leaf 2 was the oldest");
        assert_eq!(cache.depth(&[11, 12]), 2);
        cache.enter(&[31, 32]);
        assert_eq!(cache.depth(&[11, 12]), 0);
        assert_eq!((cache.depth(&[1]), cache.depth(&[21])), (1, 1));
    }

    #[test]
    fn leaves_go_before_what_they_build_on() {
        let mut cache = Cache::new(4);
        cache.enter(&[1, 2, 3, 4]);
        for (new, left) in [(91, 3), (92, 2), (93, 1), (94, 0)] {
            cache.enter(&[new]);
            assert_eq!(cache.depth(&[1, 2, 3, 4]), left);
        }
    }

    #[test]
    fn of_a_prompt_that_does_not_fit_the_beginning_is_kept() {
        let mut cache = Cache::new(3);
        cache.enter(&[9]);
        cache.enter(&[1, 2, 3, 4, 5]);
        assert_eq!(cache.depth(&[1, 2, 3, 4, 5]), 3);
        assert_eq!(cache.depth(&[9]), 0);
        assert_eq!(cache.places.len(), 3);
    }

    #[test]
    fn a_hole_ends_a_prefix() {
        let mut cache = Cache::new(9);
        cache.enter(&[1, 2]);
        assert_eq!(cache.depth(&[1, 7, 2]), 1);
        assert_eq!(cache.depth(&[]), 0);
    }

    #[test]
    fn it_does_as_a_plain_list_does() {
        let (mut cache, mut list) = (Cache::new(20), Vec::<u64>::new());
        let mut state = 1u64;
        for _ in 0..2000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let (root, length) = ((state >> 40) % 6, (state >> 50) % 9);
            let prompt: Vec<u64> = (0..length).map(|at| root * 100 + at).collect();
            cache.enter(&prompt);
            for name in prompt.iter().rev() {
                list.retain(|held| held != name);
                list.push(*name);
            }
            list.drain(..list.len().saturating_sub(20));
            let mut held: Vec<u64> = cache.places.keys().copied().collect();
            let mut expected = list.clone();
            held.sort_unstable();
            expected.sort_unstable();
            assert_eq!(held, expected);
        }
    }
}
