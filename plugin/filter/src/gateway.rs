//! Owns what one configured plugin in one VM shares between its root and its streams.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::admission::Waiter;
use routing::config::{Config, PolicyName, Pool};
use routing::fleet::{Fleet, WorkerId};
use routing::request::Generation;
use routing::route::Router;

use crate::calls::Calls;
use crate::host;
use crate::shared;
use crate::stream::{Stage, Stream};
use crate::telemetry::Telemetry;

/// The state of a plugin in a VM.
pub struct Gateway {
    /// The root context that calls belong to.
    pub root_id: u32,
    /// As it was configured.
    pub config: Config,
    /// Who goes where.
    pub router: RefCell<Router>,
    /// The requests that wait for a worker, each with the kind that it is.
    pub waiting: RefCell<HashMap<Waiter, (Rc<Stream>, Generation)>>,
    /// The headers that may name a session, where a policy goes by it.
    pub session_headers: Vec<String>,
    /// Prefill calls, waiting and under way.
    pub calls: RefCell<Calls>,
    /// What is told to the outside.
    pub telemetry: Telemetry,
    /// Bytes of request bodies buffered now.
    bodies: Budget,
    /// Bytes of requests whose clients have left, held for the leg that cleans up.
    estates: Budget,
    /// Bytes of requests that may have to be placed again.
    spares: Budget,
    /// The streams whose answers may not take as long as they like.
    open: RefCell<HashMap<u32, Rc<Stream>>>,
    /// When the time was last told.
    now: Cell<Duration>,
    /// Whether this VM has had a request: the main thread's never has.
    serves: Cell<bool>,
    /// Whether this VM holds the lease: the one whose log tells of changes that all see.
    leads: Cell<bool>,
    /// The version of the published fleet that was last looked at.
    fleet_seen: Cell<u32>,
}

impl Gateway {
    /// The state for a checked configuration.
    pub fn new(root_id: u32, config: Config, pool: Pool, seed: u64) -> Self {
        let bodies = Budget::of(config.limits.bodies_in_flight_bytes);
        let estates = Budget::of(pool.cleanup.held_bytes);
        let spares = Budget::of(pool.decode.recovery_bytes);
        let gateway = Self {
            session_headers: session_headers(&pool),
            root_id,
            router: RefCell::new(Router::new(pool, seed, seed)),
            waiting: RefCell::default(),
            calls: RefCell::default(),
            telemetry: Telemetry::new(),
            bodies,
            estates,
            spares,
            open: RefCell::default(),
            now: Cell::default(),
            serves: Cell::new(false),
            leads: Cell::new(false),
            fleet_seen: Cell::new(0),
            config,
        };
        gateway.tell_of_fleet();
        gateway
    }

    /// Whether this VM has had a request.
    pub fn serves(&self) -> bool {
        self.serves.get()
    }

    /// Notes whether this VM leads.
    pub fn set_leading(&self, leads: bool) {
        self.leads.set(leads);
    }

    /// Notes that a request has come. With the first one, what leaves a trace outside this VM is done: it takes a number of
    /// its own. A fleet is adopted if there is none and one has been published: another thread may have said already that
    /// the gateway is ready.
    pub fn request_came(&self) {
        if !self.serves.replace(true) {
            self.router.borrow_mut().own_rooms(shared::unique_number());
        }
        let is_empty = self.router.borrow().fleet().workers().next().is_none();
        if is_empty {
            self.adopt_published();
        }
    }

    /// Adopts the published fleet if there is a newer one.
    pub fn adopt_published(&self) {
        let pool = self.router.borrow().pool().name.clone();
        if let Some(fleet) = shared::read_fleet(&pool, &self.fleet_seen) {
            self.adopt(fleet);
        }
    }

    /// Adopts a fleet.
    pub fn adopt(&self, fleet: Fleet) {
        self.router.borrow_mut().adopt(fleet);
        self.tell_of_fleet();
    }

    /// A prefill worker has answered what it was asked; false where that does not tell.
    pub fn told(&self, worker: WorkerId, answer: &[u8]) -> bool {
        let is_told = self.router.borrow_mut().told(worker, answer);
        self.tell_of_fleet();
        is_told
    }

    /// Tells the outside of the fleet and of the states that follow from it. Every VM sees the same changes; the one that
    /// leads logs and counts them.
    fn tell_of_fleet(&self) {
        let mut router = self.router.borrow_mut();
        let changes = router.take_transitions();
        self.telemetry.fleet(router.fleet());
        self.telemetry
            .places(router.places().map(|(_, place)| place.state));
        if !self.leads.get() {
            return;
        }
        for change in changes {
            log::info!(
                "model {} in namespace \"{}\": {} -> {}",
                change.place.model.as_deref().unwrap_or("(any)"),
                change.place.namespace,
                change.from.map_or("(new)", |state| state.name()),
                change.to.name(),
            );
            self.telemetry.transition(change.to);
        }
    }

    /// A request waits for a worker.
    pub fn wait(&self, waiter: Waiter, stream: &Rc<Stream>, generation: Generation) {
        stream.stage.set(Stage::Waiting(waiter));
        let waiting = (Rc::clone(stream), generation);
        self.waiting.borrow_mut().insert(waiter, waiting);
        self.report_load();
    }

    /// Its client has left.
    pub fn waits_no_more(&self, waiter: Waiter) {
        self.waiting.borrow_mut().remove(&waiter);
        self.router.borrow_mut().gives_up(waiter);
    }

    /// It is now: work under way has come further.
    pub fn advance(&self) {
        let now = self.tell_time();
        self.router.borrow_mut().advance(now);
    }

    /// Asks for the time, and remembers it.
    pub fn tell_time(&self) -> Duration {
        self.now.set(host::now());
        self.now.get()
    }

    /// The time as of this callback or, where it did not ask, of the last tick: a tenth of a second ago at most.
    pub fn now(&self) -> Duration {
        self.now.get()
    }

    /// Sees to it that this stream's answer does not take longer than it may.
    pub fn watch_over(&self, stream: &Rc<Stream>) {
        let stream = Rc::clone(stream);
        self.open.borrow_mut().insert(stream.id(), stream);
    }

    /// Its stream has ended.
    pub fn watch_no_more(&self, stream: &Stream) {
        self.open.borrow_mut().remove(&stream.id());
    }

    /// The streams whose workers are late, and those whose answers must end badly.
    pub fn late_or_doomed(&self) -> Vec<Rc<Stream>> {
        let now = self.now.get();
        let open = self.open.borrow();
        let found = open
            .values()
            .filter(|stream| stream.is_late(now) || stream.doom.borrow().is_some());
        found.cloned().collect()
    }

    /// Tells the outside of workers that were ejected.
    pub fn tell_of_health(&self) {
        let mut router = self.router.borrow_mut();
        for ejection in router.take_ejections() {
            log::warn!(
                "{} worker {} keeps failing: it is passed over for {} ms",
                ejection.worker.role.name(),
                ejection.worker.name,
                ejection.lasts.as_millis()
            );
            self.telemetry.ejection(ejection.worker.role);
        }
        self.telemetry.ejected(router.ejected());
    }

    /// Tells the outside what is booked now. To be called after every change.
    pub fn report_load(&self) {
        let router = self.router.borrow();
        self.telemetry.load(router.total_load(), router.waiting());
    }

    /// Takes a share of the budget for buffered bodies; none when it is used up.
    pub fn hold_body(&self, bytes: usize) -> Option<Share> {
        self.bodies.take(bytes)
    }

    /// Takes a share of the budget for requests that may have to be placed again; none when it is used up.
    pub fn hold_spare(&self, bytes: usize) -> Option<Share> {
        self.spares.take(bytes)
    }

    /// Takes a share of the budget for requests whose clients have left; none when it is used up.
    pub fn hold_estate(&self, bytes: usize) -> Option<Share> {
        self.estates.take(bytes)
    }
}

fn session_headers(pool: &Pool) -> Vec<String> {
    let selection = &pool.selection;
    let goes_by_session = [selection.prefill, selection.decode].contains(&PolicyName::Session);
    let names = selection.session.headers.iter().filter(|_| goes_by_session);
    names.map(|name| name.to_ascii_lowercase()).collect()
}

/// A number of bytes that may be held at once.
struct Budget {
    limit: usize,
    held: Rc<Cell<usize>>,
}

impl Budget {
    fn of(limit: usize) -> Self {
        Self {
            limit,
            held: Rc::default(),
        }
    }

    fn take(&self, bytes: usize) -> Option<Share> {
        let total = self.held.get().checked_add(bytes)?;
        if total > self.limit {
            return None;
        }
        self.held.set(total);
        Some(Share {
            held: Rc::clone(&self.held),
            bytes,
        })
    }
}

/// A share of a budget, given back when dropped.
pub struct Share {
    held: Rc<Cell<usize>>,
    bytes: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.held.set(self.held.get().saturating_sub(self.bytes));
    }
}
