//! Owns the load table: the load of each worker rank, and the totals over all ranks.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use hashbrown::HashMap;

use super::answer::{Occupied, PARTS};
use super::backlog::{Backlog, BacklogReading, Ticket};
use super::rate::{PrefillRate, RateSamples};
use super::threads::{ExternalLoad, ThreadLoad, ThreadLoads};
use crate::fleet::TargetKey;

/// Bookings on one worker rank, or on all together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Prompt tokens whose prefill is not known to be done.
    pub prefill_tokens: u64,
    /// Prefills under way.
    pub prefills: u64,
    /// KV blocks held by requests being decoded, for prompt and output, until they end.
    pub decode_blocks: u64,
    /// Weight of these blocks in a choice, in blocks: less than held where answers near their expected end.
    pub decode_weight: u64,
    /// Requests being decoded.
    pub decodes: u64,
}

impl Load {
    /// Whether nothing is booked.
    pub fn is_idle(&self) -> bool {
        *self == Self::default()
    }

    /// Sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            prefill_tokens: self.prefill_tokens.saturating_add(other.prefill_tokens),
            prefills: self.prefills.saturating_add(other.prefills),
            decode_blocks: self.decode_blocks.saturating_add(other.decode_blocks),
            decode_weight: self.decode_weight.saturating_add(other.decode_weight),
            decodes: self.decodes.saturating_add(other.decodes),
        }
    }
}

/// Load of one worker rank now: bookings of this VM, bookings received from other VMs, and the engine's external load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadSnapshot {
    /// Booked prompt tokens.
    pub booked_tokens: u64,
    /// Estimated rest of these tokens now, including each prompt's overhead.
    pub queued_tokens: f64,
    /// KV blocks held by requests being decoded, compared with thresholds and capacities.
    pub decode_blocks: f64,
    /// Weight of these blocks in a choice, in blocks.
    pub decode_weight: f64,
    /// Prefills under way.
    pub prefills: u32,
    /// Requests being decoded.
    pub decodes: u32,
    /// Requests in the engine that no VM of this proxy has booked.
    pub external_requests: u32,
    /// How many times slower this rank reads prompts than its peers.
    pub slowness: f64,
}

impl Default for LoadSnapshot {
    /// No bookings and no observations.
    fn default() -> Self {
        Self {
            booked_tokens: 0,
            queued_tokens: 0.0,
            decode_blocks: 0.0,
            decode_weight: 0.0,
            prefills: 0,
            decodes: 0,
            external_requests: 0,
            slowness: 1.0,
        }
    }
}

/// The part of a rank's load that a choice reads, from all sources. Kept apart and small, so that scanning a thousand rows
/// is quick.
#[derive(Debug, Clone, Copy, Default)]
struct LoadRow {
    progress: BacklogReading,
    decode_blocks: f64,
    decode_weight: f64,
    booked_tokens: u32,
    prefills: u32,
    decodes: u32,
    external_requests: u32,
}

impl LoadRow {
    fn of(worker_load: &WorkerLoad) -> Self {
        let ThreadLoads { shared, external } = &worker_load.elsewhere;
        let own = Self {
            progress: worker_load
                .backlog
                .progress()
                .with_elsewhere(external.queued_tokens),
            decode_blocks: worker_load.decoding.blocks as f64 + external.decode_blocks,
            decode_weight: in_blocks(worker_load.decoding.weight) + external.decode_blocks,
            booked_tokens: as_u32(worker_load.backlog.tokens()),
            prefills: as_u32(worker_load.backlog.prompts()),
            decodes: as_u32(worker_load.decodes),
            external_requests: external.requests,
        };
        shared.as_ref().map_or(own, |shared| own.with(shared))
    }

    fn with(self, shared: &ThreadLoad) -> Self {
        Self {
            progress: self.progress.with_elsewhere(shared.queued_tokens as f64),
            decode_blocks: self.decode_blocks + shared.decoding.blocks as f64,
            decode_weight: self.decode_weight + in_blocks(shared.decoding.weight),
            booked_tokens: self
                .booked_tokens
                .saturating_add(as_u32(shared.booked_tokens)),
            prefills: self.prefills.saturating_add(shared.prefills),
            decodes: self.decodes.saturating_add(shared.decodes),
            external_requests: self.external_requests,
        }
    }
}

fn in_blocks(parts: u64) -> f64 {
    parts as f64 / PARTS as f64
}

/// Saturates at `u32::MAX`.
pub(crate) fn as_u32(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// All rows of the load table at one moment.
pub struct LoadSnapshots<'b> {
    rows: RwLockReadGuard<'b, Rows>,
    /// Seconds since 1970.
    now: f64,
    rate: Option<PrefillRate>,
}

impl LoadSnapshots<'_> {
    /// The load of a slot whose worker is `slowness` times slower than its peers.
    #[inline]
    pub fn of(&self, slot: usize, slowness: f64) -> LoadSnapshot {
        let Some(row) = self.rows.rows.get(slot) else {
            return LoadSnapshot::default();
        };
        LoadSnapshot {
            booked_tokens: row.booked_tokens.into(),
            queued_tokens: row.progress.left(self.now, self.rate, slowness),
            decode_blocks: row.decode_blocks,
            decode_weight: row.decode_weight,
            prefills: row.prefills,
            decodes: row.decodes,
            external_requests: row.external_requests,
            slowness,
        }
    }
}

#[derive(Debug, Default)]
struct WorkerLoad {
    key: Option<TargetKey>,
    backlog: Backlog,
    decoding: Occupied,
    decodes: u64,
    elsewhere: ThreadLoads,
}

/// Totals of one rank, or of all ranks.
#[derive(Debug, Clone, Copy, Default)]
struct LoadTotals {
    prefill_tokens: u64,
    prefills: u64,
    decoding: Occupied,
    decodes: u64,
}

impl LoadTotals {
    fn of(worker_load: &WorkerLoad) -> Self {
        Self {
            prefill_tokens: worker_load.backlog.tokens(),
            prefills: worker_load.backlog.prompts(),
            decoding: worker_load.decoding,
            decodes: worker_load.decodes,
        }
    }

    fn load(self) -> Load {
        Load {
            prefill_tokens: self.prefill_tokens,
            prefills: self.prefills,
            decode_blocks: self.decoding.blocks,
            decode_weight: self.decoding.weight.div_ceil(PARTS),
            decodes: self.decodes,
        }
    }

    fn moved(self, from: Self, to: Self) -> Self {
        let moved = |sum: u64, from: u64, to: u64| sum.saturating_sub(from).saturating_add(to);
        Self {
            prefill_tokens: moved(self.prefill_tokens, from.prefill_tokens, to.prefill_tokens),
            prefills: moved(self.prefills, from.prefills, to.prefills),
            decoding: self.decoding.moved(from.decoding, to.decoding),
            decodes: moved(self.decodes, from.decodes, to.decodes),
        }
    }
}

/// The load table, shared by the ledger and the charges that free themselves. No guard outlives a call, but that of
/// [`LoadSnapshots`].
#[derive(Debug, Default)]
pub(super) struct LoadTable(RwLock<Rows>);

/// The rows of the load table: one a slot, in lists of what is read together.
#[derive(Debug, Default)]
struct Rows {
    now: Duration,
    worker_loads: Vec<WorkerLoad>,
    rows: Vec<LoadRow>,
    records: Vec<RateSamples>,
    sums: LoadTotals,
    leases: Leases,
}

/// Interval of the scan for charges that are no longer renewed.
const LOOK: Duration = Duration::from_secs(30);

/// The answers under way.
#[derive(Debug, Default)]
struct Leases {
    by_number: HashMap<u64, Lease>,
    begun: u64,
    /// Time of the last scan for charges that are no longer renewed.
    looked_at: Duration,
}

/// One answer under way.
#[derive(Debug, Clone, Copy)]
struct Lease {
    slot: usize,
    key: TargetKey,
    renewed: Duration,
    /// The counted load; none after the lease has expired, or if the worker has left.
    counted: Option<Occupied>,
}

impl Rows {
    /// Time never goes back, although a host's clock may.
    fn advance(&mut self, now: Duration) -> Duration {
        self.now = now.max(self.now);
        self.now
    }

    /// Stops counting charges that have not been renewed since `then`.
    fn expire(&mut self, then: Duration) {
        for slot in 0..self.worker_loads.len() {
            let now = self.now;
            self.change(slot, |worker_load| worker_load.backlog.expire(then, now));
        }
        let leases = self.leases.by_number.iter();
        let late = leases.filter(|(_, lease)| lease.renewed < then);
        let late: Vec<u64> = late.map(|(number, _)| *number).collect();
        for number in late {
            self.count(number, None);
        }
    }

    fn begin(&mut self, slot: usize, key: TargetKey, held: Occupied) -> u64 {
        let number = self.leases.begun;
        self.leases.begun = number.wrapping_add(1);
        let lease = Lease {
            slot,
            key,
            renewed: self.now,
            counted: None,
        };
        self.leases.by_number.insert(number, lease);
        self.count(number, Some(held));
        number
    }

    /// Counts an answer as `held` in place of what is counted of it, unless its worker has left meanwhile.
    fn count(&mut self, number: u64, held: Option<Occupied>) {
        let Some(Lease {
            slot, key, counted, ..
        }) = self.leases.by_number.get(&number).copied()
        else {
            return;
        };
        if held == counted {
            return;
        }
        let now_counted = self.change(slot, |worker_load| {
            let begins = counted.is_none();
            if begins && worker_load.key != Some(key) {
                return None;
            }
            let (from, to) = (counted.unwrap_or_default(), held.unwrap_or_default());
            worker_load.decoding = worker_load.decoding.moved(from, to);
            let others = worker_load.decodes.saturating_sub(u64::from(!begins));
            worker_load.decodes = others.saturating_add(u64::from(held.is_some()));
            held
        });
        if let Some(lease) = self.leases.by_number.get_mut(&number) {
            lease.counted = now_counted.flatten();
        }
    }

    /// Changes the load from elsewhere: not booked by this VM, so not part of the totals.
    fn change_elsewhere(&mut self, slot: usize, change: impl FnOnce(&mut ThreadLoads)) {
        let Some(worker_load) = self.worker_loads.get_mut(slot) else {
            return;
        };
        change(&mut worker_load.elsewhere);
        if let Some(row) = self.rows.get_mut(slot) {
            *row = LoadRow::of(worker_load);
        }
    }

    /// Changes the load of a rank, and the totals with it.
    fn change<T>(&mut self, slot: usize, change: impl FnOnce(&mut WorkerLoad) -> T) -> Option<T> {
        let worker_load = self.worker_loads.get_mut(slot)?;
        let before = LoadTotals::of(worker_load);
        let outcome = change(worker_load);
        if let Some(row) = self.rows.get_mut(slot) {
            *row = LoadRow::of(worker_load);
        }
        if let Some(record) = self.records.get_mut(slot) {
            *record = worker_load.backlog.record();
        }
        self.sums = self.sums.moved(before, LoadTotals::of(worker_load));
        Some(outcome)
    }
}

impl LoadTable {
    fn read(&self) -> RwLockReadGuard<'_, Rows> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Rows> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now(&self) -> Duration {
        self.read().now
    }

    /// Advances the clock, and expires charges that have not been renewed for `patience`.
    pub(super) fn advance(&self, now: Duration, patience: Duration) {
        let mut table = self.write();
        let now = table.advance(now);
        if now.saturating_sub(table.leases.looked_at) < LOOK {
            return;
        }
        table.leases.looked_at = now;
        if let Some(then) = now.checked_sub(patience) {
            table.expire(then);
        }
    }

    /// Adds a slot, which must be opened before use.
    pub(super) fn add(&self) -> usize {
        let mut table = self.write();
        table.worker_loads.push(WorkerLoad::default());
        table.rows.push(LoadRow::default());
        table.records.push(RateSamples::default());
        table.worker_loads.len().saturating_sub(1)
    }

    pub(super) fn open(&self, slot: usize, key: TargetKey) {
        self.change(slot, |worker_load| {
            *worker_load = WorkerLoad {
                key: Some(key),
                backlog: worker_load.backlog.successor(),
                ..WorkerLoad::default()
            };
        });
    }

    pub(super) fn close(&self, slot: usize) {
        if let Some(worker_load) = self.write().worker_loads.get_mut(slot) {
            worker_load.key = None;
        }
    }

    pub(super) fn load(&self, slot: usize) -> Load {
        let table = self.read();
        let worker_load = table.worker_loads.get(slot);
        worker_load
            .map(|worker_load| LoadTotals::of(worker_load).load())
            .unwrap_or_default()
    }

    pub(super) fn elsewhere(&self, slot: usize) -> ThreadLoads {
        let table = self.read();
        let worker_load = table.worker_loads.get(slot);
        worker_load
            .map(|worker_load| worker_load.elsewhere)
            .unwrap_or_default()
    }

    /// Adds bookings of other VMs on a slot to those received already.
    pub(super) fn add_shared(&self, slot: usize, share: &ThreadLoad) {
        self.change_elsewhere(slot, |elsewhere| elsewhere.add(share));
    }

    pub(super) fn clear_shared(&self, slot: usize) {
        self.change_elsewhere(slot, |elsewhere| elsewhere.shared = None);
    }

    pub(super) fn set_external(&self, slot: usize, external: ExternalLoad) {
        self.change_elsewhere(slot, |elsewhere| elsewhere.external = external);
    }

    /// This VM's bookings on every slot that has any, in slot order.
    pub(super) fn shares(
        &self,
        rate_of: impl Fn(usize) -> (Option<PrefillRate>, f64),
    ) -> Vec<ThreadLoad> {
        let table = self.read();
        let now = table.now.as_secs_f64();
        let share = |(slot, worker_load): (usize, &WorkerLoad)| {
            let key = worker_load.key?;
            let sums = LoadTotals::of(worker_load);
            if sums.load().is_idle() {
                return None;
            }
            let (rate, slowness) = rate_of(slot);
            let left = worker_load.backlog.progress().left(now, rate, slowness);
            Some(ThreadLoad {
                key,
                booked_tokens: sums.prefill_tokens,
                queued_tokens: left.ceil() as u64,
                prefills: as_u32(sums.prefills),
                decoding: sums.decoding,
                decodes: as_u32(sums.decodes),
            })
        };
        let worker_loads = table.worker_loads.iter().enumerate();
        worker_loads.filter_map(share).collect()
    }

    pub(super) fn mean_prompt_tokens(&self) -> f64 {
        let table = self.read();
        let records = table.records.iter().copied();
        let all = records.fold(RateSamples::default(), RateSamples::plus);
        all.mean_tokens()
    }

    pub(super) fn total(&self) -> Load {
        self.read().sums.load()
    }

    pub(super) fn snapshots(&self, rate: Option<PrefillRate>) -> LoadSnapshots<'_> {
        let rows = self.read();
        LoadSnapshots {
            now: rows.now.as_secs_f64(),
            rows,
            rate,
        }
    }

    pub(super) fn slowness(&self, slot: usize, rate: Option<PrefillRate>) -> f64 {
        let table = self.read();
        match (rate, table.records.get(slot)) {
            (Some(rate), Some(record)) => rate.slowness(record, table.now.as_secs_f64()),
            _ => 1.0,
        }
    }

    pub(super) fn rate(&self, slots: impl Iterator<Item = usize> + Clone) -> Option<PrefillRate> {
        let table = self.read();
        let records = slots.filter_map(|slot| table.records.get(slot).copied());
        PrefillRate::of_most(records)
    }

    pub(super) fn push(&self, slot: usize, tokens: u64) -> Ticket {
        let now = self.now();
        let pushed = self.change(slot, |worker_load| worker_load.backlog.push(tokens, now));
        pushed.unwrap_or_default()
    }

    pub(super) fn finish(&self, slot: usize, ticket: Ticket, now: Duration) {
        let now = self.write().advance(now);
        self.change(slot, |worker_load| worker_load.backlog.finish(ticket, now));
    }

    pub(super) fn cancel(&self, slot: usize, ticket: Ticket) {
        let now = self.now();
        self.change(slot, |worker_load| worker_load.backlog.cancel(ticket, now));
    }

    /// Counts a new answer; returns the number of its lease.
    pub(super) fn begin_answer(&self, slot: usize, key: TargetKey, held: Occupied) -> u64 {
        self.write().begin(slot, key, held)
    }

    /// Renews a lease, and counts the answer again if the lease had expired.
    pub(super) fn renew_answer(&self, number: u64, held: Occupied) {
        let mut table = self.write();
        let now = table.now;
        if let Some(lease) = table.leases.by_number.get_mut(&number) {
            lease.renewed = now;
        }
        table.count(number, Some(held));
    }

    pub(super) fn end_answer(&self, number: u64) {
        let mut table = self.write();
        table.count(number, None);
        table.leases.by_number.remove(&number);
    }

    fn change_elsewhere(&self, slot: usize, change: impl FnOnce(&mut ThreadLoads)) {
        self.write().change_elsewhere(slot, change);
    }

    fn change<T>(&self, slot: usize, change: impl FnOnce(&mut WorkerLoad) -> T) -> Option<T> {
        self.write().change(slot, change)
    }
}
