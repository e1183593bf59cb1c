//! Owns the polling of a source of workers by the VM that leads.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use routing::config::{Discovery, DynamoDiscovery, Pool, Protocol};
use routing::discovery::{Belief, Believed, parse_document, parse_dynamo};
use routing::fleet::{Fleet, Worker};

use crate::gateway::Gateway;
use crate::headers;
use crate::host::{self, Buffer, Map};
use crate::recovery;
use crate::shared;

/// Polls a source while this VM leads.
pub struct Poller {
    pool: String,
    source: Source,
    cluster: String,
    addresses: Vec<SocketAddr>,
    path: String,
    interval_ms: u64,
    timeout: Duration,
    leading: Option<Leading>,
}

/// What is polled, and so how an answer is read.
enum Source {
    /// A Dynamo frontend's `/health`.
    Dynamo(DynamoDiscovery),
    /// A JSON list of workers, for this protocol.
    Document(Protocol),
}

impl Source {
    fn read(&self, body: &[u8]) -> Result<Vec<Worker>, String> {
        match self {
            Self::Dynamo(mapping) => parse_dynamo(body, mapping).map_err(|error| error.to_string()),
            Self::Document(protocol) => {
                parse_document(body, *protocol).map_err(|error| error.to_string())
            }
        }
    }
}

/// What only a leader keeps.
struct Leading {
    belief: Belief,
    call: Option<u32>,
    due_ns: u64,
    address: usize,
    failures: u32,
}

impl Poller {
    /// The poller of a pool; none where its workers are not polled for.
    pub fn new(pool: &Pool) -> Option<Self> {
        match &pool.discovery {
            Discovery::Static(_) | Discovery::EnvoyClusters(_) | Discovery::Registration(_) => None,
            Discovery::Dynamo(poll) => Some(Self {
                pool: pool.name.clone(),
                source: Source::Dynamo(poll.clone()),
                cluster: pool.clusters.decode.clone(),
                addresses: pool.frontends.clone(),
                path: "/health".to_owned(),
                interval_ms: poll.interval_ms,
                timeout: Duration::from_millis(poll.timeout_ms),
                leading: None,
            }),
            Discovery::Document(poll) => Some(Self {
                pool: pool.name.clone(),
                source: Source::Document(pool.protocol),
                cluster: poll.cluster.clone(),
                addresses: poll.addresses.clone(),
                path: poll.path.clone(),
                interval_ms: poll.interval_ms,
                timeout: Duration::from_millis(poll.timeout_ms),
                leading: None,
            }),
        }
    }

    /// Polls if this VM leads and a poll is due.
    pub fn tick(&mut self, gateway: &Gateway) {
        if !gateway.vm.leads() {
            self.leading = None;
            return;
        }
        let leading = self.leading.get_or_insert_with(|| Leading::over(gateway));
        let now = host::now_ns();
        if leading.call.is_some() || now < leading.due_ns {
            return;
        }
        leading.due_ns = now.saturating_add(self.interval_ms.saturating_mul(1_000_000));
        let Some(address) = self.addresses.iter().cycle().nth(leading.address) else {
            return;
        };
        let destination = address.to_string();
        let call = host::call(
            &self.cluster,
            vec![
                (":method", "GET"),
                (":path", self.path.as_str()),
                (":authority", &destination),
                (headers::DESTINATION, &destination),
            ],
            None,
            self.timeout,
        );
        match call {
            Ok(token) => leading.call = Some(token),
            Err(status) => leading.failed(
                &self.pool,
                &format!("the call failed: {status:?}"),
                self.addresses.len(),
            ),
        }
    }

    /// Takes the answer to a poll; false where the token is another call's.
    pub fn answered(&mut self, token: u32, has_headers: bool, gateway: &Rc<Gateway>) -> bool {
        let Some(leading) = self
            .leading
            .as_mut()
            .filter(|leading| leading.call == Some(token))
        else {
            return false;
        };
        leading.call = None;
        match read_answer(has_headers, &self.source) {
            Ok(workers) => {
                leading.failures = 0;
                if let Believed::Changed(workers) = leading.belief.hear(workers) {
                    let version = gateway.router.borrow().fleet().version().saturating_add(1);
                    let fleet = Fleet::new(version, workers);
                    log::info!(
                        "pool {}: fleet {version} has {} workers",
                        self.pool,
                        fleet.workers().count()
                    );
                    shared::publish_fleet(&self.pool, &fleet);
                    let left = gateway.adopt_published();
                    recovery::see_to_left(gateway, &left);
                }
            }
            Err(problem) => leading.failed(&self.pool, &problem, self.addresses.len()),
        }
        true
    }
}

impl Leading {
    /// A new leader goes on from what all have adopted.
    fn over(gateway: &Gateway) -> Self {
        let router = gateway.router.borrow();
        let known = router
            .fleet()
            .workers()
            .map(|worker| (**worker).clone())
            .collect();
        Self {
            belief: Belief::starting_from(known),
            call: None,
            due_ns: 0,
            address: 0,
            failures: 0,
        }
    }

    /// A poll failed: what is known stays, the next address is asked. Said once, not at every poll.
    fn failed(&mut self, pool: &str, problem: &str, addresses: usize) {
        self.failures = self.failures.saturating_add(1);
        self.address = self
            .address
            .wrapping_add(1)
            .checked_rem(addresses)
            .unwrap_or_default();
        if self.failures == 1 {
            log::warn!(
                "pool {pool}: the fleet stays as it is, since discovery got no answer: {problem}"
            );
        }
    }
}

fn read_answer(has_headers: bool, source: &Source) -> Result<Vec<Worker>, String> {
    if !has_headers {
        return Err("the answer broke off".to_owned());
    }
    let status = host::header(Map::CallResponse, ":status").unwrap_or_default();
    if status != b"200" {
        return Err(format!("status {}", String::from_utf8_lossy(&status)));
    }
    let body = host::buffer(Buffer::CallResponse).map_err(|error| error.to_string())?;
    source.read(&body)
}
