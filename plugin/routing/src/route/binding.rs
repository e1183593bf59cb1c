//! Owns the bindings of prefill workers, without which none can be sent a request: the address of the bootstrap server and,
//! for Mooncake, the ids of the engines.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use crate::config::{BootstrapSource, Pool};
use crate::fleet::{Fleet, Role, Worker, WorkerId};
use crate::handoff::binding::{Binder, Binding, Bootstrap, EngineIds, Learned, QueriedCluster};

/// Query interval for a prefill worker without a binding: until bound, the worker serves no request.
const UNBOUND_RENEWAL: Duration = Duration::from_millis(250);

/// Whether prefill workers must be queried for their bindings.
pub fn queries_workers(pool: &Pool) -> bool {
    match pool.engine().binder().map(Binder::learned) {
        None => false,
        Some(Learned::EngineIds) => true,
        Some(Learned::Port) => pool.bootstrap == BootstrapSource::Ask,
    }
}

/// A query for the binding of a prefill worker.
#[derive(Debug, Clone)]
pub struct Question {
    /// The queried worker.
    pub worker: Arc<Worker>,
    /// The proxy's cluster that the server is a member of.
    pub cluster: String,
    /// The server's address.
    pub destination: SocketAddr,
    /// The path to get.
    pub path: &'static str,
    /// Whether the worker is bound already.
    pub is_bound: bool,
    /// Time until the next query, whatever the answer is.
    pub again: Duration,
}

/// The bindings of prefill workers.
#[derive(Debug, Default)]
pub(super) struct Bindings(HashMap<WorkerId, Binding>);

impl Bindings {
    pub(super) fn get(&self, worker: WorkerId) -> Option<&Binding> {
        self.0.get(&worker)
    }

    /// Sets the binding of a worker.
    pub(super) fn set(&mut self, worker: WorkerId, binding: Binding) {
        self.0.insert(worker, binding);
    }

    /// Removes the binding of a worker, if only the worker itself can supply another one; returns whether there was one.
    pub(super) fn unbind(&mut self, worker: &Worker, pool: &Pool) -> bool {
        let binder = pool.engine().binder();
        let is_reported = binder.is_some_and(|binder| must_query(pool, binder, worker));
        is_reported && self.0.remove(&worker.id).is_some()
    }

    /// Forgets workers that left.
    pub(super) fn keep(&mut self, fleet: &Fleet) {
        self.0.retain(|id, _| fleet.contains(*id));
    }

    /// Forgets all bindings if prefill workers are bound in another way now.
    pub(super) fn reconfigure(&mut self, before: &Pool, pool: &Pool) {
        if before.protocol != pool.protocol || before.bootstrap != pool.bootstrap {
            self.0.clear();
        }
    }

    /// The periodic queries to prefill workers.
    pub(super) fn questions(&self, fleet: &Fleet, pool: &Pool) -> Vec<Question> {
        let Some(binder) = pool.engine().binder() else {
            return Vec::new();
        };
        let prefills = fleet.of_role(Role::Prefill);
        prefills
            .filter(|worker| must_query(pool, binder, worker))
            .filter_map(|worker| self.question(pool, binder, worker))
            .collect()
    }

    fn question(&self, pool: &Pool, binder: &dyn Binder, worker: &Arc<Worker>) -> Option<Question> {
        let is_bound = self.0.contains_key(&worker.id);
        let query = binder.query(worker.address?, known_port(pool, worker))?;
        let cluster = match binder.cluster() {
            QueriedCluster::Prefill => &pool.clusters.prefill,
            QueriedCluster::Bootstrap => &pool.clusters.bootstrap,
        };
        Some(Question {
            worker: Arc::clone(worker),
            cluster: cluster.clone(),
            destination: query.destination,
            path: query.path,
            is_bound,
            again: match is_bound {
                true => binder.renewal(),
                false => UNBOUND_RENEWAL,
            },
        })
    }
}

/// The bindings that need no query: the bootstrap server's port is configured, or comes from discovery.
pub(super) fn without_query(fleet: &Fleet, pool: &Pool) -> Vec<(WorkerId, Binding)> {
    let learned = pool.engine().binder().map(Binder::learned);
    if learned != Some(Learned::Port) {
        return Vec::new();
    }
    let known = fleet.of_role(Role::Prefill).filter_map(|worker| {
        let bootstrap = Bootstrap::beside(worker.address?, known_port(pool, worker)?);
        let engines = EngineIds::new();
        Some((worker.id, Binding { bootstrap, engines }))
    });
    known.collect()
}

/// The binding in a worker's answer to a query; none if the answer lacks it.
pub(super) fn read(worker: &Worker, answer: &[u8], pool: &Pool) -> Option<Binding> {
    let binder = pool.engine().binder()?;
    binder.read(worker.address?, known_port(pool, worker), answer)
}

/// The port of a worker's bootstrap server, if it is known without a query.
fn known_port(pool: &Pool, worker: &Worker) -> Option<u16> {
    let common = match pool.bootstrap {
        BootstrapSource::Port(port) => Some(port),
        BootstrapSource::Ask => None,
    };
    worker.bootstrap_port.or(common)
}

/// Whether only a query shows the binding of a worker.
fn must_query(pool: &Pool, binder: &dyn Binder, worker: &Worker) -> bool {
    match binder.learned() {
        Learned::EngineIds => true,
        Learned::Port => known_port(pool, worker).is_none(),
    }
}
