//! Owns how a prefill worker's bootstrap server becomes known where nobody told its port: the worker is asked.

use std::rc::Rc;
use std::time::Duration;

use hashbrown::HashMap;
use routing::fleet::{Worker, WorkerId};
use routing::handoff::sglang::bootstrap_port;

use crate::gateway::Gateway;
use crate::headers;
use crate::host::{self, Buffer, Map};

/// A worker that did not tell is asked again after this time.
const RETRY_NS: u64 = 1_000_000_000;

/// How long a worker may take to tell.
const PATIENCE: Duration = Duration::from_secs(1);

/// Questions under way, and those that must wait.
#[derive(Default)]
pub struct Asker {
    asked: HashMap<u32, WorkerId>,
    /// Workers that did not tell: when they are asked next, and only the first time is logged.
    again_ns: HashMap<WorkerId, u64>,
}

impl Asker {
    /// Asks the prefill workers whose binding is not built.
    pub fn tick(&mut self, gateway: &Gateway) {
        let unbound = gateway.router.borrow().unbound();
        self.again_ns
            .retain(|id, _| unbound.iter().any(|worker| worker.id == *id));
        let now = host::now_ns();
        for worker in unbound {
            let waits = self
                .again_ns
                .get(&worker.id)
                .is_some_and(|again| now < *again);
            if !waits && !self.asked.values().any(|id| *id == worker.id) {
                self.ask(gateway, &worker, now);
            }
        }
    }

    fn ask(&mut self, gateway: &Gateway, worker: &Worker, now: u64) {
        let cluster = gateway.router.borrow().pool().clusters.prefill.clone();
        let Some(destination) = worker.address.map(|address| address.to_string()) else {
            return;
        };
        let sent = vec![
            (":method", "GET"),
            (":path", "/get_server_info"),
            (":authority", destination.as_str()),
            (headers::DESTINATION, &destination),
        ];
        match host::call(&cluster, sent, None, PATIENCE) {
            Ok(token) => {
                self.asked.insert(token, worker.id);
            }
            Err(status) => self.failed(worker.id, now, &format!("the call failed: {status:?}")),
        }
    }

    /// Takes the answer to a question; false where the token is another call's.
    pub fn answered(&mut self, token: u32, has_headers: bool, gateway: &Rc<Gateway>) -> bool {
        let Some(id) = self.asked.remove(&token) else {
            return false;
        };
        let is_good =
            has_headers && host::header(Map::CallResponse, ":status").as_deref() == Some(b"200");
        let body = match is_good {
            true => host::buffer(Buffer::CallResponse).unwrap_or_default(),
            false => Vec::new(),
        };
        match bootstrap_port(&body) {
            Some(port) => gateway.bound(id, port),
            None => self.failed(id, host::now_ns(), "it did not tell its bootstrap port"),
        }
        true
    }

    fn failed(&mut self, id: WorkerId, now: u64, problem: &str) {
        if self
            .again_ns
            .insert(id, now.saturating_add(RETRY_NS))
            .is_none()
        {
            log::warn!(
                "prefill worker {id} cannot be handed requests yet, and is asked again: {problem}"
            );
        }
    }
}
