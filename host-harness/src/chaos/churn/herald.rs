//! Owns the announcement of workers to the gateway, for each discovery source.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use hyper::Method;
use routing::fleet::Role;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::page::{PATH, Page};
use super::source::{self, Source};
use crate::chaos::fleet::FleetError;
use crate::chaos::http::Http;
use crate::host::clusters::Kind;
use crate::run::fleet::{MODEL, Members};

/// Lease of a registered worker.
const LEASE: Duration = Duration::from_secs(3);
/// Interval of re-registration: several times per lease.
const HEARTBEAT: Duration = Duration::from_millis(900);
/// Path at which workers register.
const REGISTER: &str = "/pd-router/workers?pool=chaos";
const TOKEN: &str = "only-for-chaos";

/// One worker, as a discovery source lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
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

impl Line {
    fn to_json(&self) -> Value {
        let mut line = json!({
            "id": self.id, "address": self.address, "role": self.role.name(), "model": MODEL,
            "name": format!("{}-{}", self.role.name(), self.id),
        });
        if let Some(port) = self.bootstrap {
            line["bootstrap_port"] = json!(port);
        }
        if self.draining {
            line["draining"] = json!(true);
        }
        line
    }
}

/// Announces the workers to the gateway.
pub struct DiscoveryPublisher {
    said: Vec<Line>,
    way: Way,
}

enum Way {
    Configuration,
    Document(Page),
    Files(TempDir),
    Registration(Box<Registry>),
}

/// The workers registered at the gateway.
struct Registry {
    http: Http,
    gateway: Option<SocketAddr>,
    registered: BTreeMap<u64, SocketAddr>,
    heartbeat: Instant,
}

impl DiscoveryPublisher {
    /// A publisher that has announced nothing yet.
    ///
    /// # Errors
    /// When a port or a folder is not available.
    pub async fn of(source: Source) -> std::io::Result<Self> {
        let way = match source {
            Source::Static => Way::Configuration,
            Source::Document | Source::DocumentOriginalDst => Way::Document(Page::start().await?),
            Source::EnvoyClusters => {
                let folder = tempfile::Builder::new().prefix("pd-harness-").tempdir()?;
                Way::Files(folder)
            }
            Source::Registration => Way::Registration(Box::new(Registry {
                http: Http::new(),
                gateway: None,
                registered: BTreeMap::new(),
                heartbeat: Instant::now(),
            })),
        };
        Ok(Self {
            said: Vec::new(),
            way,
        })
    }

    /// The pool's `discovery`, which contains these workers if the source is a static list.
    pub fn discovery(&self, workers: &[Line]) -> Value {
        match &self.way {
            Way::Configuration => {
                let workers: Vec<_> = workers.iter().map(Line::to_json).collect();
                json!({"static": {"workers": workers}})
            }
            Way::Document(page) => json!({"document": {
                "cluster": "discovery", "addresses": [page.address], "path": PATH,
                "interval_ms": source::interval_ms(), "timeout_ms": 1000,
            }}),
            Way::Files(_) => source::envoy_clusters(),
            Way::Registration(_) => {
                json!({"registration": {"token": TOKEN, "lease_ms": LEASE.as_millis()}})
            }
        }
    }

    /// Adds the source of the clusters' hosts to the proxy's configuration.
    pub fn add_to(&self, members: &mut Members) {
        if let Way::Files(folder) = &self.way {
            for role in [Role::Prefill, Role::Decode] {
                let file = folder.path().join(role.name());
                members.set(role.name(), Kind::Eds(file));
            }
        }
    }

    /// Sets the gateway at which workers register from now on.
    pub fn introduce_to(&mut self, gateway: SocketAddr) {
        if let Way::Registration(registry) = &mut self.way {
            registry.gateway = Some(gateway);
        }
    }

    /// Replaces the announced workers.
    ///
    /// # Errors
    /// When the gateway accepts no registration, or a file cannot be written.
    pub async fn say(&mut self, lines: Vec<Line>) -> Result<(), FleetError> {
        let is_news = lines != self.said;
        match &mut self.way {
            Way::Configuration => {}
            Way::Document(page) if is_news => {
                let workers: Vec<_> = lines.iter().map(Line::to_json).collect();
                page.say(json!({"workers": workers}).to_string());
            }
            Way::Files(folder) if is_news => {
                for role in [Role::Prefill, Role::Decode] {
                    write_endpoints(folder.path(), role, &lines)?;
                }
            }
            Way::Document(_) | Way::Files(_) => {}
            Way::Registration(registry) => registry.say(&lines, is_news).await?,
        }
        self.said = lines;
        Ok(())
    }
}

impl Registry {
    async fn say(&mut self, lines: &[Line], is_news: bool) -> Result<(), FleetError> {
        let Some(gateway) = self.gateway else {
            return Ok(());
        };
        if !is_news && self.heartbeat.elapsed() < HEARTBEAT {
            return Ok(());
        }
        let alive = || lines.iter().filter(|line| line.alive);
        let workers: Vec<_> = alive().map(Line::to_json).collect();
        let body = json!({"workers": workers});
        self.tell(Method::POST, gateway, &body).await?;
        self.heartbeat = Instant::now();
        // A dead worker cannot deregister: its lease runs out. If another worker has its address, the address counts as alive.
        let died = |id: &u64| lines.iter().any(|line| line.id == *id && !line.alive);
        self.registered.retain(|id, _| !died(id));
        let stays = |id: &u64| alive().any(|line| line.id == *id);
        let gone: Vec<u64> = self
            .registered
            .keys()
            .copied()
            .filter(|id| !stays(id))
            .collect();
        for id in gone {
            self.tell(Method::DELETE, gateway, &json!({"id": id}))
                .await?;
        }
        self.registered = alive().map(|line| (line.id, line.address)).collect();
        Ok(())
    }

    async fn tell(&self, method: Method, at: SocketAddr, body: &Value) -> Result<(), FleetError> {
        self.http
            .send_as(method, at, REGISTER, body, TOKEN)
            .await
            .map_err(FleetError::from)
    }
}

/// Replaces the file by a rename, the one change for which Envoy watches.
fn write_endpoints(folder: &Path, role: Role, lines: &[Line]) -> std::io::Result<()> {
    let of_role = lines.iter().filter(|line| line.role == role);
    let endpoints: Vec<_> = of_role
        .map(|line| {
            let Line {
                address, draining, ..
            } = line;
            let place = json!({"address": address.ip(), "port_value": address.port()});
            json!({
                "endpoint": {"address": {"socket_address": place}},
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
        let line = |id, draining| Line {
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
            &[line(1, false), line(2, true)],
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
