//! Owns the queue of requests for KV blocks, and the return of unused blocks when a request is dropped.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;

use super::lease::{HandoffPrompt, LeaseCounts, LeaseTable, PullRefusal};

/// The blocks of one engine.
pub struct Kv {
    table: RefCell<LeaseTable>,
    freed: Notify,
    /// First come, first served, as in vLLM's scheduler: a small request does not overtake a large one that waits.
    line: Mutex<()>,
}

impl Kv {
    /// A pool of `capacity` blocks; hand-offs are held for `lease`.
    pub fn new(capacity: u32, lease: Duration) -> Rc<Self> {
        Rc::new(Self {
            table: RefCell::new(LeaseTable::new(capacity, lease)),
            freed: Notify::new(),
            line: Mutex::new(()),
        })
    }

    /// Takes `count` blocks if they are free.
    pub fn try_reserve(self: &Rc<Self>, count: u32) -> Option<Blocks> {
        let numbers = self.table.borrow_mut().take(count, now())?;
        Some(Blocks {
            kv: Rc::clone(self),
            numbers,
        })
    }

    /// Waits for `count` blocks, which a pull, an expired lease or a finished request frees.
    pub async fn reserve(self: &Rc<Self>, count: u32) -> Blocks {
        let _place = self.line.lock().await;
        loop {
            if let Some(blocks) = self.try_reserve(count) {
                return blocks;
            }
            let expiry = self.table.borrow().next_expiry();
            match expiry {
                Some(at) => tokio::select! {
                    () = self.freed.notified() => {}
                    () = tokio::time::sleep_until(at.into()) => {}
                },
                None => self.freed.notified().await,
            }
        }
    }

    /// Consumes a hand-off of this engine; see [`LeaseTable::consume`].
    pub fn consume(
        &self,
        id: &str,
        block_groups: &[Vec<u32>],
    ) -> Result<HandoffPrompt, PullRefusal> {
        let kv = self.table.borrow_mut().consume(id, block_groups, now())?;
        self.freed.notify_one();
        Ok(kv)
    }

    /// Whether this engine still holds a hand-off; see [`LeaseTable::holds`].
    pub fn holds(&self, id: &str) -> bool {
        self.table.borrow_mut().holds(id, now())
    }

    /// Loses a hand-off of this engine; see [`LeaseTable::lose`].
    pub fn lose(&self, id: &str) {
        self.table.borrow_mut().lose(id, now());
        self.freed.notify_one();
    }

    /// Drops a hand-off of this engine; see [`LeaseTable::revoke`].
    pub fn revoke(&self, id: &str) -> bool {
        let revoked = self.table.borrow_mut().revoke(id, now());
        self.freed.notify_one();
        revoked
    }

    /// Blocks in use, and the totals of the hand-offs.
    pub fn counts(&self) -> (u32, LeaseCounts) {
        let mut table = self.table.borrow_mut();
        table.expire(now());
        (table.used(), table.counts())
    }
}

/// Blocks of a request; dropping them returns them to the pool.
pub struct Blocks {
    kv: Rc<Kv>,
    numbers: Vec<u32>,
}

impl Blocks {
    /// Splits off `count` of the blocks, or all if there are fewer.
    pub fn split(&mut self, count: u32) -> Self {
        let count = self.numbers.len().min(count as usize);
        Self {
            kv: Rc::clone(&self.kv),
            numbers: self.numbers.drain(..count).collect(),
        }
    }

    /// Puts the blocks under a lease; returns the hand-off's id and the block numbers.
    pub fn hand_off(mut self, stem: &str, of: HandoffPrompt) -> (String, Vec<u32>) {
        let numbers = std::mem::take(&mut self.numbers);
        let mut table = self.kv.table.borrow_mut();
        (table.issue(stem, numbers.clone(), of, now()), numbers)
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        if self.numbers.is_empty() {
            return;
        }
        let numbers = std::mem::take(&mut self.numbers);
        self.kv.table.borrow_mut().give_back(numbers);
        self.kv.freed.notify_one();
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}
