//! Owns the pool runtime: what the root and the streams of one configuration share of one pool.

use std::cell::{OnceCell, Ref, RefCell, RefMut};
use std::rc::Rc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::admission::Waiter;
use routing::budget::{Budget, Share};
use routing::config::{Config, Discovery, PolicyName, Pool};
use routing::fleet::{Incarnation, WorkerId};
use routing::route::fate::Fate;
use routing::route::{QueuedRequest, Refusal, Router};
use routing::session::{Due, Stage};

use super::Calls;
use super::RegistryView;
use super::Stream;
use super::Vm;
use super::{PoolState, Seen};
use crate::shared;
use crate::telemetry::{PoolTelemetry, Telemetry};

/// The requests that wait for a worker of one pool.
pub type WaitingRequests = HashMap<Waiter, Waits>;

/// A waiting request.
pub struct Waits {
    /// The request's stream.
    pub stream: Rc<Stream>,
    /// The parsed request, and its body.
    pub queued: QueuedRequest,
    /// When the request began to wait.
    pub since: Duration,
    /// The pool runtime that the request came to, possibly of an older configuration.
    pub runtime: Rc<PoolRuntime>,
}

/// What a pool runtime looks after in rounds.
#[derive(Default)]
struct Watched {
    /// Streams with deadlines, with workers that may leave, or with pending resets.
    streams: HashMap<u32, Rc<Stream>>,
    /// Workers of the fleet at the last check for departures.
    present: Vec<Incarnation>,
}

/// The part of the budget for bodies that is kept for further legs at most, of all pools: a half. The rest is for new requests.
const KEPT_PART: usize = 2;

/// One pool under one configuration of this VM.
pub struct PoolRuntime {
    /// The pool's configuration.
    pub pool: Pool,
    /// The root context that calls belong to.
    pub root_id: u32,
    /// The configuration that the pool is part of.
    pub config: Rc<Config>,
    /// State shared with other pools and other configurations.
    pub vm: Rc<Vm>,
    /// What is kept of the pool from one configuration to the next.
    pub(super) state: PoolState,
    /// Headers that may name a session, if a policy uses them.
    pub session_headers: Vec<String>,
    /// Tasks and calls of the root, waiting and under way.
    pub calls: RefCell<Calls>,
    /// Metrics that do not belong to one pool.
    pub telemetry: Rc<Telemetry>,
    /// The pool's metrics.
    pub metrics: Rc<PoolTelemetry>,
    /// Budget for buffered request bodies, in bytes.
    bodies: Budget,
    /// Budget for clean-up requests, whose clients have left, in bytes.
    cleanup_budget: Budget,
    /// Budget for replay buffers, of requests that may have to be routed again, in bytes.
    replay_budget: Budget,
    watched: RefCell<Watched>,
    /// A number that no other VM has; not set before the first request.
    number: OnceCell<u64>,
    /// The pool's registry, as this VM has seen it.
    pub registry_view: RefCell<RegistryView>,
}

impl PoolRuntime {
    /// A pool of a checked configuration. Takes over the state that an earlier configuration has left in this VM.
    pub fn new(root_id: u32, config: &Rc<Config>, pool: &Pool, vm: &Rc<Vm>) -> Self {
        let state = vm.adopt(pool, root_id);
        let bodies = config.limits.bodies_in_flight_bytes;
        let kept =
            |limit, held| Budget::of(limit, held).within(Budget::of(bodies / KEPT_PART, &vm.kept));
        Self {
            pool: pool.clone(),
            session_headers: session_headers(pool),
            root_id,
            calls: RefCell::default(),
            telemetry: Rc::clone(&vm.telemetry),
            metrics: Rc::clone(&state.metrics),
            bodies: Budget::of(bodies, &vm.bodies),
            cleanup_budget: kept(pool.cleanup.held_bytes, &state.cleanup_budget),
            replay_budget: kept(pool.decode.recovery_bytes, &state.replay_budget),
            watched: RefCell::default(),
            number: OnceCell::new(),
            state,
            registry_view: RefCell::default(),
            config: Rc::clone(config),
            vm: Rc::clone(vm),
        }
    }

    /// The pool's router. Not to be kept across a call that uses it too.
    pub fn router(&self) -> Ref<'_, Router> {
        self.state.router.borrow()
    }

    /// The pool's router, to be changed.
    pub fn router_mut(&self) -> RefMut<'_, Router> {
        self.state.router.borrow_mut()
    }

    /// Requests that wait for a worker.
    pub fn waiting(&self) -> RefMut<'_, WaitingRequests> {
        self.state.waiting.borrow_mut()
    }

    /// Notes that a request has come. The first one takes a unique number, which leaves a trace outside this VM.
    pub fn request_came(&self) {
        self.number.get_or_init(|| {
            let number = shared::unique_number();
            self.router_mut().own_rooms(number);
            number
        });
        self.know_somebody();
    }

    /// A new id for a request. Two VMs may draw the same random numbers, so the unique number is part of the id.
    pub fn new_id(&self) -> String {
        let mut router = self.router_mut();
        let first = router.random() ^ self.number.get().copied().unwrap_or_default();
        format!("{first:016x}{:016x}", router.random())
    }

    /// Adopts the published fleet if there is no fleet yet: another thread may have reported readiness already.
    pub fn know_somebody(&self) {
        let is_empty = self.router().fleet().workers().next().is_none();
        if is_empty {
            self.adopt_published();
        }
    }

    /// Whether this pool runtime acts for its pool, in place of those of other configurations.
    pub fn acts(&self) -> bool {
        self.vm.acts(self)
    }

    /// Makes the router follow this configuration, if this pool runtime acts for the pool and another one did before.
    pub fn follow(&self) {
        if self.state.seen.borrow().followed == self.root_id || !self.acts() {
            return;
        }
        // The published fleet may be one that the other configuration could not use.
        self.state.seen.replace(Seen::following(self.root_id));
        self.router_mut().reconfigure(self.pool.clone());
    }

    /// Adopts the published fleet if there is a newer one. Workers listed in the configuration are not published: a published
    /// fleet is an older configuration's.
    pub fn adopt_published(&self) {
        if matches!(self.pool.discovery, Discovery::Static(_)) {
            return;
        }
        let source = self.pool.discovery.name();
        let begun = self.vm.now();
        let read = {
            let seen = &mut self.state.seen.borrow_mut().fleet;
            shared::read_fleet(&self.pool.name, source, seen)
        };
        let Some(fleet) = read else {
            return;
        };
        let version = fleet.version();
        self.router_mut().adopt(fleet);
        let took = self.vm.now().saturating_sub(begun).as_micros();
        log::debug!(
            "pool {}: fleet {version} adopted in {took} us",
            self.pool.name
        );
    }

    /// Workers that have left the fleet, or are of another incarnation, since the last call.
    pub fn departed_workers(&self) -> Vec<WorkerId> {
        let router = self.router();
        let fleet = router.fleet();
        let present = &mut self.watched.borrow_mut().present;
        let now = || fleet.workers().map(|worker| worker.incarnation());
        if now().eq(present.iter().copied()) {
            return Vec::new();
        }
        let before = std::mem::replace(present, now().collect());
        let left = before.into_iter().filter(|life| !fleet.lives(life));
        left.map(|life| life.id).collect()
    }

    /// Applies the engine reports that the leading VM has published, if there are new ones.
    pub fn apply_reports(&self) {
        let read = {
            let seen = &mut self.state.seen.borrow_mut().reports;
            shared::read_reports(&self.pool.name, seen)
        };
        let Some((at, reports)) = read else {
            return;
        };
        let mut router = self.router_mut();
        router.apply_reports_at(at, &reports);
        for warning in router.take_warnings() {
            if self.vm.leads() {
                log::warn!("pool {}: {warning}", self.pool.name);
            }
        }
    }

    /// Handles a prefill worker's answer to a question; false if the answer is of no use.
    pub fn on_reply(&self, life: &Incarnation, answer: &[u8]) -> bool {
        self.router_mut().on_reply(life, answer)
    }

    /// Counts and lists a refusal.
    pub fn note_refusal(&self, ids: &str, refusal: &Refusal) {
        self.telemetry.refused(refusal.code());
        let refusals = &self.vm.refusals;
        let at = self.vm.clock.on_the_wall(self.now());
        refusals.add(at, &self.pool.name, ids, refusal);
    }

    /// Reports changes of state. All VMs see the same ones; the leading VM logs and counts them.
    pub fn tell_of_changes(&self) {
        let changes = self.router_mut().take_transitions();
        for change in changes.iter().filter(|_| self.vm.leads()) {
            log::info!(
                "pool {}: model {} in namespace \"{}\": {} -> {}",
                self.pool.name,
                change.key.model.as_deref().unwrap_or("(any)"),
                change.key.namespace,
                change.from.map_or("(new)", |state| state.name()),
                change.to.name(),
            );
            self.telemetry.transition(change.to);
        }
    }

    /// Queues a request that waits for a worker.
    pub fn wait(self: &Rc<Self>, queued: QueuedRequest, stream: &Rc<Stream>) {
        let waiter = queued.waiter;
        stream.set_stage(Stage::Waiting(waiter));
        let waits = Waits {
            stream: Rc::clone(stream),
            queued,
            since: self.now(),
            runtime: Rc::clone(self),
        };
        self.waiting().insert(waiter, waits);
    }

    /// Records how long a request has waited, whatever its outcome.
    pub fn has_waited(&self, since: Duration) {
        let time = self.now().saturating_sub(since);
        self.metrics.queued(time);
    }

    /// Removes a waiting request whose client has left.
    pub fn waits_no_more(&self, waiter: Waiter) {
        let waits = self.waiting().remove(&waiter);
        if let Some(waits) = waits {
            self.has_waited(waits.since);
        }
        self.router_mut().gives_up(waiter);
    }

    /// Advances the router's clock to `now`.
    pub fn advance(&self) {
        let now = self.tell_time();
        self.router_mut().advance(now);
    }

    /// Reads the clock, and keeps the reading.
    pub fn tell_time(&self) -> Duration {
        self.vm.clock.keep()
    }

    /// The time of this callback or, without a reading in it, of the last round: a tenth of a second ago at most.
    pub fn now(&self) -> Duration {
        self.vm.clock.last()
    }

    /// Watches a stream for deadlines, departed workers and pending resets.
    pub fn watch_over(&self, stream: &Rc<Stream>) {
        let stream = Rc::clone(stream);
        let streams = &mut self.watched.borrow_mut().streams;
        streams.insert(stream.id(), stream);
    }

    /// Stops watching a stream that has ended.
    pub fn watch_no_more(&self, stream: &Stream) {
        self.watched.borrow_mut().streams.remove(&stream.id());
    }

    /// Streams whose clients wait for one of these workers.
    pub fn waiting_for(&self, workers: &[WorkerId]) -> Vec<Rc<Stream>> {
        let open = &self.watched.borrow().streams;
        let found = open
            .values()
            .filter(|stream| stream.session().awaits(workers));
        found.cloned().collect()
    }

    /// What is due for the open streams in this round.
    pub fn due(&self) -> Vec<(Rc<Stream>, Due)> {
        let now = self.now();
        let open = &self.watched.borrow().streams;
        let due = open
            .values()
            .filter_map(|stream| Some((Rc::clone(stream), stream.session().round(now)?)));
        due.collect()
    }

    /// Whether another stream of the same worker has moved since `client` did.
    pub fn has_moved_since(&self, client: &Stream) -> bool {
        let open = &self.watched.borrow().streams;
        let mut others = open.values().filter(|other| other.id() != client.id());
        // Each stream has a session of its own, so that the two can be borrowed at once.
        others.any(|other| other.session().has_moved_since(&client.session()))
    }

    /// Logs and counts ejected workers.
    pub fn tell_of_health(&self) {
        let mut router = self.router_mut();
        for ejection in router.take_ejections() {
            log::warn!(
                "{} worker {} keeps failing: it is passed over for {} ms",
                ejection.worker.role.name(),
                ejection.worker.name,
                ejection.lasts.as_millis()
            );
            self.telemetry.ejection(ejection.worker.role);
        }
    }

    /// Counts hand-offs that will not be fetched, and logs odd ones.
    pub fn tell_of_handoffs(&self) {
        let mut router = self.router_mut();
        let lost = router.take_lost();
        let telemetry = &self.telemetry;
        telemetry.all_handed_off(Fate::Leaked, lost.handoffs, lost.blocks);
        for remark in router.take_remarks() {
            log::warn!("pool {}: {remark}", self.pool.name);
        }
    }

    /// Takes a share of the budget for buffered bodies; `None` if it is used up.
    pub fn hold_body(&self, bytes: usize) -> Option<Share> {
        self.bodies.take(bytes)
    }

    /// How many of `bytes` further bytes the budget for buffered bodies has no room for.
    pub fn lacks_for_bodies(&self, bytes: usize) -> usize {
        self.bodies.lacks(bytes)
    }

    /// The budget for replay buffers.
    pub fn replay_budget(&self) -> &Budget {
        &self.replay_budget
    }

    /// Takes a share of the budget for replay buffers; `None` if it is used up.
    pub fn hold_replay_buffer(&self, bytes: usize) -> Option<Share> {
        self.replay_budget.take(bytes)
    }

    /// Takes a share of the budget for clean-up requests; `None` if it is used up.
    pub fn hold_cleanup_request(&self, bytes: usize) -> Option<Share> {
        self.cleanup_budget.take(bytes)
    }
}

fn session_headers(pool: &Pool) -> Vec<String> {
    let selection = &pool.selection;
    let goes_by_session = [selection.prefill, selection.decode].contains(&PolicyName::Session);
    let names = selection.session.headers.iter().filter(|_| goes_by_session);
    names.map(|name| name.to_ascii_lowercase()).collect()
}
