//! Owns thread sync between the VMs of this proxy: publishes bookings and decisions of this VM, reads those of the others.

use std::rc::Rc;
use std::time::Duration;

use routing::config::Sharing;
use routing::sharing::{
    PoolShares, SharedStore, ThreadSync, ThreadUpdate, Totals, WriteResult, pool_number,
};

use super::PoolRuntime;
use crate::host::{self, WriteOutcome};
use crate::shared;

/// Tick of the shared store in milliseconds, independent of this VM's own tick.
const STORE_TICK_MS: u64 = 25;

/// The shared store, kept in the proxy's shared data.
struct SharedData;

impl SharedStore for SharedData {
    fn read(&self, key: &str) -> Option<(Vec<u8>, u32)> {
        host::shared(key)
    }

    fn write(&self, key: &str, value: &[u8], version: Option<u32>) -> WriteResult {
        match host::set_shared(key, value, version) {
            Ok(WriteOutcome::Yes) => WriteResult::Done,
            Ok(WriteOutcome::Stale) => WriteResult::Stale,
            Err(_) => WriteResult::Failed,
        }
    }
}

/// Whether a tick begins a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TickKind {
    /// The tick begins a round.
    Begins,
    /// The tick falls within a round.
    GoesOn,
}

/// This VM's part in thread sync.
#[derive(Default)]
pub struct ThreadSyncDriver {
    /// Made at the first tick: a configuration on trial leaves no trace.
    sync: Option<ThreadSync>,
    /// Length of all ticks so far, in milliseconds: a new configuration may change the length of a tick.
    ticked_ms: u64,
    /// When the other VMs were last read.
    update_at: Duration,
    was_busy: bool,
}

impl ThreadSyncDriver {
    /// Publishes and reads, if this VM is or was busy or the tick begins a round. Called at each tick; returns the state of all
    /// VMs together if anything was read.
    pub fn tick(
        &mut self,
        runtimes: &[Rc<PoolRuntime>],
        rules: &Sharing,
        tick_kind: TickKind,
        now: Duration,
    ) -> Option<ThreadUpdate> {
        self.ticked_ms = self.ticked_ms.wrapping_add(rules.interval_ms);
        let own = totals(runtimes);
        let is_busy = own != Totals::default();
        let was_busy = std::mem::replace(&mut self.was_busy, is_busy);
        if !is_busy && !was_busy && tick_kind == TickKind::GoesOn {
            return None;
        }
        let shares = match rules.load {
            true => runtimes.iter().map(|runtime| shares(runtime)).collect(),
            false => Vec::new(),
        };
        let mut decisions = Vec::new();
        for runtime in runtimes {
            // Taken even if decisions are not shared: otherwise they would pile up.
            let taken = runtime.router_mut().take_decisions();
            if rules.decisions {
                let key = pool_number(&runtime.pool.name);
                decisions.extend(taken.into_iter().map(|decision| (key, decision)));
            }
        }
        let sync = self
            .sync
            .get_or_insert_with(|| ThreadSync::new(shared::unique_number()));
        sync.publish(&SharedData, &own, &shares, &decisions);
        self.listen(runtimes, now)
    }

    /// Whether the other VMs were read too long ago for a choice made `now`: an idle VM reads seldom.
    pub fn is_out_of_date(&self, rules: &Sharing, now: Duration) -> bool {
        let since = now.saturating_sub(self.update_at);
        self.sync.is_some() && since > Duration::from_millis(2 * rules.interval_ms)
    }

    /// Reads the other VMs, and applies their loads and decisions.
    pub fn listen(&mut self, runtimes: &[Rc<PoolRuntime>], now: Duration) -> Option<ThreadUpdate> {
        let sync = self.sync.as_mut()?;
        let update = sync.listen(&SharedData, self.ticked_ms / STORE_TICK_MS);
        for runtime in runtimes {
            let key = pool_number(&runtime.pool.name);
            let others = update.shares.iter().find(|pool| pool.pool == key);
            let shares = others.map_or(&[][..], |pool| pool.shares.as_slice());
            runtime.router_mut().apply_shares(shares);
            // The leading VM serves no requests, as a rule: prefix decisions are of no use there.
            if runtime.vm.serves() || !runtime.vm.leads() {
                learn(runtime, key, &update);
            }
        }
        self.update_at = now;
        Some(update)
    }

    /// Segments of other VMs' decisions that were overwritten before this VM read them.
    pub fn lapped(&self) -> u64 {
        self.sync.as_ref().map_or(0, ThreadSync::lapped)
    }
}

fn learn(runtime: &PoolRuntime, key: u64, update: &ThreadUpdate) {
    let mut router = runtime.router_mut();
    for (_, decision) in update.decisions.iter().filter(|(pool, _)| *pool == key) {
        router.apply_decision(decision);
    }
}

fn shares(runtime: &PoolRuntime) -> PoolShares {
    PoolShares {
        pool: pool_number(&runtime.pool.name),
        shares: runtime.router().shares(),
    }
}

/// Work under way in this VM.
fn totals(runtimes: &[Rc<PoolRuntime>]) -> Totals {
    let streams = runtimes
        .first()
        .map_or(0, |runtime| runtime.telemetry.streams());
    let none = Totals {
        streams,
        ..Totals::default()
    };
    runtimes.iter().fold(none, |sum, runtime| {
        let router = runtime.router();
        let load = router.total_load();
        Totals {
            prefills: sum.prefills.saturating_add(load.prefills),
            decodes: sum.decodes.saturating_add(load.decodes),
            waiting: sum.waiting.saturating_add(router.waiting() as u64),
            ejected: sum.ejected.saturating_add(router.ejected() as u64),
            ..sum
        }
    })
}
