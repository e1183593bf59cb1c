//! Owns the status: the fleet and its load as JSON, and a page that draws it. Served only if enabled.

use std::sync::Arc;
use std::time::Duration;

use routing::config::Discovery;
use routing::fleet::Worker;
use routing::load::Load;
use routing::model_state::{ModelKey, ModelState};
use routing::route::{Report, Router};
use serde::Serialize;

use super::JsonAnswer;
use crate::shared::{self, SourceHealth};
use crate::vm::PoolRuntime;
use crate::vm::Pools;
use crate::vm::{Refused, Vm};

/// The status page. Reads the status JSON, and nothing from anywhere else.
pub const PAGE: &str = include_str!("page.html");

/// Content security policy of the page: it may only read from its own origin. Script and style are inline.
pub const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The pools as this thread's VM sees them.
#[derive(Serialize)]
struct Status {
    /// The filter's version.
    version: &'static str,
    /// Whether this thread's VM polls for all.
    leads: bool,
    pools: Vec<Box<serde_json::value::RawValue>>,
    /// Recent refusals of all threads, the latest first.
    refusals: Vec<Refused>,
}

/// One pool's fleet and its load.
#[derive(Serialize)]
struct PoolStatus<'a> {
    pool: &'a str,
    protocol: &'static str,
    fleet_version: u64,
    discovery: DiscoveryStatus,
    /// Bookings of this thread alone.
    bookings: Bookings,
    /// Requests that wait for a worker.
    waiting: usize,
    places: Vec<PlaceStatus<'a>>,
    workers: Vec<WorkerStatus<'a>>,
}

/// The source of the fleet, and its health.
#[derive(Serialize)]
struct DiscoveryStatus {
    source: &'static str,
    #[serde(flatten)]
    health: Option<SourceHealth>,
}

#[derive(Serialize)]
struct PlaceStatus<'a> {
    model: Option<&'a str>,
    namespace: &'a str,
    state: &'static str,
    /// Why a request would not be served; `None`: it would be.
    not_served: Option<String>,
}

#[derive(Serialize)]
struct WorkerStatus<'a> {
    name: &'a str,
    /// As text: readers that hold numbers as floating point would change the id.
    id: String,
    role: &'static str,
    model: Option<&'a str>,
    namespace: &'a str,
    /// KV blocks that the worker is thought to hold.
    prefix_blocks: usize,
    /// Whether the worker keeps failing, and is passed over for a time.
    ejected: bool,
    /// Ready, unhealthy or draining, as the source says.
    condition: &'static str,
    /// Bookings of this thread alone.
    bookings: Bookings,
    /// Bookings of all other threads.
    bookings_elsewhere: Bookings,
    /// The engine's own figures, if they are polled.
    engine: Option<EngineStatus>,
}

/// An engine's own figures; a missing figure is not known.
#[derive(Serialize)]
struct EngineStatus {
    /// Time of the report, in milliseconds since 1970.
    at_ms: u64,
    waiting: Option<u32>,
    running: Option<u32>,
    kv_use: Option<f32>,
    kv_blocks: Option<u32>,
    block_tokens: Option<u32>,
}

impl EngineStatus {
    fn of(report: &Report, at: Duration) -> Self {
        Self {
            at_ms: milliseconds(at),
            waiting: report.waiting,
            running: report.running,
            kv_use: report.kv_use,
            kv_blocks: report.kv_blocks,
            block_tokens: report.block_tokens,
        }
    }
}

#[derive(Serialize)]
struct Bookings {
    prefills: u64,
    prefill_tokens: u64,
    decodes: u64,
    decode_blocks: u64,
}

impl From<Load> for Bookings {
    fn from(load: Load) -> Self {
        Self {
            prefills: load.prefills,
            prefill_tokens: load.prefill_tokens,
            decodes: load.decodes,
            decode_blocks: load.decode_blocks,
        }
    }
}

/// The complete status, as JSON.
pub fn status(pools: &Pools) -> JsonAnswer {
    let all = pools.all().iter();
    let status = Status {
        version: env!("CARGO_PKG_VERSION"),
        refusals: pools.vm.refusals.of_all(),
        leads: pools.vm.leads(),
        pools: all.filter_map(|runtime| pool_status(runtime)).collect(),
    };
    JsonAnswer::of(200, &status)
}

fn pool_status(runtime: &PoolRuntime) -> Option<Box<serde_json::value::RawValue>> {
    let router = &*runtime.router();
    let pool = router.pool();
    let absent = router.absent_policy();
    let mut states: Vec<(&ModelKey, &ModelState)> = router.model_states().collect();
    states.sort_by_key(|(key, _)| *key);
    let status = PoolStatus {
        pool: &pool.name,
        protocol: pool.rules().name,
        fleet_version: router.fleet().version(),
        discovery: DiscoveryStatus {
            source: pool.discovery.name(),
            health: match pool.discovery {
                Discovery::Static(_) => None,
                _ => shared::read_source(&pool.name),
            },
        },
        bookings: router.total_load().into(),
        waiting: router.waiting(),
        places: states
            .iter()
            .map(|(key, state)| PlaceStatus {
                model: key.model.as_deref(),
                namespace: &key.namespace,
                state: state.state.name(),
                not_served: state
                    .can_serve_requests(absent)
                    .err()
                    .map(|reason| reason.to_string()),
            })
            .collect(),
        workers: router
            .fleet()
            .workers()
            .map(|worker| worker_status(router, worker, &runtime.vm))
            .collect(),
    };
    serde_json::value::to_raw_value(&status).ok()
}

fn worker_status<'a>(router: &Router, worker: &'a Arc<Worker>, vm: &Vm) -> WorkerStatus<'a> {
    WorkerStatus {
        name: &worker.name,
        id: worker.id.to_string(),
        role: worker.role.name(),
        model: worker.model.as_deref(),
        namespace: &worker.namespace,
        prefix_blocks: router.remembered_blocks(worker),
        ejected: router.is_ejected(worker.id),
        condition: worker.condition.name(),
        bookings: router.worker_load(worker).into(),
        bookings_elsewhere: router.worker_load_elsewhere(worker).into(),
        engine: router
            .report_of(worker.id)
            .map(|report| EngineStatus::of(report, vm.clock.on_the_wall(report.at))),
    }
}
