//! Owns the plugin's configuration: one JSON document, its defaults, and what makes it wrong.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::Deserialize;

use crate::fleet::Role;
use crate::topology::Topology;

/// The whole configuration document. Unknown fields are refused by name.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The pools this filter routes to. Exactly one for now.
    pub pools: Vec<Pool>,
    /// Name the chosen workers in the response (`x-pd-router-prefill`, `x-pd-router-decode`). For demonstrations.
    #[serde(default)]
    pub response_headers: bool,
    /// Serve `GET /pd-router/status`, which shows the fleet and its load to whoever can reach the gateway.
    #[serde(default)]
    pub status: bool,
    /// What one thread's VM may hold at once.
    #[serde(default)]
    pub limits: Limits,
}

/// Bounds on what requests may make a VM hold.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Bytes of request bodies buffered at once, per worker thread; beyond it a request gets 503.
    pub bodies_in_flight_bytes: usize,
}

impl Default for Limits {
    /// 256 MiB: a quarter of the 1 GiB that Envoy allows a VM, since one body may be held twice while it is spliced.
    fn default() -> Self {
        Self {
            bodies_in_flight_bytes: 256 * 1024 * 1024,
        }
    }
}

/// A set of workers that serve together, and how requests reach them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// For people, logs and metrics.
    pub name: String,
    /// How the prefill worker's KV cache gets to the decode worker.
    pub protocol: Protocol,
    /// Where the workers are known from.
    pub discovery: Discovery,
    /// Direct mode only: the Dynamo frontends, `ip:port`, to which every request is sent.
    #[serde(default)]
    pub frontends: Vec<SocketAddr>,
    /// The proxy's clusters that hold the workers.
    #[serde(default)]
    pub clusters: Clusters,
    /// The policy that picks among workers, for each role.
    #[serde(default)]
    pub selection: Selection,
    /// Limits of the prefill leg.
    #[serde(default)]
    pub prefill: PrefillLeg,
    /// Limits of the decode leg.
    #[serde(default)]
    pub decode: DecodeLeg,
    /// Tokens in one KV block.
    #[serde(default = "default_block_tokens")]
    pub block_tokens: u32,
    /// Whether callers may steer: pin workers, ask who would be picked, demand taints. For gateways behind a gateway.
    #[serde(default)]
    pub trust_clients: bool,
    /// What happens to a request while there is no prefill worker; default: `aggregate`.
    #[serde(default)]
    pub on_prefill_absent: OnPrefillAbsent,
    /// What happens when a prefill worker has failed, in order.
    #[serde(default = "default_on_failure")]
    pub on_prefill_failure: Vec<OnPrefillFailure>,
    /// Shorthand: `on_prefill_absent` is `fail`, and `on_prefill_failure` never `decode_only`.
    #[serde(default)]
    pub enforce_disagg: bool,
    /// SGLang only: where a prefill worker's bootstrap server is.
    #[serde(default)]
    pub bootstrap: BootstrapSource,
    /// The leg that fetches KV blocks which a client has left behind.
    #[serde(default)]
    pub cleanup: CleanUp,
}

/// What happens to a request while there is no prefill worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnPrefillAbsent {
    /// A worker that can runs it whole; where none can, it fails.
    #[default]
    Aggregate,
    /// It fails with 503.
    Fail,
}

/// What happens when a prefill worker has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnPrefillFailure {
    /// Another prefill worker is called, as often as `prefill.attempts` allows.
    RetryOther,
    /// The request fails.
    Fail,
    /// The decode worker runs it whole. Refused where decode workers cannot.
    DecodeOnly,
}

/// Another worker first, then the error.
fn default_on_failure() -> Vec<OnPrefillFailure> {
    vec![OnPrefillFailure::RetryOther, OnPrefillFailure::Fail]
}

/// Where SGLang's bootstrap servers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BootstrapSource {
    /// On this port of every prefill worker that does not tell its own.
    Port(u16),
    /// Each prefill worker is asked, at `/get_server_info`, before it is handed a request.
    Ask,
}

impl Default for BootstrapSource {
    /// SGLang's default port.
    fn default() -> Self {
        Self::Port(8998)
    }
}

/// The leg that fetches KV blocks which a client has left behind, so that the prefill worker can free them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CleanUp {
    /// Milliseconds until the leg is given up; at most 120,000.
    pub timeout_ms: u32,
    /// Bytes of requests held for it, per worker thread; beyond it, and with 0 always, the blocks are counted as leaked.
    pub held_bytes: usize,
}

impl Default for CleanUp {
    /// Half of vLLM's lease of a minute or less; 64 MiB.
    fn default() -> Self {
        Self {
            timeout_ms: 30_000,
            held_bytes: 64 * 1024 * 1024,
        }
    }
}

/// vLLM's default block size.
fn default_block_tokens() -> u32 {
    16
}

/// The engines' protocols that this version speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// vLLM's `NixlConnector`: prefill first, its `kv_transfer_params` spliced into the decode request.
    Nixl,
    /// SGLang's bootstrap: both legs at once, with the same room.
    Sglang,
    /// NVIDIA Dynamo frontends in `--router-mode direct`: the choice is told by headers.
    Direct,
}

/// A source of workers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Discovery {
    /// The workers are listed here.
    Static(StaticDiscovery),
    /// A Dynamo frontend's `GET /health` is polled.
    Dynamo(DynamoDiscovery),
    /// A JSON list of workers is polled.
    Document(DocumentDiscovery),
}

/// Workers written down in the configuration.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StaticDiscovery {
    /// The workers.
    pub workers: Vec<ListedWorker>,
}

/// Where a list of workers is polled from.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DocumentDiscovery {
    /// The proxy's cluster that serves the document.
    pub cluster: String,
    /// The addresses in it that are asked, one after the other while the first ones fail.
    pub addresses: Vec<SocketAddr>,
    /// The document's path.
    #[serde(default = "default_document_path")]
    pub path: String,
    /// Milliseconds between polls.
    #[serde(default = "default_interval")]
    pub interval_ms: u64,
    /// Milliseconds after which a poll has failed.
    #[serde(default = "default_poll_timeout")]
    pub timeout_ms: u64,
}

fn default_document_path() -> String {
    "/workers".to_owned()
}

/// One worker of a list.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListedWorker {
    /// `ip:port` as the proxy's cluster has it. Required except in direct mode.
    pub address: Option<SocketAddr>,
    /// What it does.
    pub role: Role,
    /// The model it serves; absent: any.
    pub model: Option<String>,
    /// How it is called in headers and logs; default: its address, else its id.
    pub name: Option<String>,
    /// Its instance id; default: derived from the address. Required in direct mode.
    pub id: Option<u64>,
    /// Workers of one namespace may exchange KV.
    #[serde(default)]
    pub namespace: String,
    /// Data-parallel ranks, numbered from 0.
    #[serde(default = "one")]
    pub dp_size: u32,
    /// The set it belongs to: two sets of one role are not served until one is gone.
    #[serde(default)]
    pub set: String,
    /// SGLang only: the port of its bootstrap server.
    pub bootstrap_port: Option<u16>,
    /// Its place, and how far its KV may travel.
    pub topology: Option<Topology>,
}

fn one() -> u32 {
    1
}

/// Where and how a Dynamo frontend is asked for its instances.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamoDiscovery {
    /// Dynamo namespace → model name. Instances of other namespaces are ignored.
    pub models: BTreeMap<String, String>,
    /// Dynamo component → role. Instances of other components are ignored.
    #[serde(default = "default_roles")]
    pub roles: BTreeMap<String, Role>,
    /// Milliseconds between polls.
    #[serde(default = "default_interval")]
    pub interval_ms: u64,
    /// Milliseconds after which a poll has failed.
    #[serde(default = "default_poll_timeout")]
    pub timeout_ms: u64,
}

/// The names Dynamo's own workers register under.
fn default_roles() -> BTreeMap<String, Role> {
    BTreeMap::from([
        ("prefill".to_owned(), Role::Prefill),
        ("backend".to_owned(), Role::Decode),
    ])
}

fn default_interval() -> u64 {
    1_000
}

fn default_poll_timeout() -> u64 {
    1_000
}

/// Names of the proxy's clusters.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Clusters {
    /// Where prefill calls go.
    pub prefill: String,
    /// The route's cluster, also polled by discovery in direct mode.
    pub decode: String,
}

impl Default for Clusters {
    fn default() -> Self {
        Self {
            prefill: "prefill".to_owned(),
            decode: "decode".to_owned(),
        }
    }
}

/// Which policy picks, for each role.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Selection {
    /// Among prefill workers.
    pub prefill: PolicyName,
    /// Among decode workers, and among those that run whole requests.
    pub decode: PolicyName,
}

/// The policies there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// Everyone once per turn, in an order drawn anew each turn.
    #[default]
    RoundRobin,
    /// None is picked: the caller must name the worker.
    Direct,
}

/// Limits of the prefill leg.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrefillLeg {
    /// Milliseconds from the call to its complete answer.
    pub timeout_ms: u32,
    /// Workers tried in all before the request is refused.
    pub attempts: u32,
    /// Back-pressure: prompt tokens that may be booked on the eligible prefill workers together, beyond which a request is
    /// refused with 429; absent: no bound.
    pub max_queued_tokens: Option<u64>,
}

impl Default for PrefillLeg {
    /// Two minutes: a 128k-token prompt on a slow worker, with queueing. Two workers.
    fn default() -> Self {
        Self {
            timeout_ms: 120_000,
            attempts: 2,
            max_queued_tokens: None,
        }
    }
}

/// Limits of the decode leg.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DecodeLeg {
    /// Workers (in direct mode: frontends) tried in all when connections are refused.
    pub attempts: u32,
    /// Whether decode workers can run whole requests, prefill included.
    pub runs_whole_requests: bool,
}

impl Default for DecodeLeg {
    fn default() -> Self {
        Self {
            attempts: 3,
            runs_whole_requests: false,
        }
    }
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ConfigError {
    /// Not JSON, a field of the wrong type, or an unknown one.
    #[error("{path}: {message}")]
    Document {
        /// Where in the document, as `pools[0].protocol`; `.` for the document itself.
        path: String,
        /// What is wrong there.
        message: String,
    },
    /// Well-formed, but it cannot be meant.
    #[error("{path}: {problem}")]
    Value {
        /// Where in the document.
        path: String,
        /// What is wrong and what would be right.
        problem: &'static str,
    },
}

impl Config {
    /// Reads and checks a configuration document.
    ///
    /// # Errors
    /// [`ConfigError`] names the path in the document, what is wrong, and what would be right.
    pub fn parse(document: &[u8]) -> Result<Self, ConfigError> {
        let mut json = serde_json::Deserializer::from_slice(document);
        let config: Self =
            serde_path_to_error::deserialize(&mut json).map_err(|error| ConfigError::Document {
                path: error.path().to_string(),
                message: error.inner().to_string(),
            })?;
        json.end().map_err(|error| ConfigError::Document {
            path: ".".to_owned(),
            message: error.to_string(),
        })?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let [pool] = self.pools.as_slice() else {
            return Err(value(
                "pools",
                "exactly one pool is supported by this version",
            ));
        };
        pool.check("pools[0]")
    }
}

impl Pool {
    fn check(&self, at: &str) -> Result<(), ConfigError> {
        if self.name.is_empty() {
            return Err(value(&format!("{at}.name"), "must not be empty"));
        }
        if self.block_tokens == 0 {
            return Err(value(&format!("{at}.block_tokens"), "must be at least 1"));
        }
        if self.prefill.attempts == 0 {
            return Err(value(
                &format!("{at}.prefill.attempts"),
                "must be at least 1",
            ));
        }
        if self.prefill.timeout_ms == 0 {
            return Err(value(
                &format!("{at}.prefill.timeout_ms"),
                "must be at least 1",
            ));
        }
        if self.decode.attempts == 0 {
            return Err(value(
                &format!("{at}.decode.attempts"),
                "must be at least 1",
            ));
        }
        if !(1..=120_000).contains(&self.cleanup.timeout_ms) {
            return Err(value(
                &format!("{at}.cleanup.timeout_ms"),
                "must be from 1 to 120000",
            ));
        }
        self.check_frontends(at)?;
        self.check_policies(at)?;
        match &self.discovery {
            Discovery::Static(list) => check_workers(
                &list.workers,
                self.protocol,
                &format!("{at}.discovery.static."),
            ),
            Discovery::Dynamo(poll) => poll.check(self.protocol, &format!("{at}.discovery.dynamo")),
            Discovery::Document(poll) => poll.check(&format!("{at}.discovery.document")),
        }
    }

    fn check_policies(&self, at: &str) -> Result<(), ConfigError> {
        let path = format!("{at}.on_prefill_failure");
        let decode_only = self
            .on_prefill_failure
            .contains(&OnPrefillFailure::DecodeOnly);
        match decode_only {
            true if self.enforce_disagg => Err(value(
                &path,
                "decode_only contradicts enforce_disagg; leave one of them out",
            )),
            true if !self.decode.runs_whole_requests => Err(value(
                &path,
                "decode_only needs decode.runs_whole_requests: a decode-only worker cannot run a request without its hand-off",
            )),
            _ => Ok(()),
        }
    }

    /// What happens while there is no prefill worker, the shorthand taken into account.
    pub fn prefill_absent(&self) -> OnPrefillAbsent {
        match self.enforce_disagg {
            true => OnPrefillAbsent::Fail,
            false => self.on_prefill_absent,
        }
    }

    fn check_frontends(&self, at: &str) -> Result<(), ConfigError> {
        let path = format!("{at}.frontends");
        match (self.protocol, self.frontends.is_empty()) {
            (Protocol::Direct, true) => Err(value(
                &path,
                "direct mode needs the Dynamo frontends' addresses, as [\"10.0.0.1:8000\"]",
            )),
            (Protocol::Nixl | Protocol::Sglang, false) => Err(value(
                &path,
                "only direct mode has frontends; with nixl and sglang a request goes to the decode worker itself",
            )),
            _ => Ok(()),
        }
    }
}

/// Checks a list of workers; `at` is the path of what holds the field `workers`, with a dot behind it.
pub(crate) fn check_workers(
    workers: &[ListedWorker],
    protocol: Protocol,
    at: &str,
) -> Result<(), ConfigError> {
    for (index, worker) in workers.iter().enumerate() {
        let at = format!("{at}workers[{index}]");
        worker.check(protocol, &at)?;
        if workers
            .iter()
            .take(index)
            .any(|other| other.same_identity(worker))
        {
            return Err(value(&at, "this worker (address or id) is listed twice"));
        }
    }
    Ok(())
}

impl DocumentDiscovery {
    fn check(&self, at: &str) -> Result<(), ConfigError> {
        if self.addresses.is_empty() {
            return Err(value(
                &format!("{at}.addresses"),
                "must name at least one member of the cluster, as [\"10.0.0.1:80\"]",
            ));
        }
        if !self.path.starts_with('/') {
            return Err(value(&format!("{at}.path"), "must begin with a slash"));
        }
        check_interval(self.interval_ms, self.timeout_ms, at)
    }
}

fn check_interval(interval_ms: u64, timeout_ms: u64, at: &str) -> Result<(), ConfigError> {
    if interval_ms < 100 {
        return Err(value(&format!("{at}.interval_ms"), "must be at least 100"));
    }
    if timeout_ms == 0 {
        return Err(value(&format!("{at}.timeout_ms"), "must be at least 1"));
    }
    Ok(())
}

impl ListedWorker {
    fn check(&self, protocol: Protocol, at: &str) -> Result<(), ConfigError> {
        if self.dp_size == 0 {
            return Err(value(&format!("{at}.dp_size"), "must be at least 1"));
        }
        match protocol {
            Protocol::Nixl | Protocol::Sglang if self.address.is_none() => Err(value(
                &format!("{at}.address"),
                "is required with nixl and sglang, as \"10.0.0.1:8000\" (an address, not a host name)",
            )),
            Protocol::Direct if self.id.is_none() => Err(value(
                &format!("{at}.id"),
                "is required in direct mode: the worker's Dynamo instance id, a decimal number",
            )),
            _ => Ok(()),
        }
    }

    fn same_identity(&self, other: &Self) -> bool {
        let same_address = self.address.is_some() && self.address == other.address;
        let same_id = self.id.is_some() && self.id == other.id;
        same_address || same_id
    }
}

impl DynamoDiscovery {
    fn check(&self, protocol: Protocol, at: &str) -> Result<(), ConfigError> {
        if protocol != Protocol::Direct {
            return Err(value(
                at,
                "Dynamo's workers are reached through its frontends: use protocol \"direct\"",
            ));
        }
        if self.models.is_empty() {
            return Err(value(
                &format!("{at}.models"),
                "must map at least one Dynamo namespace to its model, as {\"dynamo\": \"my-model\"}",
            ));
        }
        check_interval(self.interval_ms, self.timeout_ms, at)
    }
}

fn value(path: &str, problem: &'static str) -> ConfigError {
    ConfigError::Value {
        path: path.to_owned(),
        problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(document: &str) -> String {
        Config::parse(document.as_bytes()).unwrap_err().to_string()
    }

    fn pool(fields: &str) -> String {
        format!(r#"{{"pools":[{{"name":"p",{fields}}}]}}"#)
    }

    #[test]
    fn an_error_names_the_path_and_what_would_be_right() {
        let workers = |worker: &str| {
            pool(&format!(
                r#""protocol":"nixl","discovery":{{"static":{{"workers":[{worker}]}}}}"#
            ))
        };
        for (document, parts) in [
            ("{}".to_owned(), &["pools"][..]),
            (r#"{"pools":[],"statu":true}"#.to_owned(), &["statu"]),
            (r#"{"pools":[]}"#.to_owned(), &["pools", "exactly one"]),
            (
                pool(r#""protocol":"nix","discovery":{"static":{"workers":[]}}"#),
                &["pools[0].protocol", "nixl"],
            ),
            (
                workers(r#"{"address":"host:80","role":"decode"}"#),
                &["workers[0].address"],
            ),
            (
                workers(r#"{"address":"127.0.0.1:80","role":"encode"}"#),
                &["workers[0].role", "prefill"],
            ),
            (
                workers(r#"{"role":"decode"}"#),
                &["workers[0].address", "required"],
            ),
            (
                workers(r#"{"address":"127.0.0.1:80","role":"decode","port":1}"#),
                &["port"],
            ),
            (
                workers(
                    r#"{"address":"127.0.0.1:80","role":"decode"},{"address":"127.0.0.1:80","role":"decode"}"#,
                ),
                &["workers[1]", "twice"],
            ),
            (
                pool(r#""protocol":"direct","discovery":{"static":{"workers":[]}}"#),
                &["pools[0].frontends", "10.0.0.1:8000"],
            ),
            (
                pool(r#""protocol":"nixl","discovery":{"dynamo":{"models":{"dynamo":"m"}}}"#),
                &["discovery.dynamo", "direct"],
            ),
        ] {
            let said = error(&document);
            assert!(
                parts.iter().all(|part| said.contains(part)),
                "{document}: {said}"
            );
        }
    }

    #[test]
    fn ids_keep_all_64_bits() {
        let document = pool(
            r#""protocol":"direct","frontends":["127.0.0.1:1"],"discovery":{"static":{"workers":[{"id":18446744073709551615,"role":"decode"}]}}"#,
        );
        let config = Config::parse(document.as_bytes()).unwrap();
        let Discovery::Static(list) = &config.pools[0].discovery else {
            panic!("not static");
        };
        assert_eq!(list.workers[0].id, Some(u64::MAX));
    }
}
