//! Owns a plugin configuration's requirements on the proxy's clusters: which must exist, for what purpose, and with which
//! members.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use routing::config::{Config, Destinations, Discovery, Pool};
use routing::fleet::Role;
use routing::handoff::LegOrder;
use routing::handoff::binding::{Binder, QueriedCluster};

/// Requirements on one cluster, from all pools that name it.
#[derive(Debug, Default)]
pub struct ClusterRequirements {
    /// Purposes, to be read after "the pool … ".
    pub purposes: Vec<String>,
    /// How a host is picked.
    pub picking: Picking,
    /// Whether the cluster carries load: requests or prefill calls.
    pub is_loaded: bool,
    /// Whether some pool allows its requests no other worker than the picked one.
    pub is_strict: bool,
    /// Required members.
    pub members: BTreeSet<SocketAddr>,
}

/// How a host of a cluster is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Picking {
    /// Not at all: the cluster has one host.
    #[default]
    OnlyHost,
    /// By the filter, among the members.
    Member,
    /// By the filter, among all addresses.
    AnyAddress,
}

/// All clusters that a configuration names.
#[derive(Debug, Default)]
pub struct WantedClusters<'a> {
    /// Requirements by cluster name.
    pub clusters: BTreeMap<&'a str, ClusterRequirements>,
    requests: BTreeSet<&'a str>,
}

impl<'a> WantedClusters<'a> {
    /// Reads the requirements from a configuration.
    pub fn of(config: &'a Config) -> Self {
        let mut wanted = Self::default();
        for pool in &config.pools {
            wanted.add(pool);
        }
        wanted
    }

    /// The clusters that carry clients' requests.
    pub fn requests(&self) -> BTreeSet<&'a str> {
        self.requests.clone()
    }

    fn add(&mut self, pool: &'a Pool) {
        self.requests.insert(&pool.clusters.decode);
        let picking = match pool.destinations {
            Destinations::Members => Picking::Member,
            Destinations::OriginalDst(_) => Picking::AnyAddress,
        };
        let decode = self.enter(&pool.clusters.decode, pool, "sends requests to it", picking);
        decode.is_loaded = true;
        decode.is_strict |= pool.rules().order != LegOrder::NoHandoff;
        decode.members.extend(&pool.frontends);
        if pool.rules().order.is_ours() {
            let prefill = self.enter(
                &pool.clusters.prefill,
                pool,
                "calls prefill workers in it",
                picking,
            );
            prefill.is_loaded = true;
            prefill.is_strict = true;
        }
        let queried = pool.engine().binder().map(Binder::cluster);
        if queried == Some(QueriedCluster::Bootstrap) {
            let name = &pool.clusters.bootstrap;
            self.enter(name, pool, "asks bootstrap servers in it", Picking::Member);
        }
        self.add_source(pool);
    }

    fn add_source(&mut self, pool: &'a Pool) {
        match &pool.discovery {
            Discovery::Static(list) => {
                let addressed = list.workers.iter();
                for (role, address) in
                    addressed.filter_map(|worker| Some((worker.role, worker.address?)))
                {
                    self.add_worker(pool, role, address);
                }
            }
            Discovery::Document(poll) => {
                let cluster = self.enter(
                    &poll.cluster,
                    pool,
                    "asks for its workers there",
                    Picking::Member,
                );
                cluster.members.extend(&poll.addresses);
            }
            Discovery::EnvoyClusters(poll) => {
                self.enter(
                    &poll.cluster,
                    pool,
                    "asks Envoy's admin interface through it",
                    Picking::OnlyHost,
                );
                for name in poll.members.keys() {
                    self.enter(name, pool, "has its hosts for workers", Picking::OnlyHost);
                }
            }
            Discovery::Dynamo(_) | Discovery::Registration(_) => {}
        }
    }

    /// Requires a worker as a member if the filter itself, not a component behind it, sends to the worker.
    fn add_worker(&mut self, pool: &'a Pool, role: Role, address: SocketAddr) {
        let cluster = match role {
            _ if !pool.rules().reaches_workers => return,
            Role::Prefill => pool.clusters.prefill.as_str(),
            Role::Decode | Role::Aggregated => pool.clusters.decode.as_str(),
        };
        if let Some(cluster) = self.clusters.get_mut(cluster)
            && cluster.picking == Picking::Member
        {
            cluster.members.insert(address);
        }
    }

    fn enter(
        &mut self,
        name: &'a str,
        pool: &Pool,
        purpose: &str,
        picking: Picking,
    ) -> &mut ClusterRequirements {
        let entry = self.clusters.entry(name).or_default();
        entry
            .purposes
            .push(format!("the pool \"{}\" {purpose}", pool.name));
        if picking != Picking::OnlyHost {
            entry.picking = picking;
        }
        entry
    }
}
