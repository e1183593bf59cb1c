//! Owns the simulated engines of a scenario, each at a fixed address: kill, restart, faults and repair.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use hyper::Method;
use pd_harness_common::loopback;
use routing::fleet::Role;
use serde_json::Value;

use super::health::{EngineHealth, HealthRecord};
use super::play::TotalsSource;
use super::pool;
use super::scenario::{EngineAction, EngineId, Fault, FaultTarget, FleetSize, PoolSettings};
use crate::engine::{Dialect, Engine, EngineConfig, EngineError, State};
use crate::http::{self, HttpError};

/// 40,000 prompt tokens per second: each client can send several requests per second.
const SPEEDUP: f64 = 5.0;
/// Milliseconds per token before the speed-up; 4 after it.
const TOKEN_MS: f64 = 20.0;
/// Longer than any late fetch, and short enough that lost hand-offs do not fill an engine.
const LEASE: Duration = Duration::from_secs(5);
/// More than all clients occupy within one lease.
const KV_BLOCKS: u32 = 50_000;
/// Longer than all deadlines of the filter.
const PARTNER_TIMEOUT: Duration = Duration::from_secs(5);

const FAULTS: &str = "/__fault";

/// Why a fleet is not in the required state.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// An engine does not start.
    #[error("the {id} engine: {source}")]
    Engine {
        /// Which engine.
        id: EngineId,
        /// Why.
        source: EngineError,
    },
    /// An engine does not obey.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// An engine died without being killed.
    #[error("the {0} engine died before it was killed")]
    NoLastCounts(EngineId),
    /// The machine refused a port or a file.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The script names an engine that does not exist.
    #[error("the script speaks of an engine that is not there: {0}")]
    NoEngine(EngineId),
}

/// Engines in this process, and the record of their health.
pub struct Fleet {
    dialect: Dialect,
    slots: Vec<EngineSlot>,
    /// Which engines were healthy at which time.
    pub health: HealthRecord,
    /// For each kind of repaired fault, how often it was met.
    pub met: BTreeMap<String, u64>,
}

/// Position of an engine in the fleet.
struct EngineSlot {
    id: EngineId,
    config: EngineConfig,
    engine: Option<Engine>,
    /// Unfetched hand-offs of the engines killed here.
    lost: u64,
}

/// Totals reported by the running engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineTotals {
    /// Requests in the engines.
    pub requests: u64,
    /// Hand-offs issued by these or by killed engines, and neither fetched nor given up.
    pub unfetched: u64,
}

impl EngineTotals {
    /// Those of one engine. A hand-off is unfetched whether or not its lease has ended.
    pub fn of(state: &State) -> Self {
        let fetched_or_given_up = state.pulled + state.handoffs_aborted;
        Self {
            requests: state.counts.running + state.counts.waiting,
            unfetched: state.issued.saturating_sub(fetched_or_given_up),
        }
    }
}

impl Fleet {
    /// Starts the engines.
    ///
    /// # Errors
    /// When an engine does not start.
    pub async fn start(size: FleetSize, dialect: Dialect) -> Result<Self, FleetError> {
        let ip = IpAddr::V4(loopback::own());
        let ids = |role, count| (0..count).map(move |number| EngineId { role, number });
        let all = ids(Role::Prefill, size.prefill).chain(ids(Role::Decode, size.decode));
        let mut slots = Vec::new();
        for id in all {
            let mut slot = EngineSlot::new(id, dialect, ip);
            slot.start().await?;
            slots.push(slot);
        }
        Ok(Self {
            dialect,
            slots,
            health: HealthRecord::new(size),
            met: BTreeMap::new(),
        })
    }

    /// The plugin's configuration for these engines, with these pool settings.
    pub fn plugin_config(&self, settings: PoolSettings) -> Vec<u8> {
        let engines = self.slots.iter();
        let engines = engines.filter_map(|slot| Some((slot.id.role, slot.engine.as_ref()?)));
        pool::plugin_config(self.dialect, &engines.collect::<Vec<_>>(), settings)
    }

    /// Performs one step of the script.
    ///
    /// # Errors
    /// When an engine does not start or does not obey.
    pub async fn perform(&mut self, action: EngineAction) -> Result<(), FleetError> {
        match action {
            EngineAction::Kill(id) => {
                self.note(id, EngineHealth::Faulty);
                self.slot(id)?.kill().await
            }
            EngineAction::Start(id) => {
                self.slot(id)?.start().await?;
                self.note(id, EngineHealth::Healthy);
                Ok(())
            }
            EngineAction::Inject(target, fault) => {
                for id in self.targets(target) {
                    self.note(id, fault.leaves());
                    self.inject(id, fault).await?;
                }
                Ok(())
            }
            EngineAction::Repair(target) => {
                for id in self.targets(target) {
                    self.repair(id).await?;
                    self.note(id, EngineHealth::Healthy);
                }
                Ok(())
            }
        }
    }

    /// Ends the engines.
    pub async fn stop(self) {
        for engine in self.slots.into_iter().filter_map(|slot| slot.engine) {
            engine.stop().await;
        }
    }

    async fn inject(&mut self, id: EngineId, fault: Fault) -> Result<(), FleetError> {
        let address = self.slot(id)?.address();
        let fault = fault.to_json().to_string();
        http::send(Method::POST, address, FAULTS, fault, None).await?;
        Ok(())
    }

    async fn repair(&mut self, id: EngineId) -> Result<(), FleetError> {
        let address = self.slot(id)?.address();
        let faults: Value = http::get_json(address, FAULTS).await?;
        for fault in faults.as_array().into_iter().flatten() {
            let kind = fault["kind"].as_str().unwrap_or_default();
            let met = self.met.entry(kind.to_owned()).or_default();
            *met += fault["hits"].as_u64().unwrap_or_default();
        }
        http::send(Method::DELETE, address, FAULTS, String::new(), None).await?;
        Ok(())
    }

    fn note(&mut self, id: EngineId, state: EngineHealth) {
        self.health.record(Instant::now(), id, state);
    }

    fn targets(&self, target: FaultTarget) -> Vec<EngineId> {
        match target {
            FaultTarget::One(id) => vec![id],
            FaultTarget::All(role) => {
                let ids = self.slots.iter().map(|slot| slot.id);
                ids.filter(|id| id.role == role).collect()
            }
        }
    }

    fn slot(&mut self, id: EngineId) -> Result<&mut EngineSlot, FleetError> {
        let mut slots = self.slots.iter_mut();
        let slot = slots.find(|slot| slot.id == id);
        slot.ok_or(FleetError::NoEngine(id))
    }
}

impl TotalsSource for Fleet {
    fn running(&self) -> impl Iterator<Item = SocketAddr> {
        let running = self.slots.iter().filter(|slot| slot.engine.is_some());
        running.map(EngineSlot::address)
    }

    fn lost(&self) -> u64 {
        self.slots.iter().map(|slot| slot.lost).sum()
    }
}

impl EngineSlot {
    fn new(id: EngineId, dialect: Dialect, ip: IpAddr) -> Self {
        Self {
            id,
            config: engine_config(dialect, id.role, SocketAddr::new(ip, 0)),
            engine: None,
            lost: 0,
        }
    }

    /// Address of the engine, after its first start.
    fn address(&self) -> SocketAddr {
        self.config.listen
    }

    /// Starts the engine, unless it runs already.
    async fn start(&mut self) -> Result<(), FleetError> {
        if self.engine.is_some() {
            return Ok(());
        }
        let engine = Engine::start(self.config.clone()).await;
        let engine = engine.map_err(|source| FleetError::Engine {
            id: self.id,
            source,
        })?;
        self.config.listen = engine.address;
        self.config.bootstrap_port = engine.bootstrap.map_or(0, |address| address.port());
        self.engine = Some(engine);
        Ok(())
    }

    /// Kills the engine like a process, if it runs.
    async fn kill(&mut self) -> Result<(), FleetError> {
        let Some(engine) = self.engine.take() else {
            return Ok(());
        };
        let last = engine.stop().await;
        let last = last.ok_or(FleetError::NoLastCounts(self.id))?;
        self.lost += EngineTotals::of(&last).unfetched;
        Ok(())
    }
}

/// Configuration of an engine, the same in all scenarios.
pub fn engine_config(dialect: Dialect, role: Role, listen: SocketAddr) -> EngineConfig {
    EngineConfig {
        dialect,
        listen,
        speedup: SPEEDUP,
        token_ms: TOKEN_MS,
        lease: LEASE,
        kv_blocks: KV_BLOCKS,
        partner_timeout: PARTNER_TIMEOUT,
        ..EngineConfig::new(role)
    }
}
