//! Owns the churning workers: which exist, what happens next, and what reached those that were gone.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use routing::fleet::Role;
use serde_json::Value;

use super::publisher::{DiscoveryPublisher, WorkerEntry};
use super::source::Source;
use super::{Churned, GRACE, LOOK};
use crate::chaos::fleet::{EngineTotals, FleetError, engine_config};
use crate::chaos::play::TotalsSource;
use crate::chaos::scenario::EngineId;
use crate::engine::{Dialect, Engine, State};
use crate::http;
use crate::run::fleet::Members;

/// Initial workers of each role.
const FIRST: usize = 3;
/// Maximum workers of each role, leaving ones not counted.
const MOST: usize = 5;
/// A worker may leave only if this many others of its role remain, healthy and known to the gateway.
const STAY: usize = 2;
/// Time after listing at which the gateway certainly knows a worker.
const KNOWN: Duration = GRACE.saturating_add(Duration::from_millis(500));
/// How long a removed worker keeps running, to count what still reaches it.
const WATCHED: Duration = Duration::from_millis(1500);
/// How long a draining worker waits for its last requests.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time between two events, in milliseconds.
const PACE: std::ops::Range<u64> = 150..500;
/// How long a dead worker stays listed, in milliseconds, until its death is noticed or it returns.
const UNNOTICED: std::ops::Range<u64> = 300..1500;
/// Addresses of each role: `FEW` if the clusters hold a fixed set, `MANY` if not.
const FEW: usize = 10;
const MANY: usize = 150;

/// The workers and the publisher that announces them to the gateway.
pub struct ChurnFleet {
    source: Source,
    dialect: Dialect,
    publisher: DiscoveryPublisher,
    workers: Vec<Worker>,
    slots: Vec<AddressSlot>,
    last_id: u64,
    next_event: Instant,
    lost: u64,
    churned: Churned,
    dice: StdRng,
}

/// An address, used by one worker of a role after another.
struct AddressSlot {
    role: Role,
    address: SocketAddr,
    bootstrap: u16,
    used: bool,
    taken: bool,
}

struct Worker {
    id: u64,
    role: Role,
    slot: usize,
    address: SocketAddr,
    bootstrap: Option<u16>,
    engine: Option<Engine>,
    state: WorkerState,
}

/// State of a worker.
#[derive(Clone, Copy, Debug)]
enum WorkerState {
    /// Listed.
    Listed { since: Instant },
    /// Listed as draining.
    Draining {
        since: Instant,
        requests: Option<u64>,
    },
    /// No longer listed, but still running.
    Removed {
        since: Instant,
        requests: Option<u64>,
    },
    /// Dead, but still listed.
    Dead { until: Instant },
}

/// What can happen to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkerEvent {
    Join,
    Drain,
    Remove,
    Die,
}

impl ChurnFleet {
    /// Starts the first workers.
    ///
    /// # Errors
    /// When an engine does not start.
    pub async fn start(
        source: Source,
        dialect: Dialect,
        ip: IpAddr,
        seed: u64,
    ) -> Result<Self, FleetError> {
        let count = if source.finds_addresses() { MANY } else { FEW };
        let slots = free_slots(ip, count)?;
        let mut fleet = Self {
            source,
            dialect,
            publisher: DiscoveryPublisher::of(source)?,
            workers: Vec::new(),
            slots,
            last_id: 0,
            next_event: Instant::now(),
            lost: 0,
            churned: Churned::default(),
            dice: StdRng::seed_from_u64(seed),
        };
        for role in [Role::Prefill, Role::Decode] {
            for _ in 0..FIRST {
                fleet.join(role).await?;
            }
        }
        fleet.churned = Churned::default();
        fleet.publish().await?;
        Ok(fleet)
    }

    /// The pool's `discovery`.
    pub fn discovery(&self) -> Value {
        self.publisher.discovery(&self.entries())
    }

    /// Adds the workers to the proxy's configuration.
    pub fn add_to(&self, members: &mut Members) {
        self.publisher.add_to(members);
        if self.source == Source::Document {
            for slot in &self.slots {
                members.enlist(slot.role.name(), [slot.address]);
            }
        }
    }

    /// Announces the workers to the gateway, if the source does so by calls.
    ///
    /// # Errors
    /// When the gateway does not listen.
    pub async fn announce_to(&mut self, gateway: SocketAddr) -> Result<(), FleetError> {
        self.publisher.set_gateway(gateway);
        // Again: the gateway's address is known only now.
        self.publish().await
    }

    /// Keeps announcing the workers and causes no event. Ends with the first failure.
    pub async fn stay(&mut self) -> FleetError {
        loop {
            if let Err(error) = self.publish().await {
                return error;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Advances the workers that are leaving, and causes the next event when it is due.
    ///
    /// # Errors
    /// When an engine does not start or does not answer, or the gateway does not listen.
    pub async fn step(&mut self) -> Result<(), FleetError> {
        let now = Instant::now();
        let mut at = 0;
        while at < self.workers.len() {
            match self.advance(at, now).await? {
                true => at += 1,
                false => {
                    let gone = self.workers.swap_remove(at);
                    self.slots[gone.slot].taken = false;
                }
            }
        }
        if now >= self.next_event {
            self.cause_event(now).await?;
            self.next_event = now + Duration::from_millis(self.dice.random_range(PACE));
        }
        self.publish().await
    }

    /// Ends all workers and returns the counts.
    pub async fn stop(mut self) -> Churned {
        for worker in &mut self.workers {
            let Some(engine) = worker.engine.take() else {
                continue;
            };
            let last = engine.stop().await;
            if let (Some(last), WorkerState::Removed { requests, .. }) = (last, worker.state) {
                self.churned.removed_worker_requests += later(&last, requests);
            }
        }
        self.churned
    }

    fn entries(&self) -> Vec<WorkerEntry> {
        let listed = self
            .workers
            .iter()
            .filter(|worker| !matches!(worker.state, WorkerState::Removed { .. }));
        let mut entries: Vec<_> = listed.map(Worker::entry).collect();
        entries.sort_by_key(|entry| entry.id);
        entries
    }

    async fn publish(&mut self) -> Result<(), FleetError> {
        let entries = self.entries();
        self.publisher.publish(entries).await
    }

    /// One step of a leaving worker. `false`: the worker is gone.
    async fn advance(&mut self, at: usize, now: Instant) -> Result<bool, FleetError> {
        match self.workers[at].state {
            WorkerState::Listed { .. } => Ok(true),
            WorkerState::Dead { until } if now < until => Ok(true),
            WorkerState::Dead { .. } => {
                let returns = self.source == Source::Static || self.dice.random_bool(0.5);
                if returns {
                    self.return_to(at).await?;
                }
                Ok(returns)
            }
            WorkerState::Draining { since, requests } => {
                self.drain_on(at, now - since, requests).await?;
                Ok(true)
            }
            WorkerState::Removed { since, requests } => self.watch(at, now - since, requests).await,
        }
    }

    /// A worker that has drained for `late`: removed from the list when it has no requests left.
    async fn drain_on(
        &mut self,
        at: usize,
        late: Duration,
        requests: Option<u64>,
    ) -> Result<(), FleetError> {
        let worker = &mut self.workers[at];
        if late < GRACE {
            return Ok(());
        }
        let Some(seen) = worker.report().await? else {
            return Ok(());
        };
        let Some(before) = requests else {
            if let WorkerState::Draining { requests, .. } = &mut worker.state {
                *requests = Some(seen.counts.requests);
            }
            return Ok(());
        };
        if is_idle(&seen) || late >= PATIENCE {
            self.churned.draining_worker_requests += seen.counts.requests - before;
            worker.state = WorkerState::Removed {
                since: Instant::now(),
                requests: None,
            };
        }
        Ok(())
    }

    /// A worker removed `late` ago: counts the requests that still reach it, then ends it. `false`: ended.
    async fn watch(
        &mut self,
        at: usize,
        late: Duration,
        requests: Option<u64>,
    ) -> Result<bool, FleetError> {
        let worker = &mut self.workers[at];
        if late < GRACE {
            return Ok(true);
        }
        let Some(seen) = worker.report().await? else {
            return Ok(false);
        };
        if requests.is_none() {
            if let WorkerState::Removed { requests, .. } = &mut worker.state {
                *requests = Some(seen.counts.requests);
            }
            return Ok(true);
        }
        let over = late >= GRACE + WATCHED && is_idle(&seen);
        if !over && late < PATIENCE {
            return Ok(true);
        }
        let last = self.end(at).await?;
        self.churned.removed_worker_requests += later(&last, requests);
        Ok(false)
    }

    /// Causes one event.
    async fn cause_event(&mut self, now: Instant) -> Result<(), FleetError> {
        let role = match self.dice.random_bool(0.5) {
            true => Role::Prefill,
            false => Role::Decode,
        };
        let Some(event) = self.possible(role, now).choose(&mut self.dice).copied() else {
            return Ok(());
        };
        if event == WorkerEvent::Join {
            return self.join(role).await;
        }
        let known: Vec<usize> = self.known(role, now).collect();
        let Some(at) = known.choose(&mut self.dice).copied() else {
            return Ok(());
        };
        match event {
            WorkerEvent::Join => {}
            WorkerEvent::Drain => {
                self.churned.drained += 1;
                self.workers[at].state = WorkerState::Draining {
                    since: now,
                    requests: None,
                };
            }
            WorkerEvent::Remove => {
                self.churned.removed += 1;
                self.workers[at].state = WorkerState::Removed {
                    since: now,
                    requests: None,
                };
            }
            WorkerEvent::Die => {
                self.churned.died += 1;
                self.end(at).await?;
                let unnoticed = Duration::from_millis(self.dice.random_range(UNNOTICED));
                self.workers[at].state = WorkerState::Dead {
                    until: now + unnoticed,
                };
            }
        }
        Ok(())
    }

    /// Events that are possible in this role while enough workers remain.
    fn possible(&self, role: Role, now: Instant) -> Vec<WorkerEvent> {
        let of_role = || self.workers.iter().filter(|worker| worker.role == role);
        let there = of_role().filter(|worker| matches!(worker.state, WorkerState::Listed { .. }));
        let dead = of_role().any(|worker| matches!(worker.state, WorkerState::Dead { .. }));
        let lists = self.source != Source::Static;
        let mut events = Vec::new();
        if lists && there.count() < MOST {
            events.push(WorkerEvent::Join);
        }
        if self.known(role, now).count() <= STAY {
            return events;
        }
        if lists {
            events.extend([WorkerEvent::Drain, WorkerEvent::Remove]);
        }
        if !dead {
            events.push(WorkerEvent::Die);
        }
        events
    }

    /// Healthy workers of this role that the gateway has known for a while.
    fn known(&self, role: Role, now: Instant) -> impl Iterator<Item = usize> {
        let workers = self.workers.iter().enumerate();
        workers.filter_map(move |(at, worker)| match worker.state {
            WorkerState::Listed { since } if worker.role == role && now - since >= KNOWN => {
                Some(at)
            }
            _ => None,
        })
    }

    async fn join(&mut self, role: Role) -> Result<(), FleetError> {
        let of_role = |slot: &AddressSlot| slot.role == role && !slot.taken;
        let free = self.slots.iter().enumerate();
        let free = free.filter(|(_, slot)| of_role(slot));
        let (used, fresh): (Vec<_>, Vec<_>) = free.partition(|(_, slot)| slot.used);
        let from = match used.is_empty() || (!fresh.is_empty() && self.dice.random_bool(0.5)) {
            true => fresh,
            false => used,
        };
        let Some((slot, _)) = from.choose(&mut self.dice) else {
            return Ok(());
        };
        let slot = *slot;
        let worker = self.start_worker(slot).await?;
        self.workers.push(worker);
        Ok(())
    }

    /// Starts another worker at the address of this dead one.
    async fn return_to(&mut self, at: usize) -> Result<(), FleetError> {
        let slot = self.workers[at].slot;
        self.workers[at] = self.start_worker(slot).await?;
        Ok(())
    }

    async fn start_worker(&mut self, slot: usize) -> Result<Worker, FleetError> {
        let at = &mut self.slots[slot];
        match std::mem::replace(&mut at.used, true) {
            true => self.churned.returned += 1,
            false => self.churned.joined += 1,
        }
        at.taken = true;
        // The ids of a static list stay: they are part of the configuration.
        let id = match self.source {
            Source::Static => slot as u64 + 1,
            _ => self.last_id + 1,
        };
        self.last_id = id.max(self.last_id);
        let mut config = engine_config(self.dialect, at.role, at.address);
        config.bootstrap_port = at.bootstrap;
        let engine = Engine::start(config).await.map_err(|source| {
            let number = slot;
            FleetError::Engine {
                id: EngineId {
                    role: at.role,
                    number,
                },
                source,
            }
        })?;
        let bootstrap = engine.bootstrap.map(|address| address.port());
        Ok(Worker {
            id,
            role: at.role,
            slot,
            address: engine.address,
            bootstrap,
            engine: Some(engine),
            state: WorkerState::Listed {
                since: Instant::now(),
            },
        })
    }

    /// Ends a worker abruptly, like a killed process.
    async fn end(&mut self, at: usize) -> Result<State, FleetError> {
        let worker = &mut self.workers[at];
        let id = EngineId {
            role: worker.role,
            number: worker.slot,
        };
        let engine = worker.engine.take().ok_or(FleetError::NoEngine(id))?;
        let last = engine.stop().await.ok_or(FleetError::NoLastCounts(id))?;
        self.lost += EngineTotals::of(&last).unfetched;
        Ok(last)
    }
}

impl TotalsSource for ChurnFleet {
    fn running(&self) -> impl Iterator<Item = SocketAddr> {
        let running = self.workers.iter().filter(|one| one.engine.is_some());
        running.map(|worker| worker.address)
    }

    fn lost(&self) -> u64 {
        self.lost
    }
}

impl Worker {
    fn entry(&self) -> WorkerEntry {
        WorkerEntry {
            id: self.id,
            role: self.role,
            address: self.address,
            bootstrap: self.bootstrap,
            draining: matches!(self.state, WorkerState::Draining { .. }),
            alive: self.engine.is_some(),
        }
    }

    /// `None`: the worker does not run.
    async fn report(&self) -> Result<Option<State>, FleetError> {
        if self.engine.is_none() {
            return Ok(None);
        }
        Ok(Some(http::get_json(self.address, "/__state").await?))
    }
}

/// Whether no request waits or runs.
fn is_idle(state: &State) -> bool {
    EngineTotals::of(state).requests == 0
}

/// Requests that came after the first `before`.
fn later(last: &State, before: Option<u64>) -> u64 {
    before.map_or(0, |before| last.counts.requests.saturating_sub(before))
}

/// `count` addresses of each role, at free ports of `ip`; the ports stay free, since no other process uses this IP. All sockets
/// are held until the last is found, so that no port is found twice.
fn free_slots(ip: IpAddr, count: usize) -> std::io::Result<Vec<AddressSlot>> {
    let roles = [Role::Prefill, Role::Decode];
    let held = (0..2 * roles.len() * count).map(|_| TcpListener::bind((ip, 0)));
    let held = held.collect::<std::io::Result<Vec<_>>>()?;
    let roles = roles
        .into_iter()
        .flat_map(|role| (0..count).map(move |_| role));
    let slots = held.chunks_exact(2).zip(roles).map(|(pair, role)| {
        Ok(AddressSlot {
            role,
            address: pair[0].local_addr()?,
            bootstrap: pair[1].local_addr()?.port(),
            used: false,
            taken: false,
        })
    });
    slots.collect()
}

#[cfg(test)]
mod tests;
