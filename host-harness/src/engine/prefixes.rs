//! Owns an engine's prefix cache: a prompt that shares a prefix with an earlier one is computed from there.

use std::cell::RefCell;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::refusal::Refusal;
use super::request::{Endpoint, PromptIds};
use super::{EngineConfig, PrefixCache, Role};
use crate::cache::Cache;

/// Description of the prefix cache for `--help`.
pub const PREFIX_CACHE: &str = "Prefix cache (--prefix-cache, prefill and aggregated engines): full blocks of --block-tokens tokens, known by all that goes before \
them; the least recently used of --kv-blocks go first. A prompt's time is that of the tokens behind its longest prefix kept, at least of one; it is kept when it \
is computed. Four bytes of text are a token. What is kept takes nothing from the blocks that requests hold: --kv-blocks is the size of each of the two. \
cached_tokens and computed_tokens are in /__state, and cached_tokens in the usage of a prefill's or an aggregated engine's answer.";

/// The cached blocks, if there is a cache.
pub struct Prefixes(Option<BlockCache>);

struct BlockCache {
    cache: RefCell<Cache>,
    block_tokens: u32,
}

impl Prefixes {
    /// The empty cache of a new engine.
    pub fn new(config: &EngineConfig) -> Self {
        match (config.prefix_cache, config.role) {
            (PrefixCache::Off, _) | (_, Role::Decode) => Self(None),
            (PrefixCache::Lru, Role::Prefill | Role::Aggregated) => Self(Some(BlockCache {
                cache: RefCell::new(Cache::new(config.kv_blocks as usize)),
                block_tokens: config.block_tokens,
            })),
        }
    }

    /// Sequence hashes of the full blocks of each prompt in a body; empty without a prefix cache.
    ///
    /// # Errors
    /// [`Refusal::BadRequest`] that names the field.
    pub fn blocks_of(&self, endpoint: Endpoint, body: &[u8]) -> Result<Vec<Vec<u64>>, Refusal> {
        let Some(kept) = &self.0 else {
            return Ok(Vec::new());
        };
        let prompts = PromptIds::of_body(endpoint, body)?;
        let named = prompts.iter().map(|ids| names(ids, kept.block_tokens));
        Ok(named.collect())
    }

    /// Cached tokens of each prompt, given the prompts' lengths. A prompt's last token is always computed.
    pub fn find(&self, prompts: &[Vec<u64>], tokens: &[u64]) -> Vec<u64> {
        let Some(kept) = &self.0 else {
            return Vec::new();
        };
        let cache = kept.cache.borrow();
        let found = prompts.iter().zip(tokens).map(|(blocks, tokens)| {
            let found = cache.depth(blocks) as u64 * u64::from(kept.block_tokens);
            found.min(tokens.saturating_sub(1))
        });
        found.collect()
    }

    /// Adds prompts that are being computed.
    pub fn keep(&self, prompts: &[Vec<u64>]) {
        let Some(kept) = &self.0 else {
            return;
        };
        let mut cache = kept.cache.borrow_mut();
        for blocks in prompts {
            cache.enter(blocks);
        }
    }
}

/// A sequence hash for each full block, chained to all blocks before it.
fn names(ids: &[u32], block_tokens: u32) -> Vec<u64> {
    let chain = ids.chunks_exact(block_tokens as usize);
    chain
        .scan(0, |before, block| {
            let mut hasher = DefaultHasher::new();
            (*before, block).hash(&mut hasher);
            *before = hasher.finish();
            Some(*before)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_beginnings_have_equal_names_and_nothing_else_has() {
        let ids: Vec<u32> = (0..12).collect();
        let mut other = ids.clone();
        other[5] = 99;
        let (ours, theirs) = (names(&ids, 4), names(&other, 4));
        assert_eq!(ours[0], theirs[0]);
        assert!(ours[1..].iter().zip(&theirs[1..]).all(|(a, b)| a != b));
        assert_eq!(names(&ids[..11], 4), ours[..2], "only full blocks");
        let twice = names(&[1, 1, 1, 1], 2);
        assert_ne!(twice[0], twice[1]);
    }

    #[test]
    fn a_decode_engine_keeps_nothing() {
        let config = EngineConfig {
            prefix_cache: PrefixCache::Lru,
            block_tokens: 1,
            ..EngineConfig::new(Role::Decode)
        };
        let prefixes = Prefixes::new(&config);
        prefixes.keep(&[vec![1, 2]]);
        assert!(prefixes.find(&[vec![1, 2]], &[2]).is_empty());
    }
}
