//! Owns the pools of one configuration, and the choice of the pool that a request belongs to.

use std::cell::Cell;
use std::rc::Rc;

use routing::config::Config;

use super::PoolRuntime;
use super::Vm;
use crate::host;

/// Property of a route's metadata that names its pool.
const IN_METADATA: [&str; 5] = [
    "xds",
    "route_metadata",
    "filter_metadata",
    "pd_router",
    "pool",
];
/// Property of a route's own name.
const ROUTE_NAME: [&str; 2] = ["xds", "route_name"];

/// The pools of one configuration.
pub struct Pools {
    /// State shared with the pools of other configurations.
    pub vm: Rc<Vm>,
    /// The configuration of the pools.
    pub config: Rc<Config>,
    runtimes: Vec<Rc<PoolRuntime>>,
    is_alive: Cell<bool>,
}

impl Pools {
    /// The pools of a checked configuration, for the root with that id.
    pub fn new(root: u32, config: Config) -> Self {
        let vm = Vm::this();
        let config = Rc::new(config);
        let runtime = |pool| Rc::new(PoolRuntime::new(root, &config, pool, &vm));
        let runtimes = config.pools.iter().map(runtime).collect();
        Self {
            vm,
            config,
            runtimes,
            is_alive: Cell::new(false),
        }
    }

    /// Activates the root at a tick or a request: its configuration is not only on trial. Routers that follow another
    /// configuration, as before an update, or after one that was taken back, follow this one now.
    pub fn activate(&self) {
        if !self.is_alive.replace(true) {
            self.vm.register(&self.runtimes);
        }
        for runtime in &self.runtimes {
            runtime.follow();
        }
    }

    /// The runtimes of all pools.
    pub fn all(&self) -> &[Rc<PoolRuntime>] {
        &self.runtimes
    }

    /// The runtime of the pool with that name.
    pub fn named(&self, name: &[u8]) -> Option<&Rc<PoolRuntime>> {
        let is_named = |runtime: &&Rc<PoolRuntime>| runtime.pool.name.as_bytes() == name;
        self.runtimes.iter().find(is_named)
    }

    /// The pool of the present stream's route: by the route's metadata, else by its name. A single pool takes every route.
    /// Per-route configuration of a Wasm filter does not exist, so the route names its pool in this way.
    pub fn of_route(&self) -> Option<&Rc<PoolRuntime>> {
        if let [only] = self.runtimes.as_slice() {
            return Some(only);
        }
        match host::property(&IN_METADATA).filter(|name| !name.is_empty()) {
            Some(name) => self.named(&name),
            None => self.named(&host::property(&ROUTE_NAME)?),
        }
    }
}
