//! Owns the Envoy-clusters source: the hosts of Envoy's own clusters, read from its admin interface.
//!
//! Anything that fills a cluster (DNS, EDS, a control plane) therefore serves as discovery, and Envoy's knowledge of a
//! host's health counts: its endpoint's health status, active checks, outlier detection, and the counters of its
//! connections.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use hashbrown::{HashMap, HashSet};
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64;

use super::outside::Outside;
use super::{Poll, PollAnswer, Source, SourceError, SourceUpdate, bounded};
use crate::config::{EnvoyClusters, MemberAttributes, Pool};
use crate::fleet::{Capacity, Condition, Worker, WorkerId};

/// Failures between two polls, without a success, that make a host unhealthy.
const MANY_FAILURES: u64 = 3;

/// Polls without a new failure that make an unhealthy host healthy again: it may simply get no requests.
const QUIET_POLLS: u32 = 3;

/// Envoy's admin interface, polled for its clusters.
#[derive(Debug)]
pub struct ClusterPoll {
    poll: Poll,
    members: Vec<(String, MemberAttributes)>,
    outside: Outside,
    records: HashMap<SocketAddr, Record>,
}

impl ClusterPoll {
    pub fn new(clusters: &EnvoyClusters, pool: &Pool) -> Self {
        let members = clusters.members.iter();
        Self {
            poll: Poll {
                cluster: clusters.cluster.clone(),
                destinations: Vec::new(),
                path: clusters.path.clone(),
                headers: Vec::new(),
                interval_ms: clusters.interval_ms,
                timeout_ms: clusters.timeout_ms,
            },
            members: members
                .map(|(cluster, attributes)| (cluster.clone(), attributes.clone()))
                .collect(),
            outside: Outside::new(&pool.destinations),
            records: HashMap::new(),
        }
    }

    fn workers(
        &mut self,
        listing: &AdminClusters<'_>,
    ) -> Result<(Vec<Worker>, Vec<String>), SourceError> {
        let mut before = std::mem::take(&mut self.records);
        let (mut workers, mut problems) = (Vec::new(), Vec::new());
        let mut seen = HashSet::new();
        let mut known = 0_usize;
        for (name, attributes) in &self.members {
            let mut of_name = listing.cluster_statuses.iter().filter(|c| c.name == *name);
            let Some(cluster) = of_name.next() else {
                problems.push(format!("Envoy has no cluster `{name}`"));
                continue;
            };
            known = known.saturating_add(1);
            // Envoy's order may change between answers.
            let addressed = cluster.host_statuses.iter();
            let mut hosts: Vec<(SocketAddr, &Host<'_>)> = addressed
                .filter_map(|host| Some((host.address.ip()?, host)))
                .collect();
            hosts.sort_by_key(|(address, _)| *address);
            for (address, host) in hosts {
                if !seen.insert(address) {
                    problems.push(format!(
                        "{address} is a host of `{name}` and of another cluster: it is one worker, as the other one has it"
                    ));
                    continue;
                }
                let mut record = before.remove(&address).unwrap_or_default();
                record.note(host.counts());
                let condition = host.condition(&record);
                self.records.insert(address, record);
                workers.push(worker(address, attributes, condition));
            }
        }
        match known {
            0 => Err(SourceError::NoneKnown),
            _ => Ok((workers, problems)),
        }
    }
}

impl Source for ClusterPoll {
    fn poll(&self) -> Option<Poll> {
        Some(self.poll.clone())
    }

    fn read_answer(&mut self, answer: &PollAnswer<'_>) -> Result<SourceUpdate, SourceError> {
        answer.check_length()?;
        if answer.status != 200 {
            return Err(SourceError::Status(answer.status));
        }
        let listing: AdminClusters<'_> =
            serde_json::from_slice(answer.body).map_err(SourceError::Clusters)?;
        let (workers, problems) = self.workers(&listing)?;
        let (workers, said) = self.outside.leave_out(bounded(workers)?, problems);
        Ok(SourceUpdate::Workers(workers, said))
    }
}

fn worker(address: SocketAddr, attributes: &MemberAttributes, condition: Condition) -> Worker {
    let id = WorkerId(xxh3_64(address.to_string().as_bytes()));
    Worker {
        model: attributes.model.clone(),
        namespace: attributes.namespace.clone(),
        dp_size: attributes.dp_size,
        set: attributes.set.clone(),
        bootstrap_port: attributes.bootstrap_port,
        topology: attributes.topology.clone(),
        capacity: Capacity {
            kv_blocks: attributes.kv_blocks,
            batched_tokens: attributes.batched_tokens,
            max_model_len: attributes.max_model_len,
        },
        adapters: attributes.adapters.clone(),
        condition,
        ..Worker::new(id, attributes.role, Some(address))
    }
}

/// Envoy's answer, as far as used (`envoy.admin.v3.Clusters`). Envoy omits fields that are 0 or false.
#[derive(Deserialize)]
struct AdminClusters<'a> {
    #[serde(borrow, default)]
    cluster_statuses: Vec<Cluster<'a>>,
}

#[derive(Deserialize)]
struct Cluster<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    host_statuses: Vec<Host<'a>>,
}

#[derive(Deserialize)]
struct Host<'a> {
    #[serde(borrow, default)]
    address: Address<'a>,
    #[serde(borrow, default)]
    stats: Vec<Stat<'a>>,
    #[serde(borrow, default)]
    health_status: Health<'a>,
}

/// An address; one that is no IP address (a pipe, a name) belongs to no worker.
#[derive(Deserialize, Default)]
struct Address<'a> {
    #[serde(borrow)]
    socket_address: Option<SocketAddress<'a>>,
}

#[derive(Deserialize)]
struct SocketAddress<'a> {
    #[serde(borrow, default)]
    address: Cow<'a, str>,
    #[serde(default)]
    port_value: u16,
}

#[derive(Deserialize)]
struct Stat<'a> {
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    /// Protobuf writes 64-bit numbers as strings.
    #[serde(borrow, default)]
    value: Option<Number<'a>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Number<'a> {
    Text(#[serde(borrow)] Cow<'a, str>),
    Number(u64),
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Health<'a> {
    #[serde(borrow)]
    eds_health_status: Cow<'a, str>,
    failed_active_health_check: bool,
    failed_outlier_check: bool,
    failed_active_degraded_check: bool,
    pending_dynamic_removal: bool,
    pending_active_hc: bool,
    excluded_via_immediate_hc_fail: bool,
    active_hc_timeout: bool,
}

impl Address<'_> {
    fn ip(&self) -> Option<SocketAddr> {
        let socket = self.socket_address.as_ref()?;
        let ip: IpAddr = socket.address.parse().ok()?;
        (socket.port_value != 0).then(|| SocketAddr::new(ip, socket.port_value))
    }
}

impl Stat<'_> {
    fn count(&self) -> u64 {
        match &self.value {
            Some(Number::Text(text)) => text.parse().unwrap_or(0),
            Some(Number::Number(number)) => *number,
            None => 0,
        }
    }
}

impl Host<'_> {
    fn condition(&self, record: &Record) -> Condition {
        let health = &self.health_status;
        // Envoy keeps a removed host while connections to it last.
        if health.eds_health_status == "DRAINING" || health.pending_dynamic_removal {
            return Condition::Draining;
        }
        let is_ill = matches!(
            health.eds_health_status.as_ref(),
            "UNHEALTHY" | "TIMEOUT" | "DEGRADED"
        ) || health.failed_active_health_check
            || health.failed_outlier_check
            || health.failed_active_degraded_check
            || health.pending_active_hc
            || health.excluded_via_immediate_hc_fail
            || health.active_hc_timeout;
        match is_ill || record.is_suspect {
            true => Condition::Unhealthy,
            false => Condition::Ready,
        }
    }

    fn counts(&self) -> Counts {
        let of = |name: &str| {
            let mut found = self.stats.iter().filter(|stat| stat.name == name);
            found.next().map_or(0, Stat::count)
        };
        Counts {
            failures: ["cx_connect_fail", "rq_error", "rq_timeout"].map(of),
            successes: of("rq_success"),
        }
    }
}

/// A host's counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    /// Connections refused, requests failed, requests timed out: one request may count twice.
    failures: [u64; 3],
    successes: u64,
}

/// A host's counters, poll by poll.
#[derive(Debug, Default)]
struct Record {
    last: Option<Counts>,
    is_suspect: bool,
    /// Polls in a row without a new failure.
    quiet: u32,
}

impl Record {
    /// Takes in the current counters. The first poll counts no growth, whatever the counters.
    fn note(&mut self, now: Counts) {
        let last = self.last.replace(now).unwrap_or(now);
        let grown = now.failures.iter().zip(last.failures);
        let failures = grown.map(|(now, last)| now.saturating_sub(last)).max();
        let failures = failures.unwrap_or(0);
        if now.successes > last.successes {
            *self = Self {
                last: self.last,
                ..Self::default()
            };
            return;
        }
        self.quiet = match failures {
            0 => self.quiet.saturating_add(1),
            _ => 0,
        };
        if failures >= MANY_FAILURES {
            self.is_suspect = true;
        } else if self.quiet >= QUIET_POLLS {
            self.is_suspect = false;
        }
    }
}

#[cfg(test)]
mod tests;
