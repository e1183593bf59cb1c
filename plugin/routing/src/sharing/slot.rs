//! Owns what is known of another VM's thread slot: the owner, whether the owner lives, its bookings.

use super::blob::{Blob, BlobHead, PoolShares, Totals};
use super::log::Follower;
use super::{DEAD_TICKS, Decision, SharedStore};

/// A slot in the shared store that another VM has taken.
#[derive(Debug)]
pub(super) struct ThreadSlot {
    pub(super) slot: u16,
    /// Version of the blob that was read last.
    version: u32,
    /// Head of that blob; none where it could not be read.
    head: Option<BlobHead>,
    /// Start of the standstill, in the observer's ticks.
    still_since: u64,
    pub(super) totals: Totals,
    pub(super) pools: Vec<PoolShares>,
    /// Read position in the owner's log.
    follower: Follower,
    followed: Option<u64>,
}

impl ThreadSlot {
    pub(super) fn new(slot: u16, tick: u64) -> Self {
        Self {
            slot,
            version: 0,
            head: None,
            still_since: tick,
            totals: Totals::default(),
            pools: Vec::new(),
            follower: Follower::default(),
            followed: None,
        }
    }

    /// Whether the owner counts as dead.
    pub(super) fn is_dead(&self, tick: u64) -> bool {
        tick.saturating_sub(self.still_since) >= DEAD_TICKS
    }

    /// Whether a living VM other than `me` owns the slot, with readable bytes.
    pub(super) fn counts(&self, tick: u64, me: u64) -> bool {
        self.head.is_some_and(|head| head.owner != me) && !self.is_dead(tick)
    }

    /// Whether `version` is still the one whose owner counts as dead.
    pub(super) fn is_at(&self, version: u32) -> bool {
        self.version == version
    }

    /// Takes in the blob that is there now.
    pub(super) fn see(&mut self, bytes: &[u8], version: u32, tick: u64) {
        if self.head.is_some() && self.version == version {
            return;
        }
        let blob = Blob::decode(bytes);
        let before = self.head;
        let has_moved = match (before, &blob) {
            (Some(before), Some(blob)) => before != blob.head,
            // An unreadable blob counts as alive as long as its version changes.
            _ => self.version != version,
        };
        self.version = version;
        if has_moved {
            self.still_since = tick;
        }
        let head = blob.as_ref().map(|blob| blob.head);
        self.head = head;
        let (totals, pools) = blob
            .map(|blob| (blob.totals, blob.pools))
            .unwrap_or_default();
        self.totals = totals;
        self.pools = pools;
    }

    /// Reads the new decisions of the log. Returns how many segments were lost.
    pub(super) fn follow(
        &mut self,
        store: &dyn SharedStore,
        decisions: &mut Vec<(u64, Decision)>,
    ) -> u64 {
        let Some(head) = self.head else {
            return 0;
        };
        let BlobHead {
            owner,
            next_segment,
            ..
        } = head;
        if self.followed.replace(owner) != Some(owner) {
            self.follower = Follower::default();
        }
        self.follower
            .read(store, self.slot, owner, next_segment, decisions)
    }
}
