//! Owns the state of one VM across configurations: pool states, leadership, thread sync and metrics. A new configuration finds
//! all of it here.

mod clock;
mod in_stream;
mod leadership;
mod pool_runtime;
mod pools;
mod refusals;
mod registry_view;
mod routing_headers;
mod stream;
mod tasks;
mod thread_sync;
mod uploads;

pub use in_stream::InStream;
pub use pool_runtime::{PoolRuntime, Waits};
pub use pools::Pools;
pub use refusals::Refused;
pub use registry_view::RegistryView;
pub use routing_headers::RoutingHeaders;
pub use stream::{Stream, destination_headers};
pub use tasks::{Call, Calls, CleanUpCall, DecodeCall, Job, RootTask};
pub use thread_sync::TickKind;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::budget::HeldBytes;
use routing::config::{Pool, Sharing};
use routing::route::Router;

use crate::host::{self, Buffer, HostError};
use clock::VmClock;
use leadership::Leadership;
use pool_runtime::WaitingRequests;
use refusals::Refusals;
use thread_sync::ThreadSyncDriver;
use uploads::Receiving;

use crate::telemetry::{FleetCounts, Leader, PoolTelemetry, Telemetry};

thread_local! {
    /// Shared by all root contexts: the SDK makes each by itself and passes nothing from one to the next. A VM has one thread.
    static VM: RefCell<Option<Rc<Vm>>> = const { RefCell::new(None) };
}

/// State of one VM.
pub struct Vm {
    /// Metrics that do not belong to one pool.
    pub telemetry: Rc<Telemetry>,
    /// Recently refused requests.
    pub refusals: Refusals,
    /// The clock of this VM.
    pub clock: VmClock,
    /// Bytes of request bodies buffered now.
    pub bodies: HeldBytes,
    /// Bytes of those that are kept for further legs, of all pools.
    pub kept: HeldBytes,
    /// The requests whose bodies are being received.
    pub receiving: Receiving,
    leadership: RefCell<Leadership>,
    thread_sync: RefCell<ThreadSyncDriver>,
    pools: RefCell<KnownPools>,
}

/// The pools of all configurations of this VM.
#[derive(Default)]
struct KnownPools {
    states: HashMap<String, PoolState>,
    /// Pool runtimes of active roots by pool, in the order of their roots. After an update the old root goes on until its streams
    /// have drained; and two listeners may have a configuration each.
    alive: BTreeMap<String, Vec<Rc<PoolRuntime>>>,
}

/// State of a pool that is kept from one configuration to the next.
#[derive(Clone)]
pub struct PoolState {
    /// The pool's router.
    pub router: Rc<RefCell<Router>>,
    /// Requests that wait for a worker.
    pub waiting: Rc<RefCell<WaitingRequests>>,
    /// The pool's metrics.
    pub metrics: Rc<PoolTelemetry>,
    /// What the router has seen.
    pub seen: Rc<RefCell<Seen>>,
    /// Bytes held by clean-up requests, whose clients have left.
    pub cleanup_budget: HeldBytes,
    /// Bytes held by replay buffers, for requests that may have to be routed again.
    pub replay_budget: HeldBytes,
}

/// What the router of a pool has seen of what other VMs publish, and under which configuration.
pub struct Seen {
    /// The root whose configuration the router follows.
    pub followed: u32,
    /// Version of the published fleet that was last read.
    pub fleet: u32,
    /// Version of the engines' reports that was last read.
    pub reports: u32,
}

impl Seen {
    /// Nothing, under the configuration of that root.
    pub fn following(root: u32) -> Self {
        Self {
            followed: root,
            fleet: 0,
            reports: 0,
        }
    }
}

impl Vm {
    /// This VM. Called when the VM is configured, or later.
    pub fn this() -> Rc<Self> {
        VM.with_borrow_mut(|vm| Rc::clone(vm.get_or_insert_with(|| Rc::new(Self::new()))))
    }

    fn new() -> Self {
        Self {
            telemetry: Rc::new(Telemetry::new()),
            refusals: Refusals::default(),
            clock: VmClock::default(),
            bodies: HeldBytes::default(),
            kept: HeldBytes::default(),
            receiving: Receiving::default(),
            leadership: RefCell::new(Leadership::new()),
            thread_sync: RefCell::default(),
            pools: RefCell::default(),
        }
    }

    /// The state of a pool: as an earlier configuration has left it, or new. Nothing is changed yet: the root may only be on
    /// trial.
    pub fn adopt(&self, pool: &Pool, root: u32) -> PoolState {
        let states = &mut self.pools.borrow_mut().states;
        if let Some(state) = states.get(&pool.name) {
            return state.clone();
        }
        let seed = host::now_ns() ^ u64::from(root).rotate_left(32);
        let mut router = Router::new(pool.clone(), seed, seed, self.now());
        router.keep_decisions();
        let state = PoolState {
            router: Rc::new(RefCell::new(router)),
            waiting: Rc::default(),
            metrics: Rc::new(PoolTelemetry::new(&pool.name)),
            seen: Rc::new(RefCell::new(Seen::following(root))),
            cleanup_budget: HeldBytes::default(),
            replay_budget: HeldBytes::default(),
        };
        states.insert(pool.name.clone(), state.clone());
        state
    }

    /// A copy of the request body of the effective context.
    ///
    /// # Errors
    /// If the proxy would not return the body.
    pub fn copy_body(&self) -> Result<Vec<u8>, HostError> {
        let body = host::buffer(Buffer::Request)?;
        self.telemetry.body_copied(body.len());
        Ok(body)
    }

    /// Registers the pool runtimes of a root, at its first tick or first request.
    pub fn register(&self, runtimes: &[Rc<PoolRuntime>]) {
        let alive = &mut self.pools.borrow_mut().alive;
        for runtime in runtimes {
            let of_pool = alive.entry(runtime.pool.name.clone()).or_default();
            of_pool.push(Rc::clone(runtime));
            of_pool.sort_by_key(|runtime| runtime.root_id);
        }
    }

    /// Deregisters the pool runtimes of a root that is gone: its configuration was refused after all, or its streams have
    /// drained. State of pools that no other root has is dropped.
    pub fn deregister(&self, root: u32, runtimes: &[Rc<PoolRuntime>]) {
        let KnownPools { states, alive } = &mut *self.pools.borrow_mut();
        for of_pool in alive.values_mut() {
            of_pool.retain(|runtime| runtime.root_id != root);
        }
        alive.retain(|_, of_pool| !of_pool.is_empty());
        // References of the map and of the root that is gone; a root that has not had its first tick yet holds further ones.
        const NOBODY_ELSE: usize = 2;
        for runtime in runtimes {
            let is_last = Rc::strong_count(&runtime.state.router) <= NOBODY_ELSE;
            if is_last && !alive.contains_key(&runtime.pool.name) {
                states.remove(&runtime.pool.name);
            }
        }
    }

    /// Whether a pool runtime acts for its pool: of several, the one with the latest root.
    pub fn acts(&self, runtime: &PoolRuntime) -> bool {
        let alive = &self.pools.borrow().alive;
        let last = alive
            .get(&runtime.pool.name)
            .and_then(|runtimes| runtimes.last());
        last.is_some_and(|last| last.root_id == runtime.root_id)
    }

    /// Whether a root acts for the VM: the latest one does.
    pub fn is_driven_by(&self, root: u32) -> bool {
        let alive = &self.pools.borrow().alive;
        let roots = alive.values().flatten().map(|runtime| runtime.root_id);
        roots.max() == Some(root)
    }

    /// The pool runtimes that act for their pools.
    fn acting(&self) -> Vec<Rc<PoolRuntime>> {
        let alive = &self.pools.borrow().alive;
        alive
            .values()
            .filter_map(|all| all.last().cloned())
            .collect()
    }

    /// The time that all durations are measured by, valid in this VM alone.
    pub fn now(&self) -> Duration {
        self.clock.read()
    }

    /// Notes that a request has come.
    pub fn request_came(&self) {
        self.leadership.borrow_mut().serves = true;
    }

    /// Whether this VM has ever had a request.
    pub fn serves(&self) -> bool {
        self.leadership.borrow().serves
    }

    /// Takes part in the election of a leader. Called in each round.
    pub fn run_for_lead(&self) {
        let has_won = self.leadership.borrow_mut().run();
        if has_won {
            // Another VM has set the gauges meanwhile.
            self.set_anew();
        }
    }

    /// Syncs with the other VMs: publishes the state of this VM's pools, reads theirs. Called at each tick.
    pub fn sync_threads(&self, rules: &Sharing, tick_kind: TickKind) {
        let mut thread_sync = self.thread_sync.borrow_mut();
        let update = thread_sync.tick(&self.acting(), rules, tick_kind, self.now());
        self.telemetry.lapped(thread_sync.lapped());
        if let Some(update) = update
            && self.leads()
        {
            self.telemetry.totals(&update.totals, update.vms);
        }
    }

    /// Reads the other VMs, if the last read is too old for a choice made `now`.
    pub fn refresh(&self, rules: &Sharing, now: Duration) {
        let mut thread_sync = self.thread_sync.borrow_mut();
        if thread_sync.is_out_of_date(rules, now) {
            thread_sync.listen(&self.acting(), now);
        }
    }

    /// Publishes the metrics of decisions made here and, if this VM leads, those of all fleets.
    pub fn tell_of_fleets(&self) {
        self.refusals.publish();
        self.telemetry.export_copied();
        for runtime in self.acting() {
            let tally = runtime.router_mut().take_tally();
            runtime.metrics.decided(tally);
        }
        if !self.leads() {
            return;
        }
        let sets_anew = self.leadership.borrow_mut().sets_gauges_anew();
        if sets_anew {
            self.set_anew();
        }
        let mut counts = FleetCounts {
            leader: match self.serves() {
                true => Leader::Worker,
                false => Leader::Main,
            },
            ..FleetCounts::default()
        };
        for runtime in self.acting() {
            let router = runtime.router();
            counts.add(&router);
            runtime.metrics.export_counts(&router);
        }
        self.telemetry.export_counts(counts);
    }

    fn set_anew(&self) {
        self.telemetry.forget_exported();
        for state in self.pools.borrow().states.values() {
            state.metrics.forget_exported();
        }
    }

    /// Whether this VM leads.
    pub fn leads(&self) -> bool {
        self.leadership.borrow().leads
    }
}
