//! Owns our router in a situation, and its measured operations.

use std::fmt::Write as _;
use std::time::Duration;

use routing::config::Config;
use routing::fleet::Target;
use routing::load::{Occupied, ThreadLoad};
use routing::prefix::hash::{self, HashScope, Salt};
use routing::prefix::index::{Bounds, Index};
use routing::prefix::{Blocks, RunLength};
use routing::route::{Assignment, Router, SelectionRequest};

use crate::situation::{
    BUSY, BUSY_TOKENS, CACHE_BLOCKS, CONVERSATIONS, EXPECTED_TOKENS, Fleet, Situation, new_block,
    new_turn, stuffing,
};

const MODEL: &str = "bench";
/// An arbitrary time since 1970.
pub(crate) const START: Duration = Duration::from_secs(1_800_000_000);
/// Time between two requests: so short that the queue of a busy worker does not count as drained meanwhile.
const STEP: Duration = Duration::from_micros(1);
/// Blocks of each prompt that fills a cache.
const STUFFING_BLOCKS: u32 = 200;
/// Tokens of a prompt so large that its worker is not picked again before all others.
const A_TURN_EACH: u64 = 1 << 30;
/// Requests between two ticks; each tick takes the decisions that are to go to other threads.
const TICK: u64 = 32;

/// The repeated operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A complete route: the ids are hashed; the index is queried; a worker, or a pair, is scored, picked and booked; the index
    /// learns what that worker will hold, and drops as much; the booking ends.
    Route,
    /// The same, starting with the hashes.
    Select,
}

impl Work {
    /// The work with this number, as passed into wasm.
    pub fn from_number(number: u32) -> Self {
        [Self::Route, Self::Select][number as usize]
    }
}

/// Our router in one situation.
pub struct Ours {
    router: Router,
    situation: Situation,
    conversations: Vec<Conversation>,
    /// Requests in flight for as long as this value lives.
    busy: Vec<Assignment>,
    turn: u64,
    now: Duration,
}

/// One conversation.
struct Conversation {
    /// Token ids, little-endian as they are hashed.
    ids: Vec<u8>,
    blocks: Blocks,
}

impl Ours {
    /// A router for this situation: full caches, busy workers.
    pub fn put_in(situation: &Situation) -> Self {
        let mut ours = Self {
            router: router(situation),
            situation: *situation,
            conversations: conversations(situation),
            busy: Vec::new(),
            turn: 0,
            now: START,
        };
        ours.fill_caches();
        ours.begin_conversations();
        ours.make_busy();
        ours
    }

    /// Gives other threads the same bookings on every worker as this one, and prepares this thread's decisions for them.
    pub fn share(&mut self) {
        let shares: Vec<ThreadLoad> = everywhere(&self.router).collect();
        self.router.apply_shares(&shares);
        self.router.keep_decisions();
    }

    /// Does this work `times` times in sequence.
    pub fn run(&mut self, work: Work, times: u64) {
        for _ in 0..times {
            self.turn += 1;
            self.now += STEP;
            if self.turn.is_multiple_of(TICK) {
                self.router.take_decisions();
            }
            match work {
                Work::Route => self.route(),
                Work::Select => self.select(),
            }
        }
    }

    fn route(&mut self) {
        let conversation = self.turn as usize % self.conversations.len();
        let fork = self.situation.fork() as usize * size_of::<u32>();
        let ids = &mut self.conversations[conversation].ids;
        ids[fork..fork + size_of::<u32>()].copy_from_slice(&new_turn(self.turn).to_le_bytes());
        let blocks = blocks(ids, self.situation.block_tokens);
        drop(self.reserve(&blocks, self.situation.prompt_tokens.into()));
    }

    fn select(&mut self) {
        let conversation = self.turn as usize % self.conversations.len();
        let fork = self.situation.fork() / self.situation.block_tokens;
        let mut blocks = std::mem::take(&mut self.conversations[conversation].blocks);
        let fork = blocks.run_length.hashes(fork);
        for (block, nth) in blocks.sequence[fork..].iter_mut().zip(0..) {
            *block = new_block(self.turn, nth);
        }
        drop(self.reserve(&blocks, self.situation.prompt_tokens.into()));
        self.conversations[conversation].blocks = blocks;
    }

    fn reserve(&mut self, blocks: &Blocks, prompt_tokens: u64) -> Assignment {
        let ask = SelectionRequest {
            model: MODEL,
            prompt_tokens,
            blocks,
            expected_tokens: Some(EXPECTED_TOKENS.into()),
            ..SelectionRequest::default()
        };
        let seat = self.router.reserve(&ask, self.now);
        seat.unwrap_or_else(|refusal| panic!("nobody was picked: {refusal:?}"))
    }

    /// Fills every cache to its capacity with prompts that are never requested.
    fn fill_caches(&mut self) {
        for nth in 0..CACHE_BLOCKS.div_ceil(STUFFING_BLOCKS) {
            self.give_each(|cache| stuffed(cache, nth * STUFFING_BLOCKS, STUFFING_BLOCKS));
        }
    }

    /// Gives the first three quarters of each conversation to the workers that are to hold it.
    fn begin_conversations(&mut self) {
        for conversation in 0..CONVERSATIONS {
            let ids = self.conversations[conversation as usize].ids.clone();
            let begun = self.situation.fork() as usize * size_of::<u32>();
            let begun = blocks(&ids[..begun], self.situation.block_tokens);
            let holders = self.situation.holders_of(conversation).len();
            let seats: Vec<Assignment> = (0..holders)
                .map(|_| self.reserve(&begun, A_TURN_EACH))
                .collect();
            drop(seats);
        }
    }

    /// Gives every worker its requests; half of them have their first token.
    fn make_busy(&mut self) {
        let blocks = BUSY_TOKENS / self.situation.block_tokens;
        for nth in 0..BUSY {
            for cache in 0..self.situation.caches() {
                let blocks = stuffed(cache, CACHE_BLOCKS + nth * blocks, blocks);
                let seat = self.reserve(&blocks, BUSY_TOKENS.into());
                self.busy.push(seat);
            }
        }
        self.now += Duration::from_secs(1);
        let begun = self.busy.len() / 2;
        for seat in &mut self.busy[begun..] {
            seat.first_token(self.now);
        }
    }

    /// Routes one prompt per cache, each so large that the next goes to another worker.
    fn give_each(&mut self, prompt: impl Fn(u32) -> Blocks) {
        let seats: Vec<Assignment> = (0..self.situation.caches())
            .map(|cache| self.reserve(&prompt(cache), A_TURN_EACH))
            .collect();
        drop(seats);
    }
}

/// A full prefix index by itself.
pub struct Memory {
    /// Kept alive while its memory is measured.
    _index: Index,
    /// Pairs of a worker and a block that it holds.
    pub pairs: u64,
    /// Heap bytes, by its own count.
    pub bytes: u64,
}

impl Memory {
    /// Memory of an index for this many workers, each with a full cache of its own.
    pub fn of_index(workers: u32) -> Self {
        let max_pairs = max_pairs(workers);
        let mut index = Index::new(Bounds {
            max_pairs,
            ttl: Duration::from_secs(120),
        });
        for cache in 0..workers {
            index.open(cache as usize, Some(CACHE_BLOCKS));
            for first in (0..CACHE_BLOCKS).step_by(STUFFING_BLOCKS as usize) {
                index.learn(
                    cache as usize,
                    &stuffed(cache, first, STUFFING_BLOCKS),
                    START,
                );
            }
        }
        Self {
            pairs: index.pairs() as u64,
            bytes: index.bytes() as u64,
            _index: index,
        }
    }
}

/// Bookings of another thread: the same on every worker.
pub(crate) fn everywhere(router: &Router) -> impl Iterator<Item = ThreadLoad> {
    let targets = router.fleet().workers().flat_map(|worker| worker.targets());
    targets.map(|target: Target| ThreadLoad {
        booked_tokens: (BUSY * BUSY_TOKENS).into(),
        queued_tokens: (BUSY * BUSY_TOKENS).into(),
        prefills: BUSY,
        decoding: Occupied {
            blocks: u64::from(BUSY * BUSY_TOKENS) / 16,
            weight: u64::from(BUSY * BUSY_TOKENS) * 1000 / 16,
        },
        decodes: BUSY,
        key: target.key(),
    })
}

pub(crate) fn router(situation: &Situation) -> Router {
    let mut workers = String::new();
    for worker in 0..situation.workers {
        let (high, low) = (worker / 256, worker % 256);
        let role = match situation.fleet {
            Fleet::Whole => "aggregated",
            Fleet::Pairs if worker % 2 == 0 => "prefill",
            Fleet::Pairs => "decode",
        };
        let comma = if worker == 0 { "" } else { "," };
        write!(
            workers,
            r#"{comma}{{"address": "10.0.{high}.{low}:8000", "role": "{role}", "model": "{MODEL}", "kv_blocks": {CACHE_BLOCKS}}}"#
        )
        .expect("a string takes it");
    }
    let config = format!(
        r#"{{"pools": [{{
            "name": "bench",
            "protocol": "nixl",
            "block_tokens": {},
            "prefixes": {{"max_blocks": {}}},
            "discovery": {{"static": {{"workers": [{workers}]}}}}
        }}]}}"#,
        situation.block_tokens,
        max_pairs(situation.workers)
    );
    let config = Config::parse(config.as_bytes()).expect("a configuration");
    let pool = config.pools.into_iter().next().expect("a pool");
    Router::new(pool, 1, 1, Duration::ZERO)
}

/// Room for all caches at once, with a margin.
fn max_pairs(workers: u32) -> usize {
    (workers * (CACHE_BLOCKS + STUFFING_BLOCKS)) as usize
}

fn conversations(situation: &Situation) -> Vec<Conversation> {
    let conversation = |nth| {
        let ids: Vec<u8> = situation
            .prompt(nth)
            .into_iter()
            .flat_map(u32::to_le_bytes)
            .collect();
        let blocks = blocks(&ids, situation.block_tokens);
        Conversation { ids, blocks }
    };
    (0..CONVERSATIONS).map(conversation).collect()
}

fn blocks(ids: &[u8], block_tokens: u32) -> Blocks {
    let scope = hash::scope(MODEL, HashScope::ByIds);
    let hashes = hash::ids(ids, block_tokens, Salt::new(None, None));
    Blocks::of_hashes(scope, hashes, RunLength::of(block_tokens))
}

/// Blocks that are never requested.
fn stuffed(cache: u32, first: u32, count: u32) -> Blocks {
    Blocks {
        scope: hash::scope(MODEL, HashScope::ByIds),
        sequence: (first..first + count)
            .map(|block| stuffing(cache, block))
            .collect(),
        run_length: RunLength::Even,
    }
}
