//! Owns a shared store in memory, with injected failures.

use std::cell::{Cell, RefCell};

use hashbrown::HashMap;

use crate::fleet::{TargetKey, WorkerId};
use crate::load::Occupied;
use crate::sharing::{Decision, PoolShares, SharedStore, ThreadLoad, WriteResult};

/// A shared store that behaves as Envoy's shared data.
#[derive(Default)]
pub struct Map {
    values: RefCell<HashMap<String, (Vec<u8>, u32)>>,
    version: Cell<u32>,
    /// Number of coming writes that fail.
    pub failing: Cell<u32>,
    pub writes: Cell<u32>,
    pub reads: Cell<u32>,
}

impl Map {
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.values.borrow().keys().cloned().collect();
        keys.sort();
        keys
    }

    pub fn most_bytes(&self) -> usize {
        let values = self.values.borrow();
        values
            .values()
            .map(|(value, _)| value.len())
            .max()
            .unwrap_or(0)
    }

    pub fn put(&self, key: &str, value: &[u8]) {
        assert_eq!(self.write(key, value, None), WriteResult::Done);
    }
}

impl SharedStore for Map {
    fn read(&self, key: &str) -> Option<(Vec<u8>, u32)> {
        self.reads.set(self.reads.get() + 1);
        self.values.borrow().get(key).cloned()
    }

    fn write(&self, key: &str, value: &[u8], version: Option<u32>) -> WriteResult {
        if self.failing.get() > 0 {
            self.failing.set(self.failing.get() - 1);
            return WriteResult::Failed;
        }
        let mut values = self.values.borrow_mut();
        let there = values.get(key).map(|(_, version)| *version);
        if let (Some(there), Some(wanted)) = (there, version)
            && there != wanted
        {
            return WriteResult::Stale;
        }
        self.version.set(self.version.get() + 1);
        self.writes.set(self.writes.get() + 1);
        values.insert(key.to_owned(), (value.to_vec(), self.version.get()));
        WriteResult::Done
    }
}

/// A store on which something else happens just before the first write.
pub struct Interrupted<'a> {
    store: &'a Map,
    by: RefCell<Option<Box<dyn FnOnce() + 'a>>>,
}

impl<'a> Interrupted<'a> {
    pub fn new(store: &'a Map, by: impl FnOnce() + 'a) -> Self {
        Self {
            store,
            by: RefCell::new(Some(Box::new(by))),
        }
    }
}

impl SharedStore for Interrupted<'_> {
    fn read(&self, key: &str) -> Option<(Vec<u8>, u32)> {
        self.store.read(key)
    }

    fn write(&self, key: &str, value: &[u8], version: Option<u32>) -> WriteResult {
        if let Some(happens) = self.by.take() {
            happens();
        }
        self.store.write(key, value, version)
    }
}

pub fn key(worker: u64) -> TargetKey {
    TargetKey {
        worker: WorkerId(worker),
        rank: 0,
    }
}

/// One request being decoded, with bookings derived from `tokens`.
pub fn share(worker: u64, tokens: u64) -> ThreadLoad {
    ThreadLoad {
        booked_tokens: tokens,
        queued_tokens: tokens / 2,
        prefills: 1,
        decoding: Occupied {
            blocks: tokens / 16,
            weight: tokens * 3,
        },
        decodes: 1,
        key: key(worker),
    }
}

pub fn in_pool(pool: u64, shares: &[ThreadLoad]) -> Vec<PoolShares> {
    vec![PoolShares {
        pool,
        shares: shares.to_vec(),
    }]
}

/// All ranks with bookings, in order.
pub fn sorted(mut pools: Vec<PoolShares>) -> Vec<PoolShares> {
    pools.retain(|pool| !pool.shares.is_empty());
    pools.sort_by_key(|pool| pool.pool);
    for pool in &mut pools {
        pool.shares.sort_by_key(|share| share.key);
    }
    pools
}

pub fn decision(number: u32) -> (u64, Decision) {
    let decision = Decision {
        key: key(u64::from(number) % 7),
        path: vec![number; 1 + number as usize % 40],
    };
    (u64::from(number) % 2, decision)
}
