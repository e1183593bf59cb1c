//! Owns the state of one VM across configurations: pool states, leadership, thread sync and metrics. A new configuration finds
//! all of it here.

mod pool_runtime;
mod pools;
mod refusals;
mod registry_view;
mod routing_headers;
mod stream;
mod tasks;
mod thread_sync;
mod uploads;

pub use pool_runtime::{PoolRuntime, Waits};
pub use pools::Pools;
pub use refusals::Refused;
pub use registry_view::RegistryView;
pub use routing_headers::RoutingHeaders;
pub use stream::{Stream, destination_headers};
pub use tasks::{Call, Calls, CleanUpCall, DecodeCall, Job, RootTask};
pub use thread_sync::TickKind;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::clock::Clock;
use routing::config::{Pool, Sharing};
use routing::route::Router;

use crate::host::{self, Buffer, HostError};
use crate::shared::Lease;
use pool_runtime::WaitingRequests;
use refusals::Refusals;
use thread_sync::ThreadSyncDriver;
use uploads::Receiving;

use crate::telemetry::{FleetCounts, Leader, PoolTelemetry, Telemetry};

/// Rounds between two settings of all gauges: about a second.
const ROUNDS_TO_SET_ANEW: u32 = 10;

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
    /// Whether this VM has had a request; the main thread's never has.
    serves: Cell<bool>,
    /// Whether this VM holds the lease. The leading VM polls, and logs changes that all VMs see.
    leads: Cell<bool>,
    /// Rounds that this VM has led.
    rounds_led: Cell<u32>,
    lease: RefCell<Lease>,
    thread_sync: RefCell<ThreadSyncDriver>,
    clock: Cell<Clock>,
    /// Bytes of request bodies buffered now.
    pub bodies: Rc<Cell<usize>>,
    /// The requests whose bodies are being received.
    pub receiving: Receiving,
    /// Bytes of request bodies copied out of the proxy and not yet counted in the metrics.
    copied: Cell<u64>,
    pools: RefCell<HashMap<String, PoolState>>,
    /// Pool runtimes of active roots by pool, in the order of their roots. After an update the old root goes on until its streams
    /// have drained; and two listeners may have a configuration each.
    alive: RefCell<BTreeMap<String, Vec<Rc<PoolRuntime>>>>,
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
    /// The root whose configuration the router follows.
    pub followed: Rc<Cell<u32>>,
    /// Version of the published fleet that was last read.
    pub fleet_seen: Rc<Cell<u32>>,
    /// Bytes held by clean-up requests, whose clients have left.
    pub cleanup_budget: Rc<Cell<usize>>,
    /// Bytes held by replay buffers, for requests that may have to be routed again.
    pub replay_budget: Rc<Cell<usize>>,
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
            serves: Cell::new(false),
            leads: Cell::new(false),
            rounds_led: Cell::default(),
            lease: RefCell::new(Lease::new()),
            thread_sync: RefCell::default(),
            clock: Cell::default(),
            bodies: Rc::default(),
            receiving: Receiving::default(),
            copied: Cell::default(),
            pools: RefCell::default(),
            alive: RefCell::default(),
        }
    }

    /// The state of a pool: as an earlier configuration has left it, or new. Nothing is changed yet: the root may only be on
    /// trial.
    pub fn adopt(&self, pool: &Pool, root: u32) -> PoolState {
        let mut pools = self.pools.borrow_mut();
        if let Some(state) = pools.get(&pool.name) {
            return state.clone();
        }
        let seed = host::now_ns() ^ u64::from(root).rotate_left(32);
        let mut router = Router::new(pool.clone(), seed, seed, self.now());
        router.keep_decisions();
        let state = PoolState {
            router: Rc::new(RefCell::new(router)),
            waiting: Rc::default(),
            metrics: Rc::new(PoolTelemetry::new(&pool.name)),
            followed: Rc::new(Cell::new(root)),
            fleet_seen: Rc::default(),
            cleanup_budget: Rc::default(),
            replay_budget: Rc::default(),
        };
        pools.insert(pool.name.clone(), state.clone());
        state
    }

    /// A copy of the request body of the effective context.
    ///
    /// # Errors
    /// If the proxy would not return the body.
    pub fn copy_body(&self) -> Result<Vec<u8>, HostError> {
        let body = host::buffer(Buffer::Request)?;
        let copied = self.copied.get().saturating_add(body.len() as u64);
        self.copied.set(copied);
        Ok(body)
    }

    /// Registers the pool runtimes of a root, at its first tick or first request.
    pub fn register(&self, runtimes: &[Rc<PoolRuntime>]) {
        let mut alive = self.alive.borrow_mut();
        for runtime in runtimes {
            let of_pool = alive.entry(runtime.pool.name.clone()).or_default();
            of_pool.push(Rc::clone(runtime));
            of_pool.sort_by_key(|runtime| runtime.root_id);
        }
    }

    /// Deregisters the pool runtimes of a root that is gone: its configuration was refused after all, or its streams have
    /// drained. State of pools that no other root has is dropped.
    pub fn deregister(&self, root: u32, runtimes: &[Rc<PoolRuntime>]) {
        let mut alive = self.alive.borrow_mut();
        for of_pool in alive.values_mut() {
            of_pool.retain(|runtime| runtime.root_id != root);
        }
        alive.retain(|_, of_pool| !of_pool.is_empty());
        // References of the map and of the root that is gone; a root that has not had its first tick yet holds further ones.
        const NOBODY_ELSE: usize = 2;
        let mut pools = self.pools.borrow_mut();
        for runtime in runtimes {
            let is_last = Rc::strong_count(&runtime.router) <= NOBODY_ELSE;
            if is_last && !alive.contains_key(&runtime.pool.name) {
                pools.remove(&runtime.pool.name);
            }
        }
    }

    /// Whether a pool runtime acts for its pool: of several, the one with the latest root.
    pub fn acts(&self, runtime: &PoolRuntime) -> bool {
        let alive = self.alive.borrow();
        let last = alive
            .get(&runtime.pool.name)
            .and_then(|runtimes| runtimes.last());
        last.is_some_and(|last| last.root_id == runtime.root_id)
    }

    /// Whether a root acts for the VM: the latest one does.
    pub fn is_driven_by(&self, root: u32) -> bool {
        let alive = self.alive.borrow();
        let roots = alive.values().flatten().map(|runtime| runtime.root_id);
        roots.max() == Some(root)
    }

    /// The pool runtimes that act for their pools.
    fn acting(&self) -> Vec<Rc<PoolRuntime>> {
        let alive = self.alive.borrow();
        alive
            .values()
            .filter_map(|all| all.last().cloned())
            .collect()
    }

    /// The time that all durations are measured by, valid in this VM alone.
    pub fn now(&self) -> Duration {
        let mut clock = self.clock.get();
        let now = clock.read(Duration::from_nanos(host::now_ns()));
        self.clock.set(clock);
        now
    }

    /// A time by the host's wall clock, for people to read.
    pub fn on_the_wall(&self, time: Duration) -> Duration {
        self.clock.get().on_the_wall(time)
    }

    /// Notes that a request has come.
    pub fn request_came(&self) {
        self.serves.set(true);
    }

    /// Whether this VM has ever had a request.
    pub fn serves(&self) -> bool {
        self.serves.get()
    }

    /// Takes part in the election of a leader. Called in each round.
    pub fn run_for_lead(&self) {
        let leads = self.lease.borrow_mut().tick(self.serves.get());
        if leads && !self.leads.replace(leads) {
            // Another VM has set the gauges meanwhile.
            self.set_anew();
        }
        self.leads.set(leads);
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
        self.telemetry.bodies_copied(self.copied.take());
        for runtime in self.acting() {
            let tally = runtime.router.borrow_mut().take_tally();
            runtime.metrics.decided(tally);
        }
        if !self.leads() {
            return;
        }
        self.set_anew_at_times();
        let mut counts = FleetCounts {
            leader: match self.serves() {
                true => Leader::Worker,
                false => Leader::Main,
            },
            ..FleetCounts::default()
        };
        for runtime in self.acting() {
            let router = runtime.router.borrow();
            counts.add(&router);
            runtime.metrics.export_counts(&router);
        }
        self.telemetry.export_counts(counts);
    }

    /// Two VMs may both believe that they lead, for a moment, and the wrong one may set the gauges last: so all gauges are set
    /// again now and then, changed or not.
    fn set_anew_at_times(&self) {
        let rounds = self.rounds_led.get().wrapping_add(1);
        self.rounds_led.set(rounds);
        if rounds.is_multiple_of(ROUNDS_TO_SET_ANEW) {
            self.set_anew();
        }
    }

    fn set_anew(&self) {
        self.telemetry.forget_exported();
        for state in self.pools.borrow().values() {
            state.metrics.forget_exported();
        }
    }

    /// Whether this VM leads.
    pub fn leads(&self) -> bool {
        self.leads.get()
    }
}
