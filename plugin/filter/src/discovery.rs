//! Owns the polling of a source of workers by the VM that leads.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use routing::config::{Discovery, DynamoDiscovery, Pool};
use routing::discovery::{Belief, Believed, parse_dynamo};
use routing::fleet::Fleet;

use crate::gateway::Gateway;
use crate::headers;
use crate::host::{self, Buffer, Map};
use crate::shared::{self, Lease};

/// How often every VM looks whether there is a newer fleet, and the leader whether a poll is due.
pub const TICK: Duration = Duration::from_millis(100);

/// Polls a Dynamo frontend while this VM leads.
pub struct Poller {
    pool: String,
    cluster: String,
    frontends: Vec<SocketAddr>,
    source: DynamoDiscovery,
    lease: Lease,
    leading: Option<Leading>,
}

/// What only a leader keeps.
struct Leading {
    belief: Belief,
    call: Option<u32>,
    due_ns: u64,
    frontend: usize,
    failures: u32,
}

impl Poller {
    /// The poller of a pool; none where its workers are not polled for.
    pub fn new(pool: &Pool) -> Option<Self> {
        let Discovery::Dynamo(source) = &pool.discovery else {
            return None;
        };
        Some(Self {
            pool: pool.name.clone(),
            cluster: pool.clusters.decode.clone(),
            frontends: pool.frontends.clone(),
            source: source.clone(),
            lease: Lease::new(),
            leading: None,
        })
    }

    /// Adopts what is published, and polls if this VM leads and a poll is due.
    pub fn tick(&mut self, gateway: &Gateway) {
        gateway.adopt_published();
        if !self.lease.tick(gateway.serves()) {
            self.leading = None;
            return;
        }
        let leading = self.leading.get_or_insert_with(|| Leading::over(gateway));
        let now = host::now_ns();
        if leading.call.is_some() || now < leading.due_ns {
            return;
        }
        leading.due_ns = now.saturating_add(self.source.interval_ms.saturating_mul(1_000_000));
        let Some(frontend) = self.frontends.iter().cycle().nth(leading.frontend) else {
            return;
        };
        let destination = frontend.to_string();
        let call = host::call(
            &self.cluster,
            vec![
                (":method", "GET"),
                (":path", "/health"),
                (":authority", &destination),
                (headers::DESTINATION, &destination),
            ],
            None,
            Duration::from_millis(self.source.timeout_ms),
        );
        match call {
            Ok(token) => leading.call = Some(token),
            Err(status) => leading.failed(
                &self.pool,
                &format!("the call failed: {status:?}"),
                self.frontends.len(),
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
                    gateway.adopt_published();
                }
            }
            Err(problem) => leading.failed(&self.pool, &problem, self.frontends.len()),
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
            frontend: 0,
            failures: 0,
        }
    }

    /// A poll failed: what is known stays, the next frontend is asked. Said once, not at every poll.
    fn failed(&mut self, pool: &str, problem: &str, frontends: usize) {
        self.failures = self.failures.saturating_add(1);
        self.frontend = self
            .frontend
            .wrapping_add(1)
            .checked_rem(frontends)
            .unwrap_or_default();
        if self.failures == 1 {
            log::warn!(
                "pool {pool}: the fleet stays as it is, since discovery got no answer: {problem}"
            );
        }
    }
}

fn read_answer(
    has_headers: bool,
    source: &DynamoDiscovery,
) -> Result<Vec<routing::fleet::Worker>, String> {
    if !has_headers {
        return Err("the answer broke off".to_owned());
    }
    let status = host::header(Map::CallResponse, ":status").unwrap_or_default();
    if status != b"200" {
        return Err(format!("status {}", String::from_utf8_lossy(&status)));
    }
    let body = host::buffer(Buffer::CallResponse).map_err(|error| error.to_string())?;
    parse_dynamo(&body, source).map_err(|error| error.to_string())
}
