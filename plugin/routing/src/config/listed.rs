//! Owns the description of one worker in the configuration, in a polled document, and in a registration.

use std::net::SocketAddr;

use hashbrown::HashSet;
use serde::{Deserialize, Serialize};

use super::check::{require, value};
use super::{ConfigError, ProtocolName};
use crate::excerpt::is_line;
use crate::fleet::Role;
use crate::fleet::topology::Topology;
use crate::handoff::LegOrder;

/// One worker of a list. `docs/workers.schema.json` describes the same fields.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ListedWorker {
    /// Address, `ip:port`, as the proxy's cluster has it, not a host name. Required except with `direct`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<SocketAddr>,
    /// Role of the worker.
    pub role: Role,
    /// Model that the worker serves; absent: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Name of the worker in headers and logs, 1 to 256 bytes without control characters; absent: the worker's address, else
    /// its id.
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 256)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Instance id of the worker, an unsigned number of 64 bits; absent: derived from the address. Required with `direct`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// Namespace of the worker. Workers of one namespace may exchange KV.
    #[cfg_attr(feature = "schema", schemars(extend("default" = "")))]
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Data-parallel ranks of the worker, numbered from 0.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = MAX_DP_SIZE), extend("x-unit" = "ranks")))]
    #[serde(default = "one")]
    pub dp_size: u32,
    /// Set of the worker. Two sets of one role are ambiguous, and are not served until one is gone.
    #[cfg_attr(feature = "schema", schemars(extend("default" = "")))]
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub set: String,
    /// `sglang` and `mooncake`: port of the worker's bootstrap server; absent: the pool's.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
    /// Places of the worker, and how far its KV may travel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topology: Option<Topology>,
    /// KV blocks that fit on one rank of the worker (vLLM logs the number at start, SGLang the same in tokens); absent:
    /// what the engine reports (`engine_metrics`), else the pool's `kv_blocks`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_blocks: Option<u32>,
    /// Maximum tokens that one step of the worker computes (vLLM's `max_num_batched_tokens`); absent: not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batched_tokens: Option<u64>,
    /// Maximum tokens of a prompt and its answer together (vLLM's `max_model_len`, SGLang's context length); absent: the pool's
    /// `max_model_len`.
    #[cfg_attr(feature = "schema", schemars(range(min = 1), extend("x-unit" = "tokens")))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u64>,
    /// LoRA adapters that the worker has loaded, by the names that requests use for them. A request for an adapter is served by
    /// the workers of this model, preferably by those that have loaded the adapter.
    #[cfg_attr(
        feature = "schema",
        schemars(length(max = MAX_ADAPTERS), extend("default" = []))
    )]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<String>,
    /// Whether the worker drains: a draining worker gets no new requests, and finishes those that it has.
    #[serde(default)]
    pub draining: bool,
}

pub(super) fn one() -> u32 {
    1
}

/// Maximum ranks of one worker: each rank is a target of its own in every choice.
pub(super) const MAX_DP_SIZE: u32 = 1024;

/// Maximum workers of one pool: the list of workers is kept in one piece that all threads read.
pub(crate) const MAX_WORKERS: usize = 16_384;

/// Maximum ranks of all workers of a pool together: each rank is a target of its own in every choice, with memory of its own.
pub(crate) const MAX_RANKS: u64 = 65_536;

/// Maximum LoRA adapters of one worker, and maximum bytes of a name: of an adapter, a model, a namespace, a set.
const MAX_ADAPTERS: usize = 1_024;
const MAX_LABEL: usize = 1_024;

/// Maximum bytes of a worker's name, which goes into headers.
const MAX_NAME: usize = 256;

/// Checks a list of workers; `at` is the path of the object with the field `workers`, and ends with a dot.
pub(crate) fn check_workers(
    workers: &[ListedWorker],
    protocol: ProtocolName,
    at: &str,
) -> Result<(), ConfigError> {
    require(
        workers.len() <= MAX_WORKERS,
        format_args!("{at}workers"),
        "must list at most 16384 workers",
    )?;
    require(
        ranks(workers.iter().map(|worker| worker.dp_size)) <= MAX_RANKS,
        format_args!("{at}workers"),
        "must have at most 65536 data-parallel ranks together",
    )?;
    let (mut addresses, mut ids) = (HashSet::new(), HashSet::new());
    for (index, worker) in workers.iter().enumerate() {
        let at = format!("{at}workers[{index}]");
        worker.check(protocol, &at)?;
        let is_new = worker
            .address
            .is_none_or(|address| addresses.insert(address))
            && worker.id.is_none_or(|id| ids.insert(id));
        if !is_new {
            return Err(value(&at, "this worker (address or id) is listed twice"));
        }
    }
    Ok(())
}

/// Number of ranks that workers of these sizes have together.
pub(crate) fn ranks(sizes: impl Iterator<Item = u32>) -> u64 {
    sizes.map(u64::from).sum()
}

impl ListedWorker {
    fn check(&self, protocol: ProtocolName, at: &str) -> Result<(), ConfigError> {
        check_ranks(self.dp_size, at)?;
        if self.address.is_some_and(|address| address.port() == 0) {
            return Err(value(&format!("{at}.address"), NO_PORT));
        }
        check_port(self.bootstrap_port, at)?;
        check_length(self.max_model_len, at)?;
        let is_sound = |name: &String| {
            let is_short = (1..=MAX_NAME).contains(&name.len());
            is_short && is_line(name)
        };
        require(
            self.name.as_ref().is_none_or(is_sound),
            format_args!("{at}.name"),
            "must be from 1 to 256 bytes without control characters: it goes into headers and logs",
        )?;
        self.check_labels(at)?;
        match protocol.rules().reaches_workers {
            true if self.address.is_none() => Err(value(
                &format!("{at}.address"),
                "is required, as \"10.0.0.1:8000\" (an address, not a host name)",
            )),
            false if self.id.is_none() => Err(value(
                &format!("{at}.id"),
                "is required in direct mode: the worker's Dynamo instance id, a decimal number",
            )),
            _ => check_role(self.role, protocol, at),
        }
    }
}

impl ListedWorker {
    fn check_labels(&self, at: &str) -> Result<(), ConfigError> {
        require(
            self.adapters.len() <= MAX_ADAPTERS,
            format_args!("{at}.adapters"),
            "must be at most 1024 names",
        )?;
        let named = [
            ("model", self.model.as_ref()),
            ("namespace", Some(&self.namespace)),
            ("set", Some(&self.set)),
        ];
        let named = named
            .into_iter()
            .filter_map(|(name, label)| Some((format!("{at}.{name}"), label?)));
        let adapters = self.adapters.iter().enumerate();
        let adapters = adapters.map(|(index, label)| (format!("{at}.adapters[{index}]"), label));
        for (path, label) in named.chain(adapters) {
            check_label(&path, label)?;
        }
        match &self.topology {
            Some(topology) => check_topology(topology, &format!("{at}.topology")),
            None => Ok(()),
        }
    }
}

fn check_topology(topology: &Topology, at: &str) -> Result<(), ConfigError> {
    let places = topology
        .domains
        .iter()
        .flat_map(|(name, place)| [name, place]);
    let places = places.map(|label| ("domains", label));
    let domain = topology.kv_transfer_domain.iter();
    let domain = domain.map(|label| ("kv_transfer_domain", label));
    let taints = topology.taints.iter().map(|label| ("taints", label));
    for (field, label) in places.chain(domain).chain(taints) {
        check_label(&format!("{at}.{field}"), label)?;
    }
    Ok(())
}

/// Checks a name that goes into logs and answers.
fn check_label(path: &str, label: &str) -> Result<(), ConfigError> {
    match (label.len() <= MAX_LABEL, is_line(label)) {
        (false, _) => Err(value(path, "must have at most 1024 bytes")),
        (_, false) => Err(value(
            path,
            "must not have control characters, or any that break or turn a line: it goes into logs and answers",
        )),
        (true, true) => Ok(()),
    }
}

pub(super) fn check_ranks(dp_size: u32, at: &str) -> Result<(), ConfigError> {
    match (1..=MAX_DP_SIZE).contains(&dp_size) {
        true => Ok(()),
        false => Err(value(&format!("{at}.dp_size"), "must be from 1 to 1024")),
    }
}

/// Error for port 0, on which no server listens.
pub(super) const NO_PORT: &str = "port 0 cannot be reached: it must be from 1 to 65535";

/// Checks the field `bootstrap_port` of the object at `at`.
pub(super) fn check_port(bootstrap_port: Option<u16>, at: &str) -> Result<(), ConfigError> {
    match bootstrap_port {
        Some(0) => Err(value(&format!("{at}.bootstrap_port"), NO_PORT)),
        _ => Ok(()),
    }
}

/// Checks the field `max_model_len` of the object at `at`.
pub(super) fn check_length(max_model_len: Option<u64>, at: &str) -> Result<(), ConfigError> {
    match max_model_len {
        Some(0) => Err(value(
            &format!("{at}.max_model_len"),
            "must be at least 1; leave it out where it is not known",
        )),
        _ => Ok(()),
    }
}

pub(super) fn check_role(role: Role, protocol: ProtocolName, at: &str) -> Result<(), ConfigError> {
    match protocol.rules().order {
        LegOrder::NoHandoff if role != Role::Aggregated => Err(value(
            &format!("{at}.role"),
            "protocol \"aggregated\" hands nothing over: its workers are of the role \"aggregated\"",
        )),
        _ => Ok(()),
    }
}
