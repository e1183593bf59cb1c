//! Owns one VM's thread sync: its slot in the shared store, what it publishes there, and what it has read of the others.

use hashbrown::HashMap;

use super::blob::{self, BlobHead, PoolShares, Totals};
use super::log::Log;
use super::slot::ThreadSlot;
use super::store::{SharedStore, WriteResult, blob_key};
use super::{Decision, SLOTS};
use crate::fleet::TargetKey;

/// Where nothing changes, one in this many publications is written: the beat.
const IDLE_BEAT: u64 = 10;

/// One in this many reads checks all slots for VMs that came or left.
const LOOKS: u64 = 8;

/// The check stops after this many free slots in a row beyond the last taken one.
const FREE_IN_A_ROW: usize = 4;

/// One VM's slot in the shared store, and its view of the others.
#[derive(Debug)]
pub struct ThreadSync {
    owner: u64,
    own_slot: Option<OwnSlot>,
    beat: u64,
    totals: Totals,
    /// Last written blob, without its head.
    said: Vec<u8>,
    log: Log,
    publications: u64,
    /// Without a free slot: the publication count at which the search runs again.
    next_try: u64,
    others: Vec<ThreadSlot>,
    listened: u64,
    tick: u64,
    lapped: u64,
    /// Scratch map, kept only to reuse its memory.
    sums: HashMap<(usize, TargetKey), usize>,
}

/// Whether the slot is this VM's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hold {
    /// Written once. Another VM may have written there at the same moment.
    Claimed,
    /// Written, and the bytes were still there later.
    Held,
}

#[derive(Debug, Clone, Copy)]
struct OwnSlot {
    slot: u16,
    hold: Hold,
}

/// Updates of the other VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadUpdate {
    /// Bookings of all other living VMs, summed for each pool and rank.
    pub shares: Vec<PoolShares>,
    /// Decisions since the last read, each with its pool.
    pub decisions: Vec<(u64, Decision)>,
    /// Totals of all living VMs, this one included.
    pub totals: Totals,
    /// Number of living VMs, this one included.
    pub vms: usize,
}

impl ThreadSync {
    /// The thread sync of the VM with this number, which must be unique. No slot is taken yet.
    pub fn new(owner: u64) -> Self {
        Self {
            owner,
            own_slot: None,
            beat: 0,
            totals: Totals::default(),
            said: Vec::new(),
            log: Log::default(),
            publications: 0,
            next_try: 0,
            others: Vec::new(),
            listened: 0,
            tick: 0,
            lapped: 0,
            sums: HashMap::new(),
        }
    }

    /// Segments of other VMs' logs that were overwritten before they were read.
    pub fn lapped(&self) -> u64 {
        self.lapped
    }

    /// Own decisions that were not published: the log was full because the shared store did not take earlier ones.
    pub fn dropped(&self) -> u64 {
        self.log.dropped()
    }

    /// Publishes this VM's bookings, and its decisions since the last time. Decisions that the shared store does not take
    /// now are published later.
    pub fn publish(
        &mut self,
        store: &dyn SharedStore,
        totals: &Totals,
        shares: &[PoolShares],
        decisions: &[(u64, Decision)],
    ) {
        self.totals = *totals;
        self.log.add(decisions);
        self.publications = self.publications.wrapping_add(1);
        let body = blob::body(totals, shares);
        if !self.is_due(&body) {
            return;
        }
        let Some((own_slot, version)) = self.kept_or_free_slot(store) else {
            return;
        };
        self.write(store, own_slot, version, body);
    }

    /// Frees the slot: this VM's bookings stop counting at once, rather than when its beat is found to stand still.
    pub fn leave(&mut self, store: &dyn SharedStore) {
        let Some(own_slot) = self.own_slot.take() else {
            return;
        };
        let key = blob_key(own_slot.slot);
        if let Some((bytes, version)) = store.read(&key)
            && self.is_own(&bytes)
        {
            store.write(&key, &[], Some(version));
        }
    }

    /// Reads the updates of the other VMs. `tick` must grow by one per period.
    pub fn listen(&mut self, store: &dyn SharedStore, tick: u64) -> ThreadUpdate {
        let before = self.tick;
        self.tick = before.max(tick);
        if self.listened.is_multiple_of(LOOKS) {
            self.look(store);
        } else {
            self.read_living(store, before);
        }
        self.listened = self.listened.wrapping_add(1);

        let mut decisions = Vec::new();
        let (tick, me) = (self.tick, self.owner);
        for other in &mut self.others {
            if other.counts(tick, me) {
                let lost = other.follow(store, &mut decisions);
                self.lapped = self.lapped.saturating_add(lost);
            }
        }
        let shares = self.sum();
        let living = || self.others.iter().filter(|other| other.counts(tick, me));
        ThreadUpdate {
            shares,
            decisions,
            totals: living().fold(self.totals, |sum, other| sum.plus(other.totals)),
            vms: living().count().saturating_add(1),
        }
    }

    /// Whether a write is due.
    fn is_due(&self, body: &[u8]) -> bool {
        match self.own_slot.map(|own_slot| own_slot.hold) {
            None => self.publications >= self.next_try,
            Some(Hold::Claimed) => true,
            Some(Hold::Held) => {
                self.log.has_waiting()
                    || self.publications.is_multiple_of(IDLE_BEAT)
                    || self.said != body
            }
        }
    }

    /// This VM's slot if still owned, else another one; and the stored version.
    fn kept_or_free_slot(&mut self, store: &dyn SharedStore) -> Option<(OwnSlot, Option<u32>)> {
        let Some(own_slot) = self.own_slot else {
            return self.free_slot(store);
        };
        match store.read(&blob_key(own_slot.slot)) {
            Some((bytes, version)) if self.is_own(&bytes) => {
                let hold = Hold::Held;
                Some((OwnSlot { hold, ..own_slot }, Some(version)))
            }
            Some(_) => {
                self.lose_slot();
                self.free_slot(store)
            }
            None => Some((
                OwnSlot {
                    hold: Hold::Claimed,
                    ..own_slot
                },
                None,
            )),
        }
    }

    /// The first slot that is free or whose VM is dead.
    fn free_slot(&mut self, store: &dyn SharedStore) -> Option<(OwnSlot, Option<u32>)> {
        let own_slot = |slot| OwnSlot {
            slot,
            hold: Hold::Claimed,
        };
        for slot in 0..SLOTS {
            let known = self.others.iter().find(|other| other.slot == slot);
            if known.is_some_and(|other| !other.is_dead(self.tick)) {
                continue;
            }
            let Some((bytes, version)) = store.read(&blob_key(slot)) else {
                return Some((own_slot(slot), None));
            };
            let is_left = bytes.is_empty() || known.is_some_and(|other| other.is_at(version));
            if is_left {
                return Some((own_slot(slot), Some(version)));
            }
        }
        self.next_try = self.publications.wrapping_add(LOOKS);
        None
    }

    fn write(
        &mut self,
        store: &dyn SharedStore,
        own_slot: OwnSlot,
        version: Option<u32>,
        body: Vec<u8>,
    ) {
        if own_slot.hold == Hold::Held {
            self.log.write(store, own_slot.slot, self.owner);
        }
        self.beat = self.beat.wrapping_add(1);
        let head = BlobHead {
            owner: self.owner,
            beat: self.beat,
            next_segment: self.log.next(),
        };
        let blob = head.encode(&body);
        match store.write(&blob_key(own_slot.slot), &blob, version) {
            WriteResult::Done => {
                self.own_slot = Some(own_slot);
                self.said = body;
                self.others.retain(|other| other.slot != own_slot.slot);
            }
            WriteResult::Stale => self.lose_slot(),
            WriteResult::Failed => self.said.clear(),
        }
    }

    /// Gives the slot up to another VM. The next read checks all slots.
    fn lose_slot(&mut self) {
        self.own_slot = None;
        self.listened = 0;
    }

    fn is_own(&self, bytes: &[u8]) -> bool {
        BlobHead::decode(bytes).is_some_and(|head| head.owner == self.owner)
    }

    /// Reads the slots of the VMs that lived at the last read.
    fn read_living(&mut self, store: &dyn SharedStore, before: u64) {
        let tick = self.tick;
        for other in &mut self.others {
            if other.is_dead(before) {
                continue;
            }
            if let Some((bytes, version)) = store.read(&blob_key(other.slot)) {
                other.see(&bytes, version, tick);
            }
        }
    }

    /// Reads all taken slots.
    fn look(&mut self, store: &dyn SharedStore) {
        let own = self.own_slot.map(|own_slot| own_slot.slot);
        let known = self.others.iter().map(|other| other.slot).chain(own);
        let mut first_unknown = known.max().map_or(0, |slot| slot.saturating_add(1));
        let mut free = 0_usize;
        for slot in (0..SLOTS).filter(|slot| Some(*slot) != own) {
            match store.read(&blob_key(slot)) {
                Some((bytes, version)) if !bytes.is_empty() => {
                    first_unknown = first_unknown.max(slot.saturating_add(1));
                    free = 0;
                    self.see(slot, &bytes, version);
                }
                _ => {
                    self.others.retain(|other| other.slot != slot);
                    free = free.saturating_add(usize::from(slot >= first_unknown));
                }
            }
            if free >= FREE_IN_A_ROW {
                return;
            }
        }
    }

    fn see(&mut self, slot: u16, bytes: &[u8], version: u32) {
        let tick = self.tick;
        let known = self.others.iter_mut().find(|other| other.slot == slot);
        if let Some(other) = known {
            other.see(bytes, version, tick);
            return;
        }
        let mut other = ThreadSlot::new(slot, tick);
        other.see(bytes, version, tick);
        self.others.push(other);
    }

    /// Sums the bookings of all other living VMs.
    fn sum(&mut self) -> Vec<PoolShares> {
        let mut pools: Vec<PoolShares> = Vec::new();
        self.sums.clear();
        let (tick, me) = (self.tick, self.owner);
        let living = self.others.iter().filter(|other| other.counts(tick, me));
        for pool_shares in living.flat_map(|other| &other.pools) {
            let known = pools.iter().position(|pool| pool.pool == pool_shares.pool);
            let nth = known.unwrap_or(pools.len());
            if known.is_none() {
                pools.push(PoolShares {
                    pool: pool_shares.pool,
                    shares: Vec::with_capacity(pool_shares.shares.len()),
                });
            }
            let Some(PoolShares { shares, .. }) = pools.get_mut(nth) else {
                continue;
            };
            for share in &pool_shares.shares {
                let at = *self.sums.entry((nth, share.key)).or_insert(shares.len());
                match shares.get_mut(at) {
                    Some(sum) => sum.add(share),
                    None => shares.push(*share),
                }
            }
        }
        pools
    }
}
