//! Owns the clusters: the source of each one's hosts, the current hosts, and the outcomes of their requests.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use serde_json::{Value, json};

use super::eds;
use super::names::{self, Name};

/// Interval at which a file of endpoints is checked.
pub const FILE_INTERVAL: Duration = Duration::from_millis(100);
/// Interval at which a name is resolved; `run` configures the same for Envoy.
pub const NAME_INTERVAL: Duration = Duration::from_millis(500);

/// Source of a cluster's hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterKind {
    /// A fixed list. A request goes to the host that it names, or nowhere.
    Static(Vec<SocketAddr>),
    /// A file, read again when it changes; requests as for static.
    Eds(PathBuf),
    /// A name's addresses, resolved periodically; requests as for static.
    Dns(Name),
    /// No hosts: a request names any one address.
    OriginalDst,
    /// The proxy itself: its own admin page.
    Admin,
}

/// A source's entry for one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedHost {
    /// Address.
    pub address: SocketAddr,
    /// The host's `eds_health_status` in `/clusters`.
    pub health: &'static str,
    /// The name from which the host was resolved.
    pub hostname: Option<String>,
}

impl ListedHost {
    /// An entry without a health report.
    pub fn healthy(address: SocketAddr) -> Self {
        Self {
            address,
            health: HEALTHY,
            hostname: None,
        }
    }
}

/// The health of a host without a health report.
pub const HEALTHY: &str = "HEALTHY";

/// One host of one cluster. Its counts live as long as it is in the cluster.
#[derive(Debug)]
pub struct ClusterHost {
    /// Its entry.
    pub listed: ListedHost,
    /// Outcomes of the requests to the host.
    pub counts: Arc<HostCounts>,
}

impl ClusterHost {
    /// Address of the host.
    pub fn address(&self) -> SocketAddr {
        self.listed.address
    }
}

/// Outcomes of requests, with Envoy's names and by its rules.
#[derive(Debug, Default)]
pub struct HostCounts {
    connect_fail: AtomicU64,
    connections: AtomicU64,
    error: AtomicU64,
    success: AtomicU64,
    timeout: AtomicU64,
    total: AtomicU64,
}

/// An event of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A connection is attempted.
    Connecting,
    /// The connection failed: the request has failed as well.
    ConnectFailed,
    /// A request is sent.
    Sent,
    /// The host answers with this status.
    Answered(u16),
    /// The connection broke before an answer.
    Reset,
    /// The answer took too long.
    TimedOut,
}

impl HostCounts {
    /// HostCounts the event.
    pub fn note(&self, event: Event) {
        let add = |count: &AtomicU64| {
            count.fetch_add(1, Ordering::Relaxed);
        };
        match event {
            Event::Connecting => add(&self.connections),
            Event::ConnectFailed => {
                add(&self.connect_fail);
                add(&self.error);
            }
            Event::Sent => add(&self.total),
            Event::Answered(500..) | Event::Reset => add(&self.error),
            Event::Answered(_) => add(&self.success),
            Event::TimedOut => add(&self.timeout),
        }
    }

    /// The counters as Envoy writes them: text, zero left out.
    fn to_json(&self) -> Value {
        let all = [
            ("cx_connect_fail", &self.connect_fail),
            ("cx_total", &self.connections),
            ("rq_error", &self.error),
            ("rq_success", &self.success),
            ("rq_timeout", &self.timeout),
            ("rq_total", &self.total),
        ];
        let counts = all.map(|(name, count)| match count.load(Ordering::Relaxed) {
            0 => json!({"name": name}),
            count => json!({"name": name, "value": count.to_string()}),
        });
        json!(counts)
    }
}

/// A cluster, shared by all threads.
#[derive(Debug)]
pub struct Cluster {
    kind: ClusterKind,
    members: RwLock<BTreeMap<SocketAddr, Arc<ClusterHost>>>,
}

impl Cluster {
    fn new(kind: ClusterKind, admin: SocketAddr) -> Self {
        let listed = match &kind {
            ClusterKind::Static(addresses) => addresses.clone(),
            ClusterKind::Admin => vec![admin],
            ClusterKind::Eds(_) | ClusterKind::Dns(_) | ClusterKind::OriginalDst => Vec::new(),
        };
        let cluster = Self {
            kind,
            members: RwLock::default(),
        };
        cluster.set(listed.into_iter().map(ListedHost::healthy));
        cluster
    }

    /// Hosts to which a request with this list of destinations may be sent, in order.
    pub fn chosen(&self, destinations: &str) -> Vec<Arc<ClusterHost>> {
        match self.kind {
            ClusterKind::Admin => self.read().values().cloned().collect(),
            // As in Envoy, a list of several matches no host there.
            ClusterKind::OriginalDst => {
                let one = destinations.trim().parse().ok();
                one.map(|address| self.met(address)).into_iter().collect()
            }
            ClusterKind::Static(_) | ClusterKind::Eds(_) | ClusterKind::Dns(_) => {
                let members = self.read();
                let named = destinations.split(',');
                let named = named.filter_map(|one| members.get(&one.trim().parse().ok()?));
                named.cloned().collect()
            }
        }
    }

    /// A host that is in the cluster because a request names it.
    fn met(&self, address: SocketAddr) -> Arc<ClusterHost> {
        if let Some(known) = self.read().get(&address) {
            return Arc::clone(known);
        }
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let member = members.entry(address).or_insert_with(|| {
            Arc::new(ClusterHost {
                listed: ListedHost::healthy(address),
                counts: Arc::default(),
            })
        });
        Arc::clone(member)
    }

    /// Replaces the hosts; those that stay keep their counts.
    fn set(&self, listed: impl IntoIterator<Item = ListedHost>) {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::take(&mut *members);
        for listed in listed {
            let known = before.get(&listed.address);
            let counts = known.map(|known| Arc::clone(&known.counts));
            let counts = counts.unwrap_or_default();
            members.insert(listed.address, Arc::new(ClusterHost { listed, counts }));
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<SocketAddr, Arc<ClusterHost>>> {
        self.members.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn to_json(&self, name: &str) -> Value {
        let members = self.read();
        let hosts: Vec<_> = members.values().map(|member| host(member)).collect();
        json!({"name": name, "observability_name": name, "host_statuses": hosts})
    }
}

fn host(member: &ClusterHost) -> Value {
    let ListedHost {
        address,
        health,
        hostname,
    } = &member.listed;
    let mut host = json!({
        "address": {"socket_address": {"address": address.ip(), "port_value": address.port()}},
        "stats": member.counts.to_json(),
        "health_status": {"eds_health_status": health},
        "weight": 1,
        "locality": {},
    });
    if let Some(hostname) = hostname {
        host["hostname"] = json!(hostname);
    }
    host
}

/// All clusters by name.
#[derive(Debug)]
pub struct Clusters(BTreeMap<String, Arc<Cluster>>);

/// Why a cluster's source fails.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A file of endpoints is invalid.
    #[error(transparent)]
    Eds(#[from] eds::EdsError),
    /// A name does not resolve.
    #[error(transparent)]
    Name(#[from] names::NameError),
}

impl Clusters {
    /// Clusters of these kinds; those from a file or a name have no hosts yet. The proxy's own page is at `admin`.
    pub fn new(kinds: BTreeMap<String, ClusterKind>, admin: SocketAddr) -> Self {
        let clusters = kinds.into_iter();
        let clusters = clusters.map(|(name, kind)| (name, Arc::new(Cluster::new(kind, admin))));
        Self(clusters.collect())
    }

    /// The cluster of this name.
    pub fn get(&self, name: &str) -> Option<&Arc<Cluster>> {
        self.0.get(name)
    }

    /// The answer to `/clusters?format=json`, in Envoy's shape.
    pub fn to_json(&self) -> Value {
        let clusters = self.0.iter();
        let statuses: Vec<_> = clusters
            .map(|(name, cluster)| cluster.to_json(name))
            .collect();
        json!({"cluster_statuses": statuses})
    }

    /// Queries every source once. A source that fails leaves its cluster unchanged.
    pub async fn refresh(&self) {
        for (name, cluster) in &self.0 {
            match &cluster.kind {
                ClusterKind::Eds(path) => look(name, cluster, &mut EdsFile::new(path.clone())),
                ClusterKind::Dns(wanted) => {
                    if let Err(error) = resolve(cluster, wanted).await {
                        warn_unchanged(name, &error.into());
                    }
                }
                ClusterKind::Static(_) | ClusterKind::OriginalDst | ClusterKind::Admin => {}
            }
        }
    }

    /// Keeps querying the sources, on this thread's `LocalSet`, for as long as that lives.
    pub fn follow(&self) {
        for (name, cluster) in &self.0 {
            let (name, cluster) = (name.clone(), Arc::clone(cluster));
            match cluster.kind.clone() {
                ClusterKind::Eds(path) => drop(tokio::task::spawn_local(async move {
                    let mut file = EdsFile::new(path);
                    loop {
                        look(&name, &cluster, &mut file);
                        tokio::time::sleep(FILE_INTERVAL).await;
                    }
                })),
                ClusterKind::Dns(wanted) => drop(tokio::task::spawn_local(async move {
                    loop {
                        tokio::time::sleep(NAME_INTERVAL).await;
                        // `refresh` warns of a failure at the start; a warning twice a second would be too many.
                        if let Err(error) = resolve(&cluster, &wanted).await {
                            tracing::debug!(cluster = name, %error, "the cluster stays as it is");
                        }
                    }
                })),
                ClusterKind::Static(_) | ClusterKind::OriginalDst | ClusterKind::Admin => {}
            }
        }
    }
}

/// A file of endpoints, and its last content.
struct EdsFile {
    path: PathBuf,
    seen: Vec<u8>,
}

impl EdsFile {
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            seen: Vec::new(),
        }
    }
}

fn look(name: &str, cluster: &Cluster, file: &mut EdsFile) {
    // Absent for a moment while another file replaces it: the next check finds that one.
    let Ok(text) = std::fs::read(&file.path) else {
        return;
    };
    if text == file.seen {
        return;
    }
    match eds::hosts(&text, name) {
        Ok(listed) => cluster.set(listed),
        Err(error) => warn_unchanged(name, &error.into()),
    }
    file.seen = text;
}

async fn resolve(cluster: &Cluster, wanted: &Name) -> Result<(), names::NameError> {
    let addresses = names::resolve(wanted).await?;
    cluster.set(addresses.into_iter().map(|address| ListedHost {
        hostname: Some(wanted.host.clone()),
        ..ListedHost::healthy(address)
    }));
    Ok(())
}

fn warn_unchanged(name: &str, error: &SourceError) {
    tracing::warn!(cluster = name, %error, "the cluster stays as it is");
}

impl fmt::Display for ClusterKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static(addresses) => {
                let texts: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
                out.write_str(&texts.join(","))
            }
            Self::Eds(path) => write!(out, "eds:{}", path.display()),
            Self::Dns(name) => write!(out, "dns:{}:{}", name.host, name.port),
            Self::OriginalDst => out.write_str("original_dst"),
            Self::Admin => out.write_str("admin"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn chosen(cluster: &Cluster, destinations: &str) -> Vec<SocketAddr> {
        let chosen = cluster.chosen(destinations);
        chosen.iter().map(|member| member.address()).collect()
    }

    #[test]
    fn who_is_chosen_depends_on_the_kind() {
        let list = "127.0.0.1:2, 127.0.0.1:9,127.0.0.1:1";
        let strict = Cluster::new(ClusterKind::Static(vec![at(1), at(2)]), at(7));
        assert_eq!(chosen(&strict, list), [at(2), at(1)]);
        assert_eq!(chosen(&strict, ""), []);
        let any = Cluster::new(ClusterKind::OriginalDst, at(7));
        assert_eq!(chosen(&any, list), []);
        assert_eq!(chosen(&any, "127.0.0.1:9"), [at(9)]);
        let own = Cluster::new(ClusterKind::Admin, at(7));
        assert_eq!(chosen(&own, ""), [at(7)]);
    }

    #[test]
    fn a_host_that_stays_keeps_its_counts_and_one_that_comes_back_does_not() {
        let cluster = Cluster::new(ClusterKind::Static(vec![at(1), at(2)]), at(7));
        for member in cluster.chosen("127.0.0.1:1,127.0.0.1:2") {
            member.counts.note(Event::Answered(200));
        }
        let successes = |cluster: &Cluster| -> Vec<Value> {
            let json = cluster.to_json("c");
            let hosts = json["host_statuses"].as_array().unwrap();
            hosts
                .iter()
                .map(|host| host["stats"][3]["value"].clone())
                .collect()
        };
        assert_eq!(successes(&cluster), ["1", "1"]);
        cluster.set([ListedHost::healthy(at(1))]);
        cluster.set([at(1), at(2)].map(ListedHost::healthy));
        assert_eq!(successes(&cluster), [json!("1"), Value::Null]);
    }

    /// Compares this host's page with a real Envoy 1.40's: the same shape, except for counters that this host lacks.
    #[test]
    fn a_host_is_told_of_as_envoy_does() {
        let sample = include_str!("../../../tests/fixtures/envoy-clusters.json");
        let sample: Value = serde_json::from_str(sample).unwrap();
        let clusters = sample["cluster_statuses"].as_array().unwrap();
        let decode = clusters.iter().find(|cluster| cluster["name"] == "decode");
        let mut theirs = decode.unwrap()["host_statuses"][1].clone();
        theirs["stats"]
            .as_array_mut()
            .unwrap()
            .retain(|stat| stat["type"] != "GAUGE");
        let health = theirs["health_status"].as_object_mut().unwrap();
        health.remove("failed_outlier_check");

        let cluster = Cluster::new(ClusterKind::Static(vec![at(9104)]), at(7));
        let member = cluster.chosen("127.0.0.1:9104").remove(0);
        for _ in 0..4 {
            member.counts.note(Event::Connecting);
            member.counts.note(Event::ConnectFailed);
        }
        assert_eq!(host(&member), theirs);
    }
}
