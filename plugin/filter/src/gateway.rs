//! Owns what one configured plugin in one VM shares between its root and its streams.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use routing::config::{Config, Pool};
use routing::fleet::Fleet;
use routing::route::Router;

use crate::prefill_call::Calls;
use crate::shared;
use crate::telemetry::Telemetry;

/// The state of a plugin in a VM.
pub struct Gateway {
    /// The root context that calls belong to.
    pub root_id: u32,
    /// As it was configured.
    pub config: Config,
    /// Who goes where.
    pub router: RefCell<Router>,
    /// Prefill calls, waiting and under way.
    pub calls: RefCell<Calls>,
    /// What is told to the outside.
    pub telemetry: Telemetry,
    /// Bytes of request bodies buffered now.
    bodies: Rc<Cell<usize>>,
    /// Whether this VM has had a request: the main thread's never has.
    serves: Cell<bool>,
    /// The version of the published fleet that was last looked at.
    fleet_seen: Cell<u32>,
}

impl Gateway {
    /// The state for a checked configuration.
    pub fn new(root_id: u32, config: Config, pool: Pool, seed: u64) -> Self {
        let router = Router::new(pool, seed);
        let telemetry = Telemetry::new();
        telemetry.fleet(router.fleet());
        Self {
            root_id,
            config,
            router: RefCell::new(router),
            calls: RefCell::default(),
            telemetry,
            bodies: Rc::default(),
            serves: Cell::new(false),
            fleet_seen: Cell::new(0),
        }
    }

    /// Whether this VM has had a request.
    pub fn serves(&self) -> bool {
        self.serves.get()
    }

    /// Notes that a request has come, and makes sure that a fleet is known if one has been published: another thread may
    /// have said already that the gateway is ready.
    pub fn request_came(&self) {
        self.serves.set(true);
        if self.router.borrow().fleet().workers().next().is_none() {
            self.adopt_published();
        }
    }

    /// Adopts the published fleet if there is a newer one.
    pub fn adopt_published(&self) {
        let pool = self.router.borrow().pool().name.clone();
        let Some(fleet) = shared::read_fleet(&pool, &self.fleet_seen) else {
            return;
        };
        self.adopt(fleet);
    }

    /// Adopts a fleet.
    pub fn adopt(&self, fleet: Fleet) {
        self.telemetry.fleet(&fleet);
        self.router.borrow_mut().adopt(fleet);
    }

    /// Tells the outside what is booked now. To be called after every change.
    pub fn report_load(&self) {
        self.telemetry.load(self.router.borrow().total_load());
    }

    /// Takes a share of the body budget; none when it is used up.
    pub fn hold_body(&self, bytes: usize) -> Option<HeldBody> {
        let total = self.bodies.get().checked_add(bytes)?;
        if total > self.config.limits.bodies_in_flight_bytes {
            return None;
        }
        self.bodies.set(total);
        Some(HeldBody {
            bodies: Rc::clone(&self.bodies),
            bytes,
        })
    }
}

/// A share of the body budget, given back when dropped.
pub struct HeldBody {
    bodies: Rc<Cell<usize>>,
    bytes: usize,
}

impl Drop for HeldBody {
    fn drop(&mut self) {
        self.bodies
            .set(self.bodies.get().saturating_sub(self.bytes));
    }
}
