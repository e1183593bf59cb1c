//! Owns the bindings of prefill workers, without which none can be sent a request: the address of the bootstrap server and,
//! for Mooncake, the ids of the engines.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::Router;
use crate::config::{BootstrapSource, Protocol};
use crate::fleet::{Incarnation, Role, Worker, WorkerId};
use crate::handoff::bootstrap::Bootstrap;
use crate::handoff::mooncake::{self, EngineIds};
use crate::handoff::sglang;

/// Query interval for a prefill worker without a binding: until bound, the worker serves no request.
const UNTOLD_AGAIN: Duration = Duration::from_millis(250);

/// Query interval for a bound worker, since a restart at the same address would change the answer.
const TOLD_AGAIN: Duration = Duration::from_millis(500);

/// The same for SGLang, which queries all its schedulers before it answers.
const SGLANG_TOLD_AGAIN: Duration = Duration::from_secs(2);

/// The binding of a prefill worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Binding {
    pub(super) bootstrap: Bootstrap,
    /// Mooncake only.
    pub(super) engines: Option<EngineIds>,
}

impl Binding {
    /// Whether this binding may come from the same process as `before`.
    fn continues(&self, before: &Self) -> bool {
        let are_same = match (&self.engines, &before.engines) {
            (Some(now), Some(before)) => now.continue_those(before),
            (now, before) => now == before,
        };
        are_same && self.bootstrap == before.bootstrap
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
        if self.pool.protocol != Protocol::Sglang {
            return;
        }
        let prefills: Vec<Rc<Worker>> = self.fleet.of_role(Role::Prefill).cloned().collect();
        for worker in prefills {
            if let Some(bootstrap) = self.bootstrap_of(&worker) {
                let binding = Binding {
                    bootstrap,
                    engines: None,
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

    /// A worker's bootstrap server, if its port is known without a query.
    fn bootstrap_of(&self, worker: &Worker) -> Option<Bootstrap> {
        let common = match self.pool.bootstrap {
            BootstrapSource::Port(port) => Some(port),
            BootstrapSource::Ask => None,
        };
        let port = worker.bootstrap_port.or(common)?;
        Some(Bootstrap::beside(worker.address?, port))
    }

    /// The periodic queries to prefill workers.
    pub fn questions(&self) -> Vec<Question> {
        if !self.pool.protocol.needs_binding() {
            return Vec::new();
        }
        let prefills = self.fleet.of_role(Role::Prefill);
        prefills
            .filter_map(|worker| self.question(worker))
            .collect()
    }

    fn question(&self, worker: &Rc<Worker>) -> Option<Question> {
        let is_bound = self.bindings.contains_key(&worker.id);
        let address = worker.address?;
        let clusters = &self.pool.clusters;
        let (cluster, destination, path) = match self.pool.protocol {
            Protocol::Mooncake => {
                let port = self.bootstrap_of(worker)?.port();
                let server = SocketAddr::new(address.ip(), port);
                (&clusters.bootstrap, server, mooncake::QUERY)
            }
            _ if self.bootstrap_of(worker).is_some() => return None,
            _ => (&clusters.prefill, address, "/get_server_info"),
        };
        Some(Question {
            worker: Rc::clone(worker),
            cluster: cluster.clone(),
            destination,
            path,
            is_bound,
            again: match (is_bound, self.pool.protocol) {
                (false, _) => UNTOLD_AGAIN,
                (true, Protocol::Sglang) => SGLANG_TOLD_AGAIN,
                (true, _) => TOLD_AGAIN,
            },
        })
    }

    /// Removes the binding of a worker that may have restarted, if only the worker itself can supply it: until bound again,
    /// the worker is sent no request.
    pub(super) fn unbind(&mut self, id: WorkerId) {
        let worker = self.fleet.get(id);
        let is_reported = worker.is_some_and(|worker| match self.pool.protocol {
            Protocol::Mooncake => true,
            _ => self.bootstrap_of(worker).is_none(),
        });
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
        let binding = match self.pool.protocol {
            Protocol::Mooncake => self.mooncake(&worker, answer),
            _ => sglang::bootstrap_port(answer)
                .zip(worker.address)
                .map(|(port, address)| Binding {
                    bootstrap: Bootstrap::beside(address, port),
                    engines: None,
                }),
        };
        // The earlier binding stands: a server that does not answer need not have restarted.
        let Some(binding) = binding else {
            return false;
        };
        if self.bind(worker.id, binding) {
            self.recompute();
        }
        true
    }

    fn mooncake(&self, worker: &Worker, answer: &[u8]) -> Option<Binding> {
        Some(Binding {
            bootstrap: self.bootstrap_of(worker)?,
            engines: Some(EngineIds::parse(answer)?),
        })
    }
}
