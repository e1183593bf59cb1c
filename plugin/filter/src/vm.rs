//! Owns what one VM keeps whatever it is configured with: the state of each pool, its part in leading, what is told to the
//! outside. A new configuration finds all of it here.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::config::Pool;
use routing::route::Router;

use crate::exchange::Exchange;
use crate::gateway::Waiting;
use crate::host;
use crate::pools::Pools;
use crate::shared::Lease;
use crate::telemetry::{Census, Telemetry};

thread_local! {
    /// The SDK makes each root context by itself, and hands nothing from one to the next: this is where they meet. A VM has
    /// one thread.
    static VM: RefCell<Option<Rc<Vm>>> = const { RefCell::new(None) };
}

/// What a VM keeps.
pub struct Vm {
    /// What is told to the outside.
    pub telemetry: Rc<Telemetry>,
    /// The root that was configured last. After an update the old one goes on until its streams have drained.
    newest: Cell<u32>,
    /// Whether this VM has had a request: the main thread's never has.
    serves: Cell<bool>,
    /// Whether this VM holds the lease: the one that polls, and whose log tells of changes that all see.
    leads: Cell<bool>,
    lease: RefCell<Lease>,
    exchange: RefCell<Exchange>,
    /// Bytes of request bodies buffered now.
    pub bodies: Rc<Cell<usize>>,
    pools: RefCell<HashMap<String, Kept>>,
}

/// What is kept of a pool from one configuration to the next.
#[derive(Clone)]
pub struct Kept {
    /// Who goes where.
    pub router: Rc<RefCell<Router>>,
    /// The requests that wait for a worker.
    pub waiting: Rc<RefCell<Waiting>>,
    /// The version of the published fleet that was last looked at.
    pub fleet_seen: Rc<Cell<u32>>,
    /// Bytes of requests whose clients have left, held for the leg that cleans up.
    pub estates: Rc<Cell<usize>>,
    /// Bytes of requests that may have to be placed again.
    pub spares: Rc<Cell<usize>>,
}

impl Vm {
    /// This VM. To be called when it is configured, or later.
    pub fn this() -> Rc<Self> {
        VM.with_borrow_mut(|vm| Rc::clone(vm.get_or_insert_with(|| Rc::new(Self::new()))))
    }

    fn new() -> Self {
        Self {
            telemetry: Rc::new(Telemetry::new()),
            newest: Cell::new(0),
            serves: Cell::new(false),
            leads: Cell::new(false),
            lease: RefCell::new(Lease::new()),
            exchange: RefCell::default(),
            bodies: Rc::default(),
            pools: RefCell::default(),
        }
    }

    /// A root has been configured: only the newest acts for the VM.
    pub fn configured(&self, root: u32, pools: &[Pool]) {
        self.newest.set(root);
        let is_there = |name: &String| pools.iter().any(|pool| pool.name == *name);
        self.pools.borrow_mut().retain(|name, _| is_there(name));
    }

    /// Whether this root was configured last.
    pub fn is_newest(&self, root: u32) -> bool {
        self.newest.get() == root
    }

    /// The state of a pool: as an earlier configuration has left it, or new.
    pub fn adopt(&self, pool: &Pool, root: u32) -> Kept {
        let mut pools = self.pools.borrow_mut();
        if let Some(kept) = pools.get(&pool.name) {
            kept.router.borrow_mut().reconfigure(pool.clone());
            // What is published may be what the old configuration could not use.
            kept.fleet_seen.set(0);
            return kept.clone();
        }
        let seed = host::now_ns() ^ u64::from(root).rotate_left(32);
        let kept = Kept {
            router: Rc::new(RefCell::new(Router::new(pool.clone(), seed, seed))),
            waiting: Rc::default(),
            fleet_seen: Rc::default(),
            estates: Rc::default(),
            spares: Rc::default(),
        };
        pools.insert(pool.name.clone(), kept.clone());
        kept
    }

    /// A request has come.
    pub fn request_came(&self) {
        self.serves.set(true);
    }

    /// Whether a request has ever come.
    pub fn serves(&self) -> bool {
        self.serves.get()
    }

    /// Takes part in deciding who leads. To be called at regular ticks.
    pub fn run_for_lead(&self) {
        let leads = self.lease.borrow_mut().tick(self.serves.get());
        self.leads.set(leads);
    }

    /// Tells the other VMs of what these pools have here, and hears what they have there. To be called at each tick.
    pub fn exchange(&self, pools: &Pools, begins_round: bool) {
        let mut exchange = self.exchange.borrow_mut();
        let heard = exchange.tick(pools.all(), &pools.config.sharing, begins_round);
        self.telemetry.lapped(exchange.lapped());
        if let Some(heard) = heard
            && self.leads()
        {
            self.telemetry.totals(&heard.totals, heard.vms);
        }
    }

    /// Hears the other VMs, where that was too long ago for a choice that is to be made `now`.
    pub fn refresh(&self, pools: &Pools, now: Duration) {
        let mut exchange = self.exchange.borrow_mut();
        exchange.refresh(pools.all(), &pools.config.sharing, now);
    }

    /// Tells the outside who is there, if this VM leads.
    pub fn tell_of_fleets(&self, pools: &Pools) {
        if !self.leads() {
            return;
        }
        let mut census = Census::default();
        for gateway in pools.all() {
            census.add(&gateway.router.borrow());
        }
        self.telemetry.census(census);
    }

    /// Whether this VM leads.
    pub fn leads(&self) -> bool {
        self.leads.get()
    }
}
