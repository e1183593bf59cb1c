//! Owns threads of one proxy that exchange their state, and the measured operations of the exchange.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hint::black_box;

use routing::fleet::TargetKey;
use routing::load::ThreadLoad;
use routing::prefix::Decision;
use routing::route::Router;
use routing::sharing::{PoolShares, SharedStore, ThreadSync, ThreadUpdate, Totals, WriteResult};

use crate::ours::{START, everywhere, router};
use crate::situation::{CACHE_BLOCKS, Fleet, Holders, Situation, stuffing};

/// Number of threads.
const VMS: u64 = 4;
/// Blocks of a shared decision: a prompt of 11,200 tokens.
pub const DECISION_BLOCKS: u32 = 700;
const POOL: u64 = 1;

/// A shared store in memory, which copies as a host does.
#[derive(Default)]
struct Map {
    values: RefCell<HashMap<String, (Vec<u8>, u32)>>,
    version: Cell<u32>,
}

impl SharedStore for Map {
    fn read(&self, key: &str) -> Option<(Vec<u8>, u32)> {
        self.values.borrow().get(key).cloned()
    }

    fn write(&self, key: &str, value: &[u8], _: Option<u32>) -> WriteResult {
        self.version.set(self.version.get() + 1);
        let new = (value.to_vec(), self.version.get());
        self.values.borrow_mut().insert(key.to_owned(), new);
        WriteResult::Done
    }
}

/// One thread's router and its end of the exchange, and the other threads.
pub struct Threads {
    router: Router,
    desk: ThreadSync,
    others: Vec<ThreadSync>,
    board: Map,
    shares: Vec<PoolShares>,
    heard: Vec<ThreadLoad>,
    tick: u64,
    decisions: u32,
}

impl Threads {
    /// Four threads over this many workers, all busy in each of them.
    pub fn over(workers: u32) -> Self {
        let router = router(&Situation {
            fleet: Fleet::Whole,
            workers,
            block_tokens: 16,
            prompt_tokens: 0,
            holders: Holders::Few,
        });
        let shares: Vec<ThreadLoad> = everywhere(&router).collect();
        let mut threads = Self {
            router,
            desk: ThreadSync::new(0),
            others: (1..VMS).map(ThreadSync::new).collect(),
            board: Map::default(),
            heard: shares.clone(),
            shares: vec![PoolShares { pool: POOL, shares }],
            tick: 0,
            decisions: 0,
        };
        for _ in 0..10 {
            threads.publish();
            threads.others_publish();
            threads.listen();
        }
        threads
    }

    /// Publishes all of this thread's state, since something has changed.
    pub fn publish(&mut self) {
        self.tick += 1;
        let totals = Totals {
            streams: self.tick,
            ..Totals::default()
        };
        self.desk.publish(&self.board, &totals, &self.shares, &[]);
    }

    /// Publishes all of the other threads' state.
    pub fn others_publish(&mut self) {
        let totals = Totals {
            streams: self.tick,
            ..Totals::default()
        };
        for desk in &mut self.others {
            desk.publish(&self.board, &totals, &self.shares, &[]);
        }
    }

    /// Reads the other threads' state.
    pub fn listen(&mut self) -> ThreadUpdate {
        self.desk.listen(&self.board, self.tick)
    }

    /// Takes over the other threads' bookings.
    pub fn hear(&mut self) {
        self.router.apply_shares(black_box(&self.heard));
    }

    /// A thread's complete work in one tick.
    pub fn tick(&mut self) {
        black_box(self.router.shares());
        self.publish();
        let heard = self.listen();
        for pool in &heard.shares {
            self.router.apply_shares(&pool.shares);
        }
    }

    /// Fills every cache with decisions of other threads.
    pub fn fill_caches(&mut self) {
        self.router.advance(START);
        for _ in 0..self.heard.len() as u32 * CACHE_BLOCKS.div_ceil(DECISION_BLOCKS) {
            let decision = self.next_decision();
            self.router.apply_decision(&decision);
        }
    }

    /// A prompt new to that worker.
    pub fn next_decision(&mut self) -> Decision {
        self.decisions += 1;
        let number = self.decisions;
        let tag = |block| stuffing(number, block) as u32;
        let nth = number as usize % self.heard.len();
        Decision {
            key: self.key(nth),
            path: (0..DECISION_BLOCKS).map(tag).collect(),
        }
    }

    /// Records another thread's decision.
    pub fn hear_decision(&mut self, decision: &Decision) {
        self.router.apply_decision(decision);
    }

    fn key(&self, nth: usize) -> TargetKey {
        self.heard[nth].key
    }
}
