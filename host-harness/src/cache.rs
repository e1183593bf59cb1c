//! Owns the KV cache of one engine, simulated or in a replay: the blocks in it, and the order of eviction.

use std::hash::{BuildHasherDefault, Hasher};

use lru::LruCache;

/// Blocks in order of use. A prompt's blocks are used from its end to its start, so that a block is always older than those it
/// builds on: the oldest one is a leaf, and eviction never takes a block that another one needs.
#[derive(Debug)]
pub struct Cache {
    capacity: usize,
    blocks: LruCache<u64, (), BuildHasherDefault<IdentityHasher>>,
}

impl Cache {
    /// An empty cache for `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            blocks: LruCache::unbounded_with_hasher(BuildHasherDefault::default()),
        }
    }

    /// Number of leading blocks of a prompt in the cache.
    pub fn depth(&self, sequence: &[u64]) -> usize {
        let held = sequence
            .iter()
            .take_while(|name| self.blocks.contains(*name));
        held.count()
    }

    /// Marks a prompt's blocks as used: missing ones enter, and the least recently used are evicted until all fit.
    pub fn enter(&mut self, sequence: &[u64]) {
        for name in sequence.iter().take(self.capacity).rev() {
            self.blocks.put(*name, ());
        }
        while self.blocks.len() > self.capacity {
            self.blocks.pop_lru();
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
        assert_eq!(cache.blocks.len(), 3);
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
            let mut held: Vec<u64> = cache.blocks.iter().map(|(name, ())| *name).collect();
            let mut expected = list.clone();
            held.sort_unstable();
            expected.sort_unstable();
            assert_eq!(held, expected);
        }
    }
}
