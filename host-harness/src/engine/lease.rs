//! Owns an engine's KV blocks and the leases on hand-offs: issued once, consumed once, expired in time.
//!
//! Pure: the clock is an argument, which must never go back.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use lru::LruCache;
use serde::{Deserialize, Serialize};

/// Number of remembered ended hand-offs, to distinguish "used" and "expired" from "unknown". Bounded, so that a soak of days does
/// not grow; far more than a second use ever lags behind.
const REMEMBERED: usize = 65_536;

/// The prompt whose KV a hand-off carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoffPrompt {
    /// Prompt tokens held.
    pub prompt_tokens: u64,
    /// Identity of the prompt, so that KV handed to another request is noticed.
    pub prompt_fingerprint: u64,
}

/// Why a pull was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum PullRefusal {
    /// The hand-off was issued by another engine, or by this one before it restarted.
    #[error("remote_engine_id is not this engine's")]
    WrongEngine,
    /// The hand-off was never issued, or too long ago to remember.
    #[error("no such remote_request_id")]
    Unknown,
    /// The hand-off exists, but with other blocks.
    #[error("remote_block_ids are not those of the request")]
    WrongBlocks,
    /// The hand-off was already pulled.
    #[error("the blocks were already pulled")]
    Used,
    /// The lease ended before the pull.
    #[error("the lease of the blocks has expired")]
    Expired,
    /// The hand-off was issued, and its blocks are lost.
    #[error("the blocks were lost")]
    Lost,
}

/// Totals since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseCounts {
    /// Hand-offs issued.
    pub issued: u64,
    /// Hand-offs pulled.
    pub consumed: u64,
    /// Hand-offs whose lease ended first.
    pub expired: u64,
    /// Hand-offs dropped on request before a pull.
    pub revoked: u64,
    /// Hand-offs whose blocks were lost through a fault.
    pub lost: u64,
    /// Blocks of all hand-offs issued.
    pub blocks_issued: u64,
    /// Blocks of the hand-offs pulled.
    pub blocks_pulled: u64,
}

struct Lease {
    blocks: Vec<u32>,
    kv: HandoffPrompt,
}

#[derive(Clone, Copy)]
enum LeaseEnd {
    Consumed,
    Expired,
    Revoked,
    Lost,
}

/// The block pool and the leases on it.
pub struct LeaseTable {
    capacity: u32,
    lease: Duration,
    free: VecDeque<u32>,
    held: HashMap<String, Lease>,
    /// In order, since all leases are equally long. May name hand-offs that have been consumed since.
    deadlines: VecDeque<(Instant, String)>,
    /// In the order in which they ended.
    ends: LruCache<String, LeaseEnd>,
    counts: LeaseCounts,
}

impl LeaseTable {
    /// A pool of `capacity` blocks, numbered from 1 (vLLM reserves block 0), handed off under leases of length `lease`.
    pub fn new(capacity: u32, lease: Duration) -> Self {
        Self {
            capacity,
            lease,
            free: (1..=capacity).collect(),
            held: HashMap::new(),
            deadlines: VecDeque::new(),
            ends: LruCache::unbounded(),
            counts: LeaseCounts::default(),
        }
    }

    /// Takes `count` blocks from the pool, or none if fewer are free.
    pub fn take(&mut self, count: u32, now: Instant) -> Option<Vec<u32>> {
        self.expire(now);
        let count = count as usize;
        (count <= self.free.len()).then(|| self.free.drain(..count).collect())
    }

    /// Returns blocks that were taken and never handed off.
    pub fn give_back(&mut self, blocks: Vec<u32>) {
        self.free.extend(blocks);
    }

    /// Puts taken blocks under a lease and returns the hand-off's id: `stem` and a serial number, so that no id is issued twice.
    pub fn issue(
        &mut self,
        stem: &str,
        blocks: Vec<u32>,
        kv: HandoffPrompt,
        now: Instant,
    ) -> String {
        self.expire(now);
        let id = format!("{stem}-{:08x}", self.counts.issued);
        self.counts.issued += 1;
        self.counts.blocks_issued += blocks.len() as u64;
        self.deadlines.push_back((now + self.lease, id.clone()));
        self.held.insert(id.clone(), Lease { blocks, kv });
        id
    }

    /// Consumes a hand-off: its blocks are free again, and the id is invalid from now on.
    ///
    /// # Errors
    /// When the id is not held or the blocks (one group) are not its own; a refused pull changes nothing.
    pub fn consume(
        &mut self,
        id: &str,
        block_groups: &[Vec<u32>],
        now: Instant,
    ) -> Result<HandoffPrompt, PullRefusal> {
        self.expire(now);
        let Some(lease) = self.held.get(id) else {
            return Err(match self.ends.peek(id) {
                Some(LeaseEnd::Consumed) => PullRefusal::Used,
                Some(LeaseEnd::Expired) => PullRefusal::Expired,
                Some(LeaseEnd::Lost) => PullRefusal::Lost,
                Some(LeaseEnd::Revoked) | None => PullRefusal::Unknown,
            });
        };
        if block_groups != [lease.blocks.as_slice()] {
            return Err(PullRefusal::WrongBlocks);
        }
        let kv = lease.kv;
        let blocks = self.end(id.to_owned(), LeaseEnd::Consumed);
        self.counts.consumed += 1;
        self.counts.blocks_pulled += blocks;
        Ok(kv)
    }

    /// Whether a hand-off still waits for its pull.
    pub fn holds(&mut self, id: &str, now: Instant) -> bool {
        self.expire(now);
        self.held.contains_key(id)
    }

    /// Drops a hand-off that will not be pulled; returns whether it was still held.
    pub fn revoke(&mut self, id: &str, now: Instant) -> bool {
        if !self.holds(id, now) {
            return false;
        }
        self.end(id.to_owned(), LeaseEnd::Revoked);
        self.counts.revoked += 1;
        true
    }

    /// Loses the blocks of a hand-off that is still held.
    pub fn lose(&mut self, id: &str, now: Instant) {
        if self.holds(id, now) {
            self.end(id.to_owned(), LeaseEnd::Lost);
            self.counts.lost += 1;
        }
    }

    /// Ends the leases that have run out.
    pub fn expire(&mut self, now: Instant) {
        while self
            .deadlines
            .front()
            .is_some_and(|(deadline, _)| *deadline <= now)
        {
            let Some((_, id)) = self.deadlines.pop_front() else {
                return;
            };
            if self.held.contains_key(&id) {
                self.end(id, LeaseEnd::Expired);
                self.counts.expired += 1;
            }
        }
    }

    /// Time of the next check for expired leases; possibly too early, never too late.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.deadlines.front().map(|(deadline, _)| *deadline)
    }

    /// Blocks not free now: taken or under a lease.
    pub fn used(&self) -> u32 {
        self.capacity - u32::try_from(self.free.len()).unwrap_or(self.capacity)
    }

    /// Totals since the start.
    pub fn counts(&self) -> LeaseCounts {
        self.counts
    }

    /// Frees a held hand-off's blocks and records how it ended; returns the number of blocks.
    fn end(&mut self, id: String, end: LeaseEnd) -> u64 {
        let Some(lease) = self.held.remove(&id) else {
            return 0;
        };
        let blocks = lease.blocks.len() as u64;
        self.free.extend(lease.blocks);
        self.ends.put(id, end);
        if self.ends.len() > REMEMBERED {
            self.ends.pop_lru();
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    const LEASE: Duration = Duration::from_millis(100);
    const KV: HandoffPrompt = HandoffPrompt {
        prompt_tokens: 20,
        prompt_fingerprint: 7,
    };

    fn issued(table: &mut LeaseTable, count: u32, now: Instant) -> (String, Vec<Vec<u32>>) {
        let blocks = table.take(count, now).expect("enough blocks");
        (table.issue("r", blocks.clone(), KV, now), vec![blocks])
    }

    #[test]
    fn a_handoff_is_consumed_once() {
        let now = Instant::now();
        let mut table = LeaseTable::new(4, LEASE);
        let (id, blocks) = issued(&mut table, 3, now);
        assert_eq!(table.used(), 3);
        assert_eq!(table.consume(&id, &blocks, now), Ok(KV));
        assert_eq!(table.used(), 0);
        assert_eq!(
            table.consume(&id, &blocks, now),
            Err(PullRefusal::Used),
            "a second pull"
        );
        assert_eq!(
            table.consume(&id, &blocks, now + 2 * LEASE),
            Err(PullRefusal::Used),
            "used stays used after the lease"
        );
    }

    #[test]
    fn a_lease_ends_at_its_deadline() {
        let now = Instant::now();
        let mut table = LeaseTable::new(4, LEASE);
        let (early, early_blocks) = issued(&mut table, 2, now);
        let (late, late_blocks) = issued(&mut table, 2, now);
        let before = now + LEASE - Duration::from_nanos(1);
        assert_eq!(table.consume(&early, &early_blocks, before), Ok(KV));
        assert_eq!(
            table.consume(&late, &late_blocks, now + LEASE),
            Err(PullRefusal::Expired)
        );
        assert_eq!(table.used(), 0);
        let counts = table.counts();
        assert_eq!((counts.issued, counts.consumed, counts.expired), (2, 1, 1));
        assert_eq!((counts.blocks_issued, counts.blocks_pulled), (4, 2));
    }

    #[test]
    fn a_wrong_pull_changes_nothing() {
        let now = Instant::now();
        let mut table = LeaseTable::new(8, LEASE);
        let (id, blocks) = issued(&mut table, 2, now);
        let before = table.counts();
        let flat_twice = [blocks[0].clone(), blocks[0].clone()];
        let reversed = [blocks[0].iter().rev().copied().collect::<Vec<_>>()];
        for wrong in [&[][..], &[vec![]][..], &flat_twice[..], &reversed[..]] {
            assert_eq!(
                table.consume(&id, wrong, now),
                Err(PullRefusal::WrongBlocks)
            );
        }
        assert_eq!(
            table.consume("other", &blocks, now),
            Err(PullRefusal::Unknown)
        );
        assert_eq!(table.counts(), before);
        assert_eq!(table.consume(&id, &blocks, now), Ok(KV));
    }

    #[test]
    fn a_revoked_handoff_is_gone() {
        let now = Instant::now();
        let mut table = LeaseTable::new(4, LEASE);
        let (id, blocks) = issued(&mut table, 3, now);
        assert!(table.revoke(&id, now));
        assert!(!table.revoke(&id, now));
        assert_eq!(table.used(), 0);
        assert_eq!(table.consume(&id, &blocks, now), Err(PullRefusal::Unknown));
        let (id, _) = issued(&mut table, 3, now);
        assert!(!table.revoke(&id, now + LEASE), "expired before");
        assert_eq!((table.counts().revoked, table.counts().expired), (1, 1));
    }

    #[test]
    fn a_lost_handoff_is_issued_and_never_pulled() {
        let now = Instant::now();
        let mut table = LeaseTable::new(4, LEASE);
        let (id, blocks) = issued(&mut table, 3, now);
        table.lose(&id, now);
        table.lose(&id, now);
        assert_eq!(table.used(), 0);
        assert_eq!(table.consume(&id, &blocks, now), Err(PullRefusal::Lost));
        let counts = table.counts();
        assert_eq!((counts.issued, counts.consumed, counts.lost), (1, 0, 1));
        assert_eq!((counts.blocks_issued, counts.blocks_pulled), (3, 0));
    }

    #[test]
    fn an_exhausted_pool_gives_nothing_until_blocks_return() {
        let now = Instant::now();
        let mut table = LeaseTable::new(4, LEASE);
        issued(&mut table, 3, now);
        assert_eq!(table.take(2, now), None);
        assert_eq!(table.next_expiry(), Some(now + LEASE));
        let taken = table.take(2, now + LEASE).expect("freed by expiry");
        table.give_back(taken);
        assert_eq!(table.used(), 0);
    }

    /// Random histories: blocks are conserved, no block is in two places, no id is issued twice, each hand-off ends at most once.
    #[test]
    fn any_history_conserves_blocks() {
        for seed in 0..64 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut now = Instant::now();
            let mut table = LeaseTable::new(50, LEASE);
            let mut open: Vec<(String, Vec<Vec<u32>>, Instant)> = Vec::new();
            let mut ids = HashSet::new();
            let (mut consumed, mut taken) = (0, Vec::new());
            for _ in 0..400 {
                now += Duration::from_millis(random.random_range(0..20));
                match random.random_range(0..4) {
                    0 => taken.extend(table.take(random.random_range(1..12), now)),
                    1 if !taken.is_empty() => table.give_back(taken.swap_remove(0)),
                    2 if !taken.is_empty() => {
                        let blocks = taken.swap_remove(0);
                        let id = table.issue("r", blocks.clone(), KV, now);
                        assert!(ids.insert(id.clone()), "issued twice: {id}");
                        open.push((id, vec![blocks], now + LEASE));
                    }
                    _ if !open.is_empty() => {
                        let at = random.random_range(0..open.len());
                        let (id, blocks, deadline) = open.swap_remove(at);
                        let want = if now < deadline {
                            consumed += 1;
                            Ok(KV)
                        } else {
                            Err(PullRefusal::Expired)
                        };
                        assert_eq!(table.consume(&id, &blocks, now), want);
                    }
                    _ => {}
                }
                table.expire(now);
                let leased: usize = open
                    .iter()
                    .filter(|(_, _, deadline)| now < *deadline)
                    .map(|(_, blocks, _)| blocks[0].len())
                    .sum();
                let in_hand: usize = taken.iter().map(Vec::len).sum();
                assert_eq!(table.used() as usize, leased + in_hand);
                let distinct: HashSet<u32> = table.free.iter().copied().collect();
                assert_eq!(distinct.len(), table.free.len());
                let counts = table.counts();
                assert_eq!(counts.issued as usize, ids.len());
                assert_eq!(counts.consumed, consumed);
                assert_eq!(
                    counts.issued,
                    counts.consumed + counts.expired + table.held.len() as u64
                );
            }
        }
    }
}
