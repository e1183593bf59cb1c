//! Owns the measured situations: the workers, the contents of their caches, their load, and the requests. Every measured router
//! gets the same ones.

/// Blocks in each worker's cache, all in use: 64,000 tokens in blocks of 16, two million in blocks of 512.
pub const CACHE_BLOCKS: u32 = 4_000;
/// Requests running on each worker; the first half of them waits for the first token.
pub const BUSY: u32 = 4;
/// Prompt tokens of a running request.
pub const BUSY_TOKENS: u32 = 1_024;
/// Expected output tokens of every request.
pub const EXPECTED_TOKENS: u32 = 256;
/// Conversations whose turns are routed in rotation, so that no decision repeats the last one.
pub const CONVERSATIONS: u32 = 4;
/// Upper bound of token ids, exclusive.
const VOCABULARY: u64 = 128_000;

/// Kinds of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fleet {
    /// Every worker runs aggregated requests: one is selected.
    Whole,
    /// Half prefill, half decode: two are selected, each from half of the workers.
    Pairs,
}

/// Workers that hold the prefix of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holders {
    /// Three workers.
    Few,
    /// Every worker.
    All,
}

/// One situation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Situation {
    /// Kinds of workers.
    pub fleet: Fleet,
    /// Number of workers.
    pub workers: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Tokens in each measured prompt.
    pub prompt_tokens: u32,
    /// Workers that hold the first three quarters of these prompts.
    pub holders: Holders,
}

impl Situation {
    /// The situation as plain numbers, to be passed into wasm.
    pub fn numbers(&self) -> (u32, u32, u32, u32, u32) {
        (
            self.fleet as u32,
            self.workers,
            self.block_tokens,
            self.prompt_tokens,
            self.holders as u32,
        )
    }

    /// The situation with these numbers, as returned by [`Self::numbers`].
    pub fn from_numbers(
        fleet: u32,
        workers: u32,
        block_tokens: u32,
        prompt_tokens: u32,
        holders: u32,
    ) -> Self {
        Self {
            fleet: [Fleet::Whole, Fleet::Pairs][fleet as usize],
            workers,
            block_tokens,
            prompt_tokens,
            holders: [Holders::Few, Holders::All][holders as usize],
        }
    }

    /// Number of workers whose caches count: those that prefill.
    pub fn caches(&self) -> u32 {
        match self.fleet {
            Fleet::Whole => self.workers,
            Fleet::Pairs => self.workers / 2,
        }
    }

    /// The caches, counted from 0, that hold the prefix of a conversation.
    pub fn holders_of(&self, conversation: u32) -> Vec<u32> {
        match self.holders {
            Holders::All => (0..self.caches()).collect(),
            Holders::Few => (0..3)
                .map(|nth| (3 * conversation + nth) % self.caches())
                .collect(),
        }
    }

    /// Offset in tokens at which a conversation's new turn begins: only tokens before it may be cached.
    pub fn fork(&self) -> u32 {
        self.prompt_tokens / 4 * 3
    }

    /// A conversation's token ids.
    pub fn prompt(&self, conversation: u32) -> Vec<u32> {
        (0..self.prompt_tokens)
            .map(|token| token_id(mix(conversation.into(), token.into())))
            .collect()
    }
}

/// The first token id of a new turn, which makes every block from there on a new one.
pub fn new_turn(turn: u64) -> u32 {
    token_id(mix(u64::MAX, turn))
}

/// Sequence hash of the `nth` block of a new turn, where ids are not hashed.
pub fn new_block(turn: u64, nth: u32) -> u64 {
    mix(turn, !u64::from(nth))
}

/// Sequence hash of a block that fills a cache and is never requested.
pub fn stuffing(cache: u32, block: u32) -> u64 {
    mix(!u64::from(cache), block.into())
}

fn token_id(number: u64) -> u32 {
    (number % VOCABULARY) as u32
}

/// Mixes two numbers (the finish of SplitMix64).
fn mix(one: u64, other: u64) -> u64 {
    let mut z = one
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(other.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .wrapping_add(0x2545_f491_4f6c_dd1d);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
