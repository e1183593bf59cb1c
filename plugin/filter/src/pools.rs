//! Owns the pools of one configuration, and which of them a request belongs to.

use std::cell::Cell;
use std::rc::Rc;

use routing::config::Config;

use crate::gateway::PoolRuntime;
use crate::host;
use crate::vm::Vm;

/// Where a route's metadata names its pool.
const IN_METADATA: [&str; 5] = [
    "xds",
    "route_metadata",
    "filter_metadata",
    "pd_router",
    "pool",
];
/// Where a route's own name is.
const ROUTE_NAME: [&str; 2] = ["xds", "route_name"];

/// The pools of one configuration.
pub struct Pools {
    /// What they share with those of other configurations.
    pub vm: Rc<Vm>,
    /// As it was configured.
    pub config: Rc<Config>,
    gateways: Vec<Rc<PoolRuntime>>,
    is_alive: Cell<bool>,
}

impl Pools {
    /// The pools of a checked configuration, for the root of that number.
    pub fn new(root: u32, config: Config) -> Self {
        let vm = Vm::this();
        let config = Rc::new(config);
        let gateway = |pool| Rc::new(PoolRuntime::new(root, &config, pool, &vm));
        let gateways = config.pools.iter().map(gateway).collect();
        Self {
            vm,
            config,
            gateways,
            is_alive: Cell::new(false),
        }
    }

    /// The root has a tick, or a request: it is not on trial only. Where the routers follow another configuration, as before an
    /// update, or after one that was taken back, they follow this one now.
    pub fn come_alive(&self) {
        if !self.is_alive.replace(true) {
            self.vm.take_in(&self.gateways);
        }
        for gateway in &self.gateways {
            gateway.follow();
        }
    }

    /// All of them.
    pub fn all(&self) -> &[Rc<PoolRuntime>] {
        &self.gateways
    }

    /// The one of that name.
    pub fn named(&self, name: &[u8]) -> Option<&Rc<PoolRuntime>> {
        let is_named = |gateway: &&Rc<PoolRuntime>| gateway.pool.name.as_bytes() == name;
        self.gateways.iter().find(is_named)
    }

    /// The one that the present stream's route belongs to: as its metadata says, else its name. Where there is only one, that
    /// one. Per-route configuration of a Wasm filter does not exist, so the route has to say it in this way.
    pub fn of_route(&self) -> Option<&Rc<PoolRuntime>> {
        if let [only] = self.gateways.as_slice() {
            return Some(only);
        }
        match host::property(&IN_METADATA).filter(|name| !name.is_empty()) {
            Some(name) => self.named(&name),
            None => self.named(&host::property(&ROUTE_NAME)?),
        }
    }
}
