//! Owns the fleet behind the gateway: the one in a configuration, or a simulated one.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use routing::config::{BootstrapSource, Config, Destinations, Discovery, Pool};
use routing::fleet::Role;
use routing::handoff::binding::{Binder, QueriedCluster};
use serde_json::json;

use super::bootstrap::Callers;
use super::proxy_options::{PoolRoute, ProxyOptions};
use crate::engine::{Engine, EngineConfig, EngineError};
use crate::host::clusters::ClusterKind;
use crate::host::routes::{Route, Routes};

/// The one model of simulated engines.
pub const MODEL: &str = "sim";

/// Number of simulated engines of each role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulationSize {
    prefill: usize,
    decode: usize,
}

impl Default for SimulationSize {
    fn default() -> Self {
        Self {
            prefill: 2,
            decode: 2,
        }
    }
}

impl fmt::Display for SimulationSize {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}x{}", self.prefill, self.decode)
    }
}

impl FromStr for SimulationSize {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (prefill, decode) = text.split_once('x')?;
            Some(Self {
                prefill: prefill.parse().ok()?,
                decode: decode.parse().ok()?,
            })
        };
        parse().ok_or("two numbers with an x between them, as 2x2")
    }
}

/// Simulated engines in this process.
pub struct Simulation {
    engines: Vec<(Role, Engine)>,
}

impl Simulation {
    /// Starts the engines on free ports of the loopback interface.
    ///
    /// # Errors
    /// When an engine cannot start.
    pub async fn start(size: SimulationSize, speedup: f64) -> Result<Self, EngineError> {
        let roles = std::iter::repeat_n(Role::Prefill, size.prefill)
            .chain(std::iter::repeat_n(Role::Decode, size.decode));
        let mut engines = Vec::new();
        for role in roles {
            let config = EngineConfig {
                model: MODEL.to_owned(),
                speedup,
                ..EngineConfig::new(role)
            };
            engines.push((role, Engine::start(config).await?));
        }
        Ok(Self { engines })
    }

    /// The plugin's configuration for these engines, with all diagnostics enabled.
    pub fn plugin_config(&self) -> Vec<u8> {
        let workers: Vec<_> = self
            .engines
            .iter()
            .map(|(role, engine)| json!({"address": engine.address, "role": role.name(), "model": MODEL}))
            .collect();
        json!({
            "pools": [{"name": "sim", "protocol": "nixl", "discovery": {"static": {"workers": workers}}}],
            "response_headers": true,
            "status": true,
        })
        .to_string()
        .into_bytes()
    }

    /// Ends the engines.
    pub async fn stop(self) {
        for (_, engine) in self.engines {
            engine.stop().await;
        }
    }
}

/// A member of one of the proxy's clusters, as written on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterMember {
    cluster: String,
    address: SocketAddr,
}

impl FromStr for ClusterMember {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (cluster, address) = text.split_once('=')?;
            Some(Self {
                cluster: cluster.to_owned(),
                address: address.parse().ok()?,
            })
        };
        parse().ok_or("a cluster and an address with = between them, as decode=127.0.0.1:9201")
    }
}

/// The proxy's view of the fleet in a plugin configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct Members {
    /// The proxy's clusters, with the source of each one's hosts.
    pub clusters: BTreeMap<String, ClusterKind>,
    /// Routes of the requests.
    pub routes: Routes,
    /// Workers with an address of their own.
    pub engines: Vec<(Role, SocketAddr)>,
    /// Dynamo frontends.
    pub frontends: Vec<SocketAddr>,
    /// A model for example requests, if the configuration names one.
    pub model: Option<String>,
    /// Whether callers may use routing overrides.
    pub callers: Callers,
    /// Whether the status page is served.
    pub status: bool,
}

impl Members {
    /// Reads the members from a configuration.
    pub fn of(config: &Config) -> Self {
        let mut members = Self {
            clusters: BTreeMap::new(),
            routes: Routes::default(),
            engines: Vec::new(),
            frontends: Vec::new(),
            model: None,
            callers: Callers::of(config),
            status: config.status,
        };
        if let Some(first) = config.pools.first() {
            members.routes = Routes::all(route_to(first));
        }
        for pool in &config.pools {
            members.add(pool);
        }
        members
    }

    /// Adds the command line's routes and clusters.
    ///
    /// # Errors
    /// When a route names a pool that does not exist, or an authority has two routes.
    pub fn add_proxy_options(
        &mut self,
        proxy_options: &ProxyOptions,
        config: &Config,
    ) -> Result<(), ProxyOptionsError> {
        for PoolRoute { authority, pool } in &proxy_options.routes {
            let named = config.pools.iter().find(|known| known.name == *pool);
            let route = match named {
                Some(pool) => route_to(pool),
                None if pool.is_empty() => Route {
                    pool: None,
                    ..self.routes.others().clone()
                },
                None => return Err(ProxyOptionsError::NoSuchPool(pool.clone())),
            };
            if !self.routes.add(authority, route) {
                return Err(ProxyOptionsError::TwoRoutes(authority.clone()));
            }
        }
        self.add_members(&proxy_options.members);
        for cluster in &proxy_options.clusters {
            let kind = cluster.kind(proxy_options.dns_server)?;
            self.set(&cluster.name, kind);
        }
        if let Some(name) = &proxy_options.admin_cluster {
            self.set(name, ClusterKind::Admin);
        }
        Ok(())
    }

    fn add(&mut self, pool: &Pool) {
        for cluster in [&pool.clusters.prefill, &pool.clusters.decode] {
            match pool.destinations {
                Destinations::Members => self.enlist(cluster, []),
                Destinations::OriginalDst(_) => self.set(cluster, ClusterKind::OriginalDst),
            }
        }
        self.frontends.extend(&pool.frontends);
        let mut engines = Vec::new();
        let mut model = None;
        match &pool.discovery {
            Discovery::Static(list) => {
                let addressed = list
                    .workers
                    .iter()
                    .filter_map(|worker| Some((worker.role, worker.address?)));
                engines.extend(addressed);
                model = list.workers.iter().find_map(|worker| worker.model.clone());
            }
            Discovery::Dynamo(poll) => model = poll.models.values().next().cloned(),
            Discovery::Document(poll) => self.enlist(&poll.cluster, poll.addresses.iter().copied()),
            Discovery::EnvoyClusters(poll) => {
                self.set(&poll.cluster, ClusterKind::Admin);
                let mut members = poll.members.iter();
                model = members.find_map(|(_, members)| members.model.clone());
                for cluster in poll.members.keys() {
                    self.enlist(cluster, []);
                }
            }
            // Workers are known only later.
            Discovery::Registration(_) => {}
        }
        self.model = self.model.take().or(model);
        self.engines.extend(&engines);
        if !pool.rules().reaches_workers {
            // Workers behind a frontend are not reached by the proxy itself.
            self.enlist(&pool.clusters.decode, pool.frontends.iter().copied());
            return;
        }
        for (role, address) in engines {
            let cluster = match role {
                Role::Prefill => &pool.clusters.prefill,
                Role::Decode | Role::Aggregated => &pool.clusters.decode,
            };
            self.enlist(cluster, [address]);
        }
        let queried = pool.engine().binder().map(Binder::cluster);
        if queried == Some(QueriedCluster::Bootstrap) {
            self.enlist(&pool.clusters.bootstrap, bootstrap_servers(pool));
        }
    }

    /// Adds members that the configuration does not name, for a source that discovers workers only later.
    pub fn add_members(&mut self, further: &[ClusterMember]) {
        for member in further {
            self.enlist(&member.cluster, [member.address]);
        }
    }

    /// Sets the source of the cluster's hosts, replacing any earlier one.
    pub fn set(&mut self, cluster: &str, kind: ClusterKind) {
        self.clusters.insert(cluster.to_owned(), kind);
    }

    /// Adds addresses to a cluster's static hosts; a repeated address is one host. A cluster with another source stays unchanged.
    pub fn enlist(&mut self, cluster: &str, addresses: impl IntoIterator<Item = SocketAddr>) {
        let none = || ClusterKind::Static(Vec::new());
        let kind = self.clusters.entry(cluster.to_owned()).or_insert_with(none);
        let ClusterKind::Static(hosts) = kind else {
            return;
        };
        for address in addresses {
            if !hosts.contains(&address) {
                hosts.push(address);
            }
        }
    }
}

/// Why the command line's routes or clusters are invalid.
#[derive(Debug, thiserror::Error)]
pub enum ProxyOptionsError {
    /// A route to an unknown pool.
    #[error("--route: the configuration has no pool {0:?}")]
    NoSuchPool(String),
    /// An authority with two routes.
    #[error("--route: {0} has two routes")]
    TwoRoutes(String),
    /// The working directory is unknown.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

fn route_to(pool: &Pool) -> Route {
    Route {
        cluster: pool.clusters.decode.clone(),
        pool: Some(pool.name.clone()),
    }
}

/// Bootstrap servers of the workers that a pool lists, each on its worker's host.
fn bootstrap_servers(pool: &Pool) -> Vec<SocketAddr> {
    let Discovery::Static(list) = &pool.discovery else {
        return Vec::new();
    };
    let common = match pool.bootstrap {
        BootstrapSource::Port(port) => Some(port),
        BootstrapSource::Ask => None,
    };
    let prefills = list
        .workers
        .iter()
        .filter(|worker| worker.role == Role::Prefill);
    prefills
        .filter_map(|worker| {
            let port = worker.bootstrap_port.or(common)?;
            Some(SocketAddr::new(worker.address?.ip(), port))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(document: serde_json::Value) -> Members {
        Members::of(&Config::parse(document.to_string().as_bytes()).unwrap())
    }

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn static_workers_are_sorted_into_clusters_by_role() {
        let members = members(
            json!({"pools": [{"name": "p", "protocol": "nixl", "discovery": {"static": {"workers": [
                {"address": "127.0.0.1:1", "role": "prefill", "model": "m"},
                {"address": "127.0.0.1:2", "role": "decode"},
                {"address": "127.0.0.1:3", "role": "aggregated"},
            ]}}}]}),
        );
        assert_eq!(members.routes.others().cluster, "decode");
        assert_eq!(
            members.clusters["prefill"],
            ClusterKind::Static(vec![at(1)])
        );
        assert_eq!(
            members.clusters["decode"],
            ClusterKind::Static(vec![at(2), at(3)])
        );
        assert_eq!(members.model.as_deref(), Some("m"));
    }

    #[test]
    fn mooncakes_bootstrap_servers_have_a_cluster_of_their_own() {
        let members = members(json!({"pools": [{"name": "p", "protocol": "mooncake",
            "bootstrap": {"port": 9},
            "discovery": {"static": {"workers": [
                {"address": "127.0.0.1:1", "role": "prefill"},
                {"address": "127.0.0.1:2", "role": "prefill", "bootstrap_port": 8},
                {"address": "127.0.0.1:3", "role": "decode"},
        ]}}}]}));
        assert_eq!(
            members.clusters["bootstrap"],
            ClusterKind::Static(vec![at(9), at(8)])
        );
        assert_eq!(members.clusters["decode"], ClusterKind::Static(vec![at(3)]));
    }

    #[test]
    fn named_clusters_keep_their_names_and_may_be_one() {
        let members = members(json!({"pools": [{"name": "p", "protocol": "nixl",
            "clusters": {"prefill": "workers", "decode": "workers"},
            "discovery": {"static": {"workers": [
                {"address": "127.0.0.1:1", "role": "prefill"},
                {"address": "127.0.0.1:2", "role": "decode"},
        ]}}}]}));
        assert_eq!(members.routes.others().cluster, "workers");
        assert_eq!(
            members.clusters,
            BTreeMap::from([(
                "workers".to_owned(),
                ClusterKind::Static(vec![at(1), at(2)])
            )])
        );
    }

    #[test]
    fn direct_mode_reaches_frontends_and_no_worker() {
        let members = members(
            json!({"pools": [{"name": "d", "protocol": "direct", "frontends": ["127.0.0.1:8000"],
            "discovery": {"dynamo": {"models": {"dynamo": "tiny"}}}}]}),
        );
        assert_eq!(
            members.clusters["decode"],
            ClusterKind::Static(vec![at(8000)])
        );
        assert_eq!(members.clusters["prefill"], ClusterKind::Static(vec![]));
        assert_eq!(members.frontends, [at(8000)]);
        assert_eq!(members.model.as_deref(), Some("tiny"));
    }

    #[test]
    fn a_document_brings_its_own_cluster_and_members_can_be_added() {
        let mut members = members(json!({"pools": [{"name": "p", "protocol": "nixl",
            "discovery": {"document": {"cluster": "roster", "addresses": ["127.0.0.1:7000"]}}}]}));
        members.add_members(&[
            "decode=127.0.0.1:2".parse().unwrap(),
            "decode=127.0.0.1:2".parse().unwrap(),
        ]);
        assert_eq!(
            members.clusters["roster"],
            ClusterKind::Static(vec![at(7000)])
        );
        assert_eq!(members.clusters["decode"], ClusterKind::Static(vec![at(2)]));
        assert!("decode".parse::<ClusterMember>().is_err());
    }

    #[test]
    fn each_pool_has_its_clusters_and_may_have_its_route() {
        let document = json!({"pools": [
            {"name": "one", "protocol": "nixl", "discovery": {"static": {"workers": [
                {"address": "127.0.0.1:1", "role": "prefill"}, {"address": "127.0.0.1:2", "role": "decode"}]}}},
            {"name": "two", "protocol": "nixl", "clusters": {"prefill": "p2", "decode": "d2"},
             "discovery": {"static": {"workers": [
                {"address": "127.0.0.1:3", "role": "prefill"}, {"address": "127.0.0.1:4", "role": "decode"}]}}},
        ]});
        let config = Config::parse(document.to_string().as_bytes()).unwrap();
        let mut members = Members::of(&config);
        assert_eq!(members.clusters["decode"], ClusterKind::Static(vec![at(2)]));
        assert_eq!(members.clusters["d2"], ClusterKind::Static(vec![at(4)]));
        assert_eq!(members.engines.len(), 4);
        let proxy_options = |routes: &[&str]| ProxyOptions {
            routes: routes.iter().map(|route| route.parse().unwrap()).collect(),
            clusters: vec!["d2=original_dst".parse().unwrap()],
            admin_cluster: Some("own".to_owned()),
            ..ProxyOptions::default()
        };
        members
            .add_proxy_options(&proxy_options(&["b.test=two", "c.test="]), &config)
            .unwrap();
        let route = |authority: &str| members.routes.of(authority.as_bytes());
        assert_eq!(route("a.test").pool.as_deref(), Some("one"));
        assert_eq!(route("b.test:80").cluster, "d2");
        assert_eq!(
            (&route("c.test").pool, &*route("c.test").cluster),
            (&None, "decode")
        );
        assert_eq!(members.clusters["d2"], ClusterKind::OriginalDst);
        assert_eq!(members.clusters["own"], ClusterKind::Admin);
        for wrong in [&["x=three"][..], &["x=one", "x=two"]] {
            assert!(
                Members::of(&config)
                    .add_proxy_options(&proxy_options(wrong), &config)
                    .is_err()
            );
        }
    }

    #[test]
    fn a_shape_is_two_numbers() {
        assert_eq!(
            "3x1".parse(),
            Ok(SimulationSize {
                prefill: 3,
                decode: 1
            })
        );
        assert!("3".parse::<SimulationSize>().is_err());
        assert!("3xx1".parse::<SimulationSize>().is_err());
        assert_eq!(SimulationSize::default().to_string(), "2x2");
    }
}
