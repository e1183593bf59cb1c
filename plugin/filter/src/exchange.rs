//! Owns the exchange between the VMs of this proxy: what is booked and decided here is told, what the others tell is heard.

use std::rc::Rc;
use std::time::Duration;

use routing::config::Sharing;
use routing::sharing::{
    PoolShares, SharedStore, ThreadSync, ThreadUpdate, Totals, Wrote, pool_number,
};

use crate::gateway::PoolRuntime;
use crate::host::{self, Written};
use crate::shared;

/// The board counts in ticks of so many milliseconds, however long this VM's are.
const BOARD_TICK_MS: u64 = 25;

/// The board is the proxy's shared data.
struct SharedData;

impl SharedStore for SharedData {
    fn read(&self, key: &str) -> Option<(Vec<u8>, u32)> {
        host::shared(key)
    }

    fn write(&self, key: &str, value: &[u8], version: Option<u32>) -> Wrote {
        match host::set_shared(key, value, version) {
            Ok(Written::Yes) => Wrote::Done,
            Ok(Written::Stale) => Wrote::Stale,
            Err(_) => Wrote::Failed,
        }
    }
}

/// Whether a round begins with a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TickKind {
    /// It does.
    Begins,
    /// It does not.
    GoesOn,
}

/// This VM's part in the exchange.
#[derive(Default)]
pub struct ThreadSyncDriver {
    /// Taken at the first tick: a configuration that is only on trial leaves no trace.
    desk: Option<ThreadSync>,
    /// Milliseconds of ticks so far: ticks may become longer or shorter with a new configuration.
    ticked_ms: u64,
    /// When the others were heard last.
    heard_at: Duration,
    was_busy: bool,
}

impl ThreadSyncDriver {
    /// Tells and hears, if this VM is busy, or a round begins anyway. To be called at each tick; what all VMs together have is
    /// told back where anything was exchanged.
    pub fn tick(
        &mut self,
        gateways: &[Rc<PoolRuntime>],
        rules: &Sharing,
        round: TickKind,
        now: Duration,
    ) -> Option<ThreadUpdate> {
        self.ticked_ms = self.ticked_ms.wrapping_add(rules.interval_ms);
        let own = totals(gateways);
        let is_busy = own != Totals::default();
        let was_busy = std::mem::replace(&mut self.was_busy, is_busy);
        if !is_busy && !was_busy && round == TickKind::GoesOn {
            return None;
        }
        let shares = match rules.load {
            true => gateways.iter().map(|gateway| shares(gateway)).collect(),
            false => Vec::new(),
        };
        let mut decisions = Vec::new();
        for gateway in gateways {
            // Taken in any case: nothing may pile up where nothing is told.
            let taken = gateway.router.borrow_mut().take_decisions();
            if rules.decisions {
                let key = pool_number(&gateway.pool.name);
                decisions.extend(taken.into_iter().map(|decision| (key, decision)));
            }
        }
        let desk = self
            .desk
            .get_or_insert_with(|| ThreadSync::new(shared::unique_number()));
        desk.publish(&SharedData, &own, &shares, &decisions);
        self.hear(gateways, now)
    }

    /// Whether the others were heard too long ago for a choice that is made `now`: a VM that is idle listens seldom.
    pub fn is_out_of_date(&self, rules: &Sharing, now: Duration) -> bool {
        let since = now.saturating_sub(self.heard_at);
        self.desk.is_some() && since > Duration::from_millis(2 * rules.interval_ms)
    }

    /// Hears the others.
    pub fn hear(&mut self, gateways: &[Rc<PoolRuntime>], now: Duration) -> Option<ThreadUpdate> {
        let desk = self.desk.as_mut()?;
        let heard = desk.listen(&SharedData, self.ticked_ms / BOARD_TICK_MS);
        for gateway in gateways {
            let key = pool_number(&gateway.pool.name);
            let others = heard.shares.iter().find(|pool| pool.pool == key);
            let shares = others.map_or(&[][..], |pool| pool.shares.as_slice());
            gateway.router.borrow_mut().hear_shares(shares);
            // The VM that leads serves nobody, as a rule: what prompts went where is of no use to it.
            if gateway.vm.serves() || !gateway.vm.leads() {
                learn(gateway, key, &heard);
            }
        }
        self.heard_at = now;
        Some(heard)
    }

    /// Segments of others' decisions that were overwritten before they were read here.
    pub fn lapped(&self) -> u64 {
        self.desk.as_ref().map_or(0, ThreadSync::lapped)
    }
}

fn learn(gateway: &PoolRuntime, key: u64, heard: &ThreadUpdate) {
    let mut router = gateway.router.borrow_mut();
    for (_, decision) in heard.decisions.iter().filter(|(pool, _)| *pool == key) {
        router.hear_decision(decision);
    }
}

fn shares(gateway: &PoolRuntime) -> PoolShares {
    PoolShares {
        pool: pool_number(&gateway.pool.name),
        shares: gateway.router.borrow().shares(),
    }
}

/// What this VM has under way.
fn totals(gateways: &[Rc<PoolRuntime>]) -> Totals {
    let streams = gateways
        .first()
        .map_or(0, |gateway| gateway.telemetry.streams());
    let none = Totals {
        streams,
        ..Totals::default()
    };
    gateways.iter().fold(none, |sum, gateway| {
        let router = gateway.router.borrow();
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
