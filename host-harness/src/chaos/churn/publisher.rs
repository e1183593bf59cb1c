//! Owns the announcement of workers to the gateway, for each discovery source.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use hyper::Method;
use pd_harness_common::page::{Page, Tag};
use routing::fleet::Role;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::source::{self, Source};
use crate::chaos::fleet::FleetError;
use crate::host::clusters::ClusterKind;
use crate::http;
use crate::run::fleet::{MODEL, Members};

/// Lease of a registered worker.
const LEASE: Duration = Duration::from_secs(3);
/// Interval of re-registration: several times per lease.
const HEARTBEAT: Duration = Duration::from_millis(900);
/// Path of the document of workers.
const DOCUMENT: &str = "/workers";
/// Path at which workers register.
const REGISTER: &str = "/pd-router/workers?pool=chaos";
const TOKEN: &str = "only-for-chaos";

/// One worker, as a discovery source lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerEntry {
    /// Unique over the whole run: no other worker has this id, before or after.
    pub id: u64,
    /// Prefill or decode.
    pub role: Role,
    /// Address of the engine.
    pub address: SocketAddr,
    /// Port of the bootstrap server.
    pub bootstrap: Option<u16>,
    /// Whether the worker is to get no new requests.
    pub draining: bool,
    /// Whether the worker can register itself.
    pub alive: bool,
}

impl WorkerEntry {
    fn to_json(&self) -> Value {
        let mut entry = json!({
            "id": self.id, "address": self.address, "role": self.role.name(), "model": MODEL,
            "name": format!("{}-{}", self.role.name(), self.id),
        });
        if let Some(port) = self.bootstrap {
            entry["bootstrap_port"] = json!(port);
        }
        if self.draining {
            entry["draining"] = json!(true);
        }
        entry
    }
}

/// Announces the workers to the gateway.
pub struct DiscoveryPublisher {
    published: Vec<WorkerEntry>,
    channel: Channel,
}

enum Channel {
    Configuration,
    Document(Page),
    Files(TempDir),
    Registration(Box<Registry>),
}

/// The workers registered at the gateway.
struct Registry {
    gateway: Option<SocketAddr>,
    registered: BTreeMap<u64, SocketAddr>,
    heartbeat: Instant,
}

impl DiscoveryPublisher {
    /// A publisher that has announced nothing yet.
    ///
    /// # Errors
    /// When a port or a folder is not available.
    pub fn of(source: Source) -> std::io::Result<Self> {
        let channel = match source {
            Source::Static => Channel::Configuration,
            Source::Document | Source::DocumentOriginalDst => {
                Channel::Document(Page::start(DOCUMENT, Tag::Some)?)
            }
            Source::EnvoyClusters => {
                let folder = tempfile::Builder::new().prefix("pd-harness-").tempdir()?;
                Channel::Files(folder)
            }
            Source::Registration => Channel::Registration(Box::new(Registry {
                gateway: None,
                registered: BTreeMap::new(),
                heartbeat: Instant::now(),
            })),
        };
        Ok(Self {
            published: Vec::new(),
            channel,
        })
    }

    /// The pool's `discovery`, which contains these workers if the source is a static list.
    pub fn discovery(&self, workers: &[WorkerEntry]) -> Value {
        match &self.channel {
            Channel::Configuration => {
                let workers: Vec<_> = workers.iter().map(WorkerEntry::to_json).collect();
                json!({"static": {"workers": workers}})
            }
            Channel::Document(page) => json!({"document": {
                "cluster": "discovery", "addresses": [page.address], "path": DOCUMENT,
                "interval_ms": source::interval_ms(), "timeout_ms": 1000,
            }}),
            Channel::Files(_) => source::envoy_clusters(),
            Channel::Registration(_) => {
                json!({"registration": {"token": TOKEN, "lease_ms": LEASE.as_millis()}})
            }
        }
    }

    /// Adds the source of the clusters' hosts to the proxy's configuration.
    pub fn add_to(&self, members: &mut Members) {
        if let Channel::Files(folder) = &self.channel {
            for role in [Role::Prefill, Role::Decode] {
                let file = folder.path().join(role.name());
                members.set(role.name(), ClusterKind::Eds(file));
            }
        }
    }

    /// Sets the gateway at which workers register from now on.
    pub fn set_gateway(&mut self, gateway: SocketAddr) {
        if let Channel::Registration(registry) = &mut self.channel {
            registry.gateway = Some(gateway);
        }
    }

    /// Replaces the announced workers.
    ///
    /// # Errors
    /// When the gateway accepts no registration, or a file cannot be written.
    pub async fn publish(&mut self, entries: Vec<WorkerEntry>) -> Result<(), FleetError> {
        let has_changed = entries != self.published;
        match &mut self.channel {
            Channel::Configuration => {}
            Channel::Document(page) if has_changed => {
                let workers: Vec<_> = entries.iter().map(WorkerEntry::to_json).collect();
                page.publish(json!({"workers": workers}).to_string());
            }
            Channel::Files(folder) if has_changed => {
                for role in [Role::Prefill, Role::Decode] {
                    write_endpoints(folder.path(), role, &entries)?;
                }
            }
            Channel::Document(_) | Channel::Files(_) => {}
            Channel::Registration(registry) => registry.register(&entries, has_changed).await?,
        }
        self.published = entries;
        Ok(())
    }
}

impl Registry {
    async fn register(
        &mut self,
        entries: &[WorkerEntry],
        has_changed: bool,
    ) -> Result<(), FleetError> {
        let Some(gateway) = self.gateway else {
            return Ok(());
        };
        if !has_changed && self.heartbeat.elapsed() < HEARTBEAT {
            return Ok(());
        }
        let alive = || entries.iter().filter(|entry| entry.alive);
        let workers: Vec<_> = alive().map(WorkerEntry::to_json).collect();
        let body = json!({"workers": workers});
        self.call(Method::POST, gateway, &body).await?;
        self.heartbeat = Instant::now();
        // A dead worker cannot deregister: its lease runs out. If another worker has its address, the address counts as alive.
        let died = |id: &u64| entries.iter().any(|entry| entry.id == *id && !entry.alive);
        self.registered.retain(|id, _| !died(id));
        let stays = |id: &u64| alive().any(|entry| entry.id == *id);
        let gone: Vec<u64> = self
            .registered
            .keys()
            .copied()
            .filter(|id| !stays(id))
            .collect();
        for id in gone {
            self.call(Method::DELETE, gateway, &json!({"id": id}))
                .await?;
        }
        self.registered = alive().map(|entry| (entry.id, entry.address)).collect();
        Ok(())
    }

    async fn call(&self, method: Method, at: SocketAddr, body: &Value) -> Result<(), FleetError> {
        http::send(method, at, REGISTER, body.to_string(), Some(TOKEN)).await?;
        Ok(())
    }
}

/// Replaces the file by a rename, the one change for which Envoy watches.
fn write_endpoints(folder: &Path, role: Role, entries: &[WorkerEntry]) -> std::io::Result<()> {
    let of_role = entries.iter().filter(|entry| entry.role == role);
    let endpoints: Vec<_> = of_role
        .map(|entry| {
            let WorkerEntry {
                address, draining, ..
            } = entry;
            let socket_address = json!({"address": address.ip(), "port_value": address.port()});
            json!({
                "endpoint": {"address": {"socket_address": socket_address}},
                "health_status": if *draining { "DRAINING" } else { "HEALTHY" },
            })
        })
        .collect();
    let assignment = json!({
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": role.name(),
        "endpoints": [{"lb_endpoints": endpoints}],
    });
    let next = folder.join("next");
    std::fs::write(&next, json!({"resources": [assignment]}).to_string())?;
    std::fs::rename(next, folder.join(role.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chaos::pool::POOL;

    #[test]
    fn workers_register_with_the_pool_that_there_is() {
        assert!(REGISTER.ends_with(POOL));
    }

    #[test]
    fn a_draining_host_is_marked_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let entry = |id, draining| WorkerEntry {
            id,
            role: Role::Decode,
            address: SocketAddr::from(([127, 0, 0, 1], id as u16)),
            bootstrap: None,
            draining,
            alive: true,
        };
        write_endpoints(
            folder.path(),
            Role::Decode,
            &[entry(1, false), entry(2, true)],
        )
        .unwrap();
        let file = std::fs::read_to_string(folder.path().join("decode")).unwrap();
        let file: Value = serde_json::from_str(&file).unwrap();
        let hosts = &file["resources"][0]["endpoints"][0]["lb_endpoints"];
        assert_eq!(hosts[0]["health_status"], "HEALTHY");
        assert_eq!(hosts[1]["health_status"], "DRAINING");
        assert_eq!(
            hosts[1]["endpoint"]["address"]["socket_address"]["port_value"],
            2
        );
    }
}
