//! Owns the hashes of a prompt's blocks: of token ids, bit-identical to Dynamo's, or of canonical text.
//!
//! A sequence hash is chained to the one before, so that it covers the whole prompt up to its block's end. A partial block
//! at the end has none.

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64, xxh3_64_with_seed};

use super::{RunLength, blocks_of};

/// Dynamo's seed, for blocks of ids and for their chain.
const IDS_SEED: u64 = 1337;

/// The seed for the chain of text blocks: any other number that all VMs and gateways share.
const TEXT_SEED: u64 = 0x7465_7874_626c_6f63;

/// Bytes of a token: of an id as hashed, and of the text that counts as one token.
const TOKEN_BYTES: usize = 4;

/// Separates prompts of equal token ids: by LoRA adapter and cache salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Salt(u64);

impl Salt {
    /// Dynamo's seed for blocks of an adapter and a cache salt; an empty one counts as none.
    pub fn new(adapter: Option<&str>, cache_salt: Option<&[u8]>) -> Self {
        let adapter = adapter.map(str::as_bytes);
        let share = |name: Option<&[u8]>, seed| match name {
            Some(name) if !name.is_empty() => xxh3_64_with_seed(name, seed),
            _ => 0,
        };
        Self(
            IDS_SEED
                .wrapping_add(share(adapter, 0))
                .wrapping_add(share(cache_salt, 1)),
        )
    }
}

/// The sequence hashes of the full blocks of `ids` (token ids as little-endian u32 bytes), as in Dynamo 1.6, for blocks of
/// `block_tokens` (0 counts as 1).
pub fn ids(ids: &[u8], block_tokens: u32, salt: Salt) -> Vec<u64> {
    let blocks = ids.chunks_exact(block_bytes(block_tokens));
    let mut sequence = Vec::with_capacity(blocks.len());
    let mut previous = None;
    for block in blocks {
        let block = xxh3_64_with_seed(block, salt.0);
        let name = match previous {
            None => block,
            Some(previous) => chain(previous, block, IDS_SEED),
        };
        sequence.push(name);
        previous = Some(name);
    }
    sequence
}

/// Hashes text as it arrives, in pieces of any size, a run of blocks at a time.
///
/// A run is hashed in place, and copied only if it spans several pieces. Its own hash takes no seed: for long inputs, XXH3
/// derives a secret from a seed on every call.
#[derive(Debug)]
pub struct Text {
    block_bytes: usize,
    run_length: RunLength,
    /// Bytes of the next run.
    run_bytes: usize,
    /// Bytes of the next run so far.
    held: Vec<u8>,
    bytes: u64,
    previous: u64,
    sequence: Vec<u64>,
}

impl Text {
    /// For blocks of `block_tokens` (0 counts as 1) of four bytes each, in runs as long as `run_length` says.
    pub fn new(block_tokens: u32, run_length: RunLength) -> Self {
        let block_bytes = block_bytes(block_tokens);
        Self {
            block_bytes,
            run_length,
            run_bytes: block_bytes,
            held: Vec::new(),
            bytes: 0,
            previous: TEXT_SEED,
            sequence: Vec::new(),
        }
    }

    /// Takes the next piece.
    pub fn put(&mut self, mut piece: &[u8]) {
        self.bytes = self.bytes.saturating_add(piece.len() as u64);
        if !self.held.is_empty() {
            let missing = self.run_bytes.saturating_sub(self.held.len());
            let Some((end, rest)) = piece.split_at_checked(missing) else {
                self.held.extend_from_slice(piece);
                return;
            };
            self.held.extend_from_slice(end);
            self.name_held();
            piece = rest;
        }
        while let Some((run, rest)) = piece.split_at_checked(self.run_bytes) {
            self.name(xxh3_64(run));
            piece = rest;
        }
        self.held.extend_from_slice(piece);
    }

    /// Takes the next byte.
    pub fn push(&mut self, byte: u8) {
        self.bytes = self.bytes.saturating_add(1);
        self.held.push(byte);
        if self.held.len() >= self.run_bytes {
            self.name_held();
        }
    }

    fn name_held(&mut self) {
        self.name(xxh3_64(&self.held));
        self.held.clear();
    }

    fn name(&mut self, block: u64) {
        self.previous = chain(self.previous, block, TEXT_SEED);
        self.sequence.push(self.previous);
        let kind = self.run_length.kind(self.sequence.len());
        self.run_bytes = self.block_bytes.saturating_mul(blocks_of(kind) as usize);
    }

    /// Tokens taken so far, at four bytes each; at least one.
    pub fn tokens(&self) -> u64 {
        self.bytes.div_ceil(TOKEN_BYTES as u64).max(1)
    }

    /// The sequence hashes of the full runs of blocks.
    pub fn finish(self) -> Vec<u64> {
        self.sequence
    }
}

/// What a prompt's hashes are computed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HashScope<'a> {
    /// Token ids. Adapter and salt are part of the block hashes, as in Dynamo.
    ByIds,
    /// Text, for this adapter, salt and rendering.
    ByText {
        /// The LoRA adapter.
        adapter: Option<&'a str>,
        /// The cache salt.
        cache_salt: Option<&'a [u8]>,
        /// The request's settings for turning text into tokens, as a number; none: no such settings.
        rendering: Option<u64>,
    },
}

/// The scope of a prompt's blocks: prompts of different scopes share nothing, even with equal hashes.
pub fn scope(model: &str, known: HashScope<'_>) -> u64 {
    let mut hash = Xxh3Default::new();
    let mut add = |part: &[u8]| {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    add(model.as_bytes());
    match known {
        HashScope::ByIds => add(b"ids"),
        HashScope::ByText {
            adapter,
            cache_salt,
            rendering,
        } => {
            add(b"text");
            add(adapter.unwrap_or_default().as_bytes());
            add(cache_salt.unwrap_or_default());
            if let Some(rendering) = rendering {
                add(&rendering.to_le_bytes());
            }
        }
    }
    hash.digest()
}

fn block_bytes(block_tokens: u32) -> usize {
    usize::try_from(block_tokens)
        .unwrap_or(usize::MAX)
        .saturating_mul(TOKEN_BYTES)
        .max(TOKEN_BYTES)
}

/// The sequence hash of a block that follows `previous`.
fn chain(previous: u64, block: u64, seed: u64) -> u64 {
    let both = (u128::from(block) << u64::BITS) | u128::from(previous);
    xxh3_64_with_seed(&both.to_le_bytes(), seed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(ids: impl IntoIterator<Item = u32>) -> Vec<u8> {
        ids.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    fn salt(adapter: &str, cache_salt: &str) -> Salt {
        Salt::new(Some(adapter), Some(cache_salt.as_bytes()))
    }

    /// Computed with Dynamo 1.6.1 (block hashes) and with the reference implementation of XXH3 (block and sequence
    /// hashes), which agree.
    #[test]
    fn ids_are_named_as_dynamo_names_them() {
        let short = [
            (
                salt("", ""),
                [
                    14643705804678351452,
                    4945711292740353085,
                    12583592247330656132,
                ],
            ),
            (
                salt("", "tenant-a"),
                [
                    5738685477468498325,
                    1076233986426276607,
                    14251413665512820044,
                ],
            ),
            (
                salt("sql", ""),
                [
                    14015314787876343978,
                    1142319422888126198,
                    12437434185124157295,
                ],
            ),
            (
                salt("sql", "tenant-a"),
                [
                    2292810287918939514,
                    3755602203262973408,
                    15716065106602112493,
                ],
            ),
        ];
        for (salt, expected) in short {
            assert_eq!(ids(&bytes(1..=12), 4, salt), expected, "{salt:?}");
        }
        let long = [
            (salt("", ""), [6136106876000258808, 552576379766184042]),
            (
                salt("", "tenant-a"),
                [11294658110435000105, 898395843678058034],
            ),
            (salt("sql", ""), [17378908573868801086, 4070973901913036682]),
            (
                salt("sql", "tenant-a"),
                [15329567612999013107, 14689505471779494798],
            ),
        ];
        for (salt, expected) in long {
            assert_eq!(ids(&bytes(1..=1024), 512, salt), expected, "{salt:?}");
        }
    }

    #[test]
    fn blocks_of_ids_have_these_hashes_of_their_own() {
        let alone = |range| ids(&bytes(range), 4, Salt::new(None, None));
        assert_eq!(alone(5..=8), [16777012769546811212]);
        assert_eq!(alone(9..=12), [483935686894639516]);
    }

    #[test]
    fn a_partial_block_has_no_name() {
        let none = Salt::new(None, None);
        for (count, blocks) in [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)] {
            assert_eq!(ids(&bytes(0..count), 4, none).len(), blocks);
            let mut text = Text::new(4, RunLength::Even);
            text.put(&bytes(0..count));
            assert_eq!(text.tokens(), u64::from(count.max(1)));
            assert_eq!(text.finish().len(), blocks);
        }
        assert_eq!(ids(&bytes(0..3), 0, none).len(), 3);
        assert_eq!(ids(&bytes(0..3), u32::MAX, none).len(), 0);
    }

    #[test]
    fn an_empty_adapter_or_salt_says_nothing() {
        assert_eq!(salt("", ""), Salt::new(None, None));
        let text = |adapter, cache_salt| {
            scope(
                "m",
                HashScope::ByText {
                    adapter,
                    cache_salt,
                    rendering: None,
                },
            )
        };
        assert_eq!(text(Some(""), Some(b"")), text(None, None));
    }

    #[test]
    fn an_adapters_name_is_not_a_salt() {
        assert_ne!(salt("a", ""), salt("", "a"));
        assert_ne!(salt("a", "b"), salt("b", "a"));
    }

    #[test]
    fn scopes_tell_models_kinds_adapters_and_salts_apart() {
        let text = |adapter, cache_salt| HashScope::ByText {
            adapter: Some(adapter),
            cache_salt: Some(cache_salt),
            rendering: None,
        };
        let scopes = [
            scope("m", HashScope::ByIds),
            scope("n", HashScope::ByIds),
            scope("m", text("", b"")),
            scope("n", text("", b"")),
            scope("m", text("a", b"")),
            scope("m", text("", b"a")),
            scope("m", text("a", b"b")),
            scope("m", text("ab", b"")),
            scope("mi", text("", b"")),
        ];
        let distinct: std::collections::BTreeSet<u64> = scopes.into_iter().collect();
        assert_eq!(distinct.len(), scopes.len());
    }

    #[test]
    fn text_and_ids_of_equal_bytes_have_different_names() {
        let same = bytes(1..=12);
        let mut text = Text::new(4, RunLength::Even);
        text.put(&same);
        let by_ids = ids(&same, 4, Salt::new(None, None));
        assert!(
            text.finish()
                .iter()
                .zip(&by_ids)
                .all(|(text, id)| text != id)
        );
    }

    #[test]
    fn equal_blocks_have_different_names_in_different_places() {
        let mut text = Text::new(1, RunLength::Even);
        text.put(b"same".repeat(3).as_slice());
        let hashes = text.finish();
        assert!(hashes[0] != hashes[1] && hashes[1] != hashes[2] && hashes[0] != hashes[2]);
    }

    proptest! {
        #[test]
        fn text_is_named_alike_however_it_is_split(
            text in proptest::collection::vec(any::<u8>(), 0..600),
            cuts in proptest::collection::vec(0usize..600, 0..40),
            block_tokens in prop_oneof![0u32..9, Just(80), Just(512)],
        ) {
            let mut whole = Text::new(block_tokens, RunLength::Even);
            whole.put(&text);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.push(text.len());
            cuts.sort_unstable();
            let mut pieces = Text::new(block_tokens, RunLength::Even);
            let mut from = 0;
            for cut in cuts {
                match &text[from..cut] {
                    [byte] => pieces.push(*byte),
                    piece => pieces.put(piece),
                }
                from = cut;
            }
            prop_assert_eq!(pieces.tokens(), whole.tokens());
            prop_assert_eq!(pieces.finish(), whole.finish());
        }

        #[test]
        fn a_longer_prompt_keeps_the_names_of_its_beginning(
            ids_of in proptest::collection::vec(any::<u32>(), 0..100),
            kept in 0usize..100,
            block_tokens in 1u32..20,
        ) {
            let none = Salt::new(None, None);
            let all = bytes(ids_of.iter().copied());
            let begun = bytes(ids_of.iter().copied().take(kept));
            prop_assert!(ids(&all, block_tokens, none).starts_with(&ids(&begun, block_tokens, none)));
            let mut short = Text::new(block_tokens, RunLength::Even);
            short.put(&begun);
            let mut long = Text::new(block_tokens, RunLength::Even);
            long.put(&all);
            prop_assert!(long.finish().starts_with(&short.finish()));
        }
    }
}
