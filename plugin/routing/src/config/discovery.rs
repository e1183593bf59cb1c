//! Owns the configuration of the sources of workers, and its checks.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::check::{require, value};
use super::listed::{
    MAX_WORKERS, check_length, check_port, check_ranks, check_role, check_workers, one,
};
use super::{ConfigError, ListedWorker, Pool, ProtocolName};
use crate::fleet::Role;
use crate::fleet::topology::Topology;

/// A source of workers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Discovery {
    /// The workers are listed in the configuration.
    Static(StaticDiscovery),
    /// A Dynamo frontend's `GET /health` is polled.
    Dynamo(DynamoDiscovery),
    /// A JSON list of workers is polled.
    Document(DocumentDiscovery),
    /// The workers are the hosts of Envoy's own clusters.
    EnvoyClusters(EnvoyClusters),
    /// The workers register themselves.
    Registration(RegistrationDiscovery),
}

/// Workers listed in the configuration.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct StaticDiscovery {
    /// The workers.
    #[cfg_attr(feature = "schema", schemars(length(max = MAX_WORKERS)))]
    pub workers: Vec<ListedWorker>,
}

/// Polls of a JSON list of workers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DocumentDiscovery {
    /// The proxy's cluster that serves the document.
    pub cluster: String,
    /// Addresses in that cluster, `ip:port`. One address is polled at a time, and the next one after a poll has failed.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub addresses: Vec<SocketAddr>,
    /// Path of the document.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = "^/")))]
    #[serde(default = "default_document_path")]
    pub path: String,
    /// Milliseconds between polls.
    #[cfg_attr(feature = "schema", schemars(range(min = 100)))]
    #[serde(default = "one_second")]
    pub interval_ms: u64,
    /// Timeout of one poll, in milliseconds; a poll without an answer by then has failed.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    #[serde(default = "one_second")]
    pub timeout_ms: u64,
    /// Milliseconds for which a fleet is kept while no poll gets a good answer, at least `interval_ms`; `null`: for ever.
    #[serde(default = "default_keep_stale")]
    pub keep_stale_ms: Option<u64>,
}

/// Polls of a Dynamo frontend for its instances.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DynamoDiscovery {
    /// Dynamo namespace → model name. Instances of other namespaces are ignored.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub models: BTreeMap<String, String>,
    /// Dynamo component → role. Instances of other components are ignored.
    #[serde(default = "default_roles")]
    pub roles: BTreeMap<String, Role>,
    /// Milliseconds between polls.
    #[cfg_attr(feature = "schema", schemars(range(min = 100)))]
    #[serde(default = "one_second")]
    pub interval_ms: u64,
    /// Timeout of one poll, in milliseconds; a poll without an answer by then has failed.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    #[serde(default = "one_second")]
    pub timeout_ms: u64,
    /// Milliseconds for which a fleet is kept while no poll gets a good answer, at least `interval_ms`; `null`: for ever.
    #[serde(default = "default_keep_stale")]
    pub keep_stale_ms: Option<u64>,
}

/// Polls of Envoy for the hosts of its clusters, and the attributes of these hosts.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct EnvoyClusters {
    /// The cluster whose one member is Envoy's own admin interface.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    #[serde(default = "default_admin_cluster")]
    pub cluster: String,
    /// Path and query of the poll; `&filter=REGEX` narrows the answer down to some clusters.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = "^/")))]
    #[serde(default = "default_clusters_path")]
    pub path: String,
    /// Cluster → attributes of its hosts. Hosts of other clusters are ignored.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub members: BTreeMap<String, MemberAttributes>,
    /// Milliseconds between polls.
    #[cfg_attr(feature = "schema", schemars(range(min = 100)))]
    #[serde(default = "one_second")]
    pub interval_ms: u64,
    /// Timeout of one poll, in milliseconds; a poll without an answer by then has failed.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    #[serde(default = "one_second")]
    pub timeout_ms: u64,
    /// Milliseconds for which a fleet is kept while no poll gets a good answer, at least `interval_ms`; `null`: for ever.
    #[serde(default = "default_keep_stale")]
    pub keep_stale_ms: Option<u64>,
}

/// Attributes of all hosts of one of Envoy's clusters: those that Envoy does not report.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct MemberAttributes {
    /// Role of the hosts.
    pub role: Role,
    /// Model that the hosts serve; absent: any.
    pub model: Option<String>,
    /// Namespace of the hosts. Workers of one namespace may exchange KV.
    #[serde(default)]
    pub namespace: String,
    /// Set of the hosts. Two sets of one role are ambiguous, and are not served until one is gone.
    #[serde(default)]
    pub set: String,
    /// Data-parallel ranks of each host, numbered from 0.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = super::listed::MAX_DP_SIZE), extend("x-unit" = "ranks")))]
    #[serde(default = "one")]
    pub dp_size: u32,
    /// `sglang` and `mooncake`: port of the hosts' bootstrap servers; absent: the pool's.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub bootstrap_port: Option<u16>,
    /// KV blocks that fit on one rank of each host; absent: what the engine reports (`engine_metrics`), else the pool's
    /// `kv_blocks`.
    pub kv_blocks: Option<u32>,
    /// Maximum tokens that one step of each host computes (vLLM's `max_num_batched_tokens`); absent: not known.
    pub batched_tokens: Option<u64>,
    /// Maximum tokens of a prompt and its answer together, on each host (vLLM's `max_model_len`, SGLang's context length);
    /// absent: the pool's `max_model_len`.
    #[cfg_attr(feature = "schema", schemars(range(min = 1), extend("x-unit" = "tokens")))]
    pub max_model_len: Option<u64>,
    /// LoRA adapters that all hosts have loaded, by the names that requests use for them.
    #[serde(default)]
    pub adapters: Vec<String>,
    /// Places of the hosts, and how far their KV may travel.
    pub topology: Option<Topology>,
}

/// Rules for workers that register themselves.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RegistrationDiscovery {
    /// Secret of the callers that may register and remove workers, sent as `authorization: Bearer TOKEN`. Visible ASCII
    /// characters. The secret is never written into a log or the status.
    pub token: Token,
    /// Milliseconds after which a worker that has not registered again is gone. A worker should register three times in that
    /// time.
    #[cfg_attr(feature = "schema", schemars(range(min = 1_000)))]
    #[serde(default = "default_lease")]
    pub lease_ms: u64,
    /// Workers that may be registered at once.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = MAX_WORKERS), extend("x-unit" = "workers")))]
    #[serde(default = "default_max_workers")]
    pub max_workers: usize,
}

/// A secret. Its value is never written out.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(
    feature = "schema",
    derive(schemars::JsonSchema),
    schemars(transparent, extend("writeOnly" = true))
)]
pub struct Token(String);

/// The error for a value that is not text does not show the value: a number may be the secret too.
impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let read = serde_json::Value::deserialize(from);
        match read {
            Ok(serde_json::Value::String(secret)) => Ok(Self(secret)),
            _ => Err(D::Error::custom("a token must be text, in quotes")),
        }
    }
}

impl Token {
    /// The secret, for a comparison.
    pub fn secret(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Token(…)")
    }
}

fn default_document_path() -> String {
    "/workers".to_owned()
}

/// Component names under which Dynamo's own workers register.
fn default_roles() -> BTreeMap<String, Role> {
    BTreeMap::from([
        ("prefill".to_owned(), Role::Prefill),
        ("backend".to_owned(), Role::Decode),
    ])
}

fn default_admin_cluster() -> String {
    "envoy_admin".to_owned()
}

fn default_clusters_path() -> String {
    "/clusters?format=json".to_owned()
}

/// Milliseconds between two polls, and for one.
fn one_second() -> u64 {
    1_000
}

/// Ten minutes: longer than a control plane needs to come back, shorter than an address takes to pass to another owner.
#[allow(
    clippy::unnecessary_wraps,
    reason = "none stands for ever, and can be configured"
)]
fn default_keep_stale() -> Option<u64> {
    Some(600_000)
}

/// Three heartbeats of five seconds.
fn default_lease() -> u64 {
    15_000
}

fn default_max_workers() -> usize {
    4_096
}

impl Discovery {
    /// The source's name, for status and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Static(_) => "static",
            Self::Dynamo(_) => "dynamo",
            Self::Document(_) => "document",
            Self::EnvoyClusters(_) => "envoy_clusters",
            Self::Registration(_) => "registration",
        }
    }

    /// Milliseconds for which a fleet is kept while its source gives no good answer; none: for ever, as for all sources that
    /// are not polled.
    pub fn keep_stale_ms(&self) -> Option<u64> {
        match self {
            Self::Dynamo(poll) => poll.keep_stale_ms,
            Self::Document(poll) => poll.keep_stale_ms,
            Self::EnvoyClusters(poll) => poll.keep_stale_ms,
            Self::Static(_) | Self::Registration(_) => None,
        }
    }

    /// `at` is the path of the field `discovery`.
    pub(super) fn check(&self, pool: &Pool, at: &str) -> Result<(), ConfigError> {
        let at = format!("{at}.{}", self.name());
        let polled = match self {
            Self::Static(list) => return list.check(pool, &at),
            Self::Registration(registration) => return registration.check(&at),
            Self::Dynamo(poll) => {
                poll.check(pool.protocol, &at)?;
                (poll.interval_ms, poll.timeout_ms)
            }
            Self::Document(poll) => {
                poll.check(&at)?;
                (poll.interval_ms, poll.timeout_ms)
            }
            Self::EnvoyClusters(poll) => {
                poll.check(pool.protocol, &at)?;
                (poll.interval_ms, poll.timeout_ms)
            }
        };
        check_polling(polled, self.keep_stale_ms(), &at)
    }
}

impl StaticDiscovery {
    fn check(&self, pool: &Pool, at: &str) -> Result<(), ConfigError> {
        check_workers(&self.workers, pool.protocol, &format!("{at}."))?;
        let is_outside = |worker: &ListedWorker| {
            let address = worker.address;
            address.is_some_and(|address| !pool.destinations.allow(address))
        };
        match self.workers.iter().position(is_outside) {
            Some(index) => Err(value(
                &format!("{at}.workers[{index}].address"),
                "lies in none of destinations.original_dst.networks",
            )),
            None => Ok(()),
        }
    }
}

impl DocumentDiscovery {
    fn check(&self, at: &str) -> Result<(), ConfigError> {
        require(
            !self.addresses.is_empty(),
            format_args!("{at}.addresses"),
            "must name at least one member of the cluster, as [\"10.0.0.1:80\"]",
        )?;
        check_path(&self.path, at)
    }
}

impl DynamoDiscovery {
    fn check(&self, protocol: ProtocolName, at: &str) -> Result<(), ConfigError> {
        require(
            !protocol.rules().reaches_workers,
            at,
            "Dynamo's workers are reached through its frontends: use protocol \"direct\"",
        )?;
        require(
            !self.models.is_empty(),
            format_args!("{at}.models"),
            "must map at least one Dynamo namespace to its model, as {\"dynamo\": \"my-model\"}",
        )
    }
}

impl EnvoyClusters {
    fn check(&self, protocol: ProtocolName, at: &str) -> Result<(), ConfigError> {
        require(
            protocol.rules().reaches_workers,
            at,
            "the hosts of direct mode's cluster are Dynamo's frontends, not its workers: use discovery.dynamo",
        )?;
        require(
            !self.cluster.is_empty(),
            format_args!("{at}.cluster"),
            "must name the cluster that leads to Envoy's admin interface",
        )?;
        check_path(&self.path, at)?;
        require(
            !self.members.is_empty(),
            format_args!("{at}.members"),
            "must say of at least one cluster what its hosts are, as {\"prefill\": {\"role\": \"prefill\"}}",
        )?;
        for (cluster, attributes) in &self.members {
            let at = format!("{at}.members.{cluster}");
            check_ranks(attributes.dp_size, &at)?;
            check_role(attributes.role, protocol, &at)?;
            check_port(attributes.bootstrap_port, &at)?;
            check_length(attributes.max_model_len, &at)?;
        }
        Ok(())
    }
}

impl RegistrationDiscovery {
    fn check(&self, at: &str) -> Result<(), ConfigError> {
        let secret = self.token.secret();
        require(
            !secret.is_empty() && secret.iter().all(u8::is_ascii_graphic),
            format_args!("{at}.token"),
            "must be visible ASCII characters without spaces, and at least one: it is sent in a header",
        )?;
        require(
            self.lease_ms >= 1_000,
            format_args!("{at}.lease_ms"),
            "must be at least 1000: a worker registers again several times in that time",
        )?;
        require(
            (1..=MAX_WORKERS).contains(&self.max_workers),
            format_args!("{at}.max_workers"),
            "must be from 1 to 16384",
        )
    }
}

fn check_path(path: &str, at: &str) -> Result<(), ConfigError> {
    match path.starts_with('/') {
        true => Ok(()),
        false => Err(value(&format!("{at}.path"), "must begin with a slash")),
    }
}

/// Checks the fields that all polled sources have: the interval, the timeout, and the time for which a fleet is kept.
fn check_polling(
    (interval_ms, timeout_ms): (u64, u64),
    keep_stale_ms: Option<u64>,
    at: &str,
) -> Result<(), ConfigError> {
    if interval_ms < 100 {
        return Err(value(&format!("{at}.interval_ms"), "must be at least 100"));
    }
    if timeout_ms == 0 {
        return Err(value(&format!("{at}.timeout_ms"), "must be at least 1"));
    }
    require(
        keep_stale_ms.is_none_or(|keep| keep >= interval_ms),
        format_args!("{at}.keep_stale_ms"),
        "must be at least interval_ms, or null for ever: one poll that fails is no reason to give a fleet up",
    )
}
