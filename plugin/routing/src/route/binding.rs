//! Owns the bindings of prefill workers, without which none can be sent a request: the address of the bootstrap server and,
//! for Mooncake, the ids of the engines.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::Router;
use crate::config::{BootstrapSource, Pool};
use crate::fleet::{Incarnation, Role, Target, Worker, WorkerId};
use crate::handoff::binding::{Binder, Binding, Bootstrap, EngineIds, Learned, QueriedCluster};
use crate::handoff::{Handoff, Prefill};

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
    pub worker: Rc<Worker>,
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

impl Router {
    /// Binds workers that need no query: the bootstrap server's port is configured, or comes from discovery.
    pub(super) fn bind_what_is_known(&mut self) {
        let learned = self.pool.engine().binder().map(Binder::learned);
        if learned != Some(Learned::Port) {
            return;
        }
        let prefills: Vec<Rc<Worker>> = self.fleet.of_role(Role::Prefill).cloned().collect();
        for worker in prefills {
            if let Some((address, port)) = worker.address.zip(self.known_port(&worker)) {
                let binding = Binding {
                    bootstrap: Bootstrap::beside(address, port),
                    engines: EngineIds::new(),
                };
                self.bind(worker.id, binding);
            }
        }
    }

    /// Sets the binding of a worker; returns whether it is new. Another port or other engines than before belong to another
    /// process: everything learned of the worker is forgotten.
    fn bind(&mut self, id: WorkerId, binding: Binding) -> bool {
        let before = self.bindings.get(&id);
        let is_known = before.is_some_and(|before| *before == binding);
        if before.is_some_and(|before| !binding.continues(before)) {
            self.forget(&[id]);
            self.models_workers.clear();
            self.open_ranks();
        }
        self.bindings.insert(id, binding);
        !is_known
    }

    /// The port of a worker's bootstrap server, if it is known without a query.
    fn known_port(&self, worker: &Worker) -> Option<u16> {
        let common = match self.pool.bootstrap {
            BootstrapSource::Port(port) => Some(port),
            BootstrapSource::Ask => None,
        };
        worker.bootstrap_port.or(common)
    }

    /// Whether only a query shows the binding of a worker.
    fn must_query(&self, binder: &dyn Binder, worker: &Worker) -> bool {
        match binder.learned() {
            Learned::EngineIds => true,
            Learned::Port => self.known_port(worker).is_none(),
        }
    }

    /// The periodic queries to prefill workers.
    pub fn questions(&self) -> Vec<Question> {
        let Some(binder) = self.pool.engine().binder() else {
            return Vec::new();
        };
        let prefills = self.fleet.of_role(Role::Prefill);
        prefills
            .filter(|worker| self.must_query(binder, worker))
            .filter_map(|worker| self.question(binder, worker))
            .collect()
    }

    fn question(&self, binder: &dyn Binder, worker: &Rc<Worker>) -> Option<Question> {
        let is_bound = self.bindings.contains_key(&worker.id);
        let query = binder.query(worker.address?, self.known_port(worker))?;
        let clusters = &self.pool.clusters;
        let cluster = match binder.cluster() {
            QueriedCluster::Prefill => &clusters.prefill,
            QueriedCluster::Bootstrap => &clusters.bootstrap,
        };
        Some(Question {
            worker: Rc::clone(worker),
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

    /// Removes the binding of a worker that may have restarted, if only the worker itself can supply it: until bound again,
    /// the worker is sent no request.
    pub(super) fn unbind(&mut self, id: WorkerId) {
        let worker = self.fleet.get(id).zip(self.pool.engine().binder());
        let is_reported = worker.is_some_and(|(worker, binder)| self.must_query(binder, worker));
        if is_reported && self.bindings.remove(&id).is_some() {
            self.recompute();
        }
    }

    /// Takes a worker's answer to a query; false if the answer lacks the binding. The answer of an incarnation that has
    /// ended meanwhile is discarded.
    pub fn on_reply(&mut self, life: &Incarnation, answer: &[u8]) -> bool {
        let worker = self.fleet.get(life.id);
        let Some(worker) = worker
            .filter(|worker| worker.incarnation() == *life)
            .cloned()
        else {
            return true;
        };
        let binder = self.pool.engine().binder().zip(worker.address);
        let binding = binder
            .and_then(|(binder, address)| binder.read(address, self.known_port(&worker), answer));
        // The earlier binding stands: a server that does not answer need not have restarted.
        let Some(binding) = binding else {
            return false;
        };
        if self.bind(worker.id, binding) {
            self.recompute();
        }
        true
    }

    /// The hand-off of a request from another prefill worker. None if the worker lacks a needed binding.
    pub(super) fn renewed(
        &mut self,
        handoff: &dyn Handoff,
        prefill: &Target,
    ) -> Option<Box<dyn Handoff>> {
        let prefill = Prefill {
            target: prefill,
            binding: self.bindings.get(&prefill.worker.id),
        };
        handoff.renewed(&prefill, &mut self.rooms)
    }
}
