//! Owns the situations that are measured: the workers, what their caches hold, what they are busy with, what is asked.
//! Whichever router is measured is put in the same ones.

/// Blocks that each worker's cache holds, all of them taken: 64,000 tokens in blocks of 16, two million in blocks of 512.
pub const CACHE_BLOCKS: u32 = 4_000;
/// Requests that each worker is busy with; the first half of them waits for its first token.
pub const BUSY: u32 = 4;
/// Tokens in the prompt of a request that a worker is busy with.
pub const BUSY_TOKENS: u32 = 1_024;
/// Output tokens that every request is expected to have.
pub const EXPECTED_TOKENS: u32 = 256;
/// Conversations whose turns are routed one after the other, so that no decision is the last one again.
pub const CONVERSATIONS: u32 = 4;
/// Token ids are below it.
const VOCABULARY: u64 = 128_000;

/// What the workers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fleet {
    /// Every worker runs requests whole: one is selected.
    Whole,
    /// Half of them prefill, half of them decode: two are selected, each out of half the workers.
    Pairs,
}

/// Who holds the beginning of what is asked.
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
    /// What the workers are.
    pub fleet: Fleet,
    /// How many there are in all.
    pub workers: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Tokens in each prompt that is measured.
    pub prompt_tokens: u32,
    /// Who holds the first three quarters of these prompts.
    pub holders: Holders,
}

impl Situation {
    /// The situation as plain numbers, for the way into wasm.
    pub fn numbers(&self) -> (u32, u32, u32, u32, u32) {
        (
            self.fleet as u32,
            self.workers,
            self.block_tokens,
            self.prompt_tokens,
            self.holders as u32,
        )
    }

    /// The situation that these numbers stand for, as they come out of [`Self::numbers`].
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

    /// The workers whose caches count: those that prefill.
    pub fn caches(&self) -> u32 {
        match self.fleet {
            Fleet::Whole => self.workers,
            Fleet::Pairs => self.workers / 2,
        }
    }

    /// The caches, counted from 0, that hold the beginning of a conversation.
    pub fn holders_of(&self, conversation: u32) -> Vec<u32> {
        match self.holders {
            Holders::All => (0..self.caches()).collect(),
            Holders::Few => (0..3)
                .map(|nth| (3 * conversation + nth) % self.caches())
                .collect(),
        }
    }

    /// Where, in tokens, a conversation's new turn begins: all before it may be cached, nothing after it is.
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

/// The token id that a new turn begins with, which makes every block from there on a new one.
pub fn new_turn(turn: u64) -> u32 {
    token_id(mix(u64::MAX, turn))
}

/// The name of the `nth` block of a new turn, where ids are not hashed.
pub fn new_block(turn: u64, nth: u32) -> u64 {
    mix(turn, !u64::from(nth))
}

/// The name of a block that a cache is filled with and that nobody asks for.
pub fn stuffing(cache: u32, block: u32) -> u64 {
    mix(!u64::from(cache), block.into())
}

fn token_id(number: u64) -> u32 {
    (number % VOCABULARY) as u32
}

/// Two numbers, well stirred (the finish of SplitMix64).
fn mix(one: u64, other: u64) -> u64 {
    let mut z = one
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(other.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .wrapping_add(0x2545_f491_4f6c_dd1d);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
