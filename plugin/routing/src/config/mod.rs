//! Owns the plugin's configuration: one JSON document, its defaults, and what makes it wrong.

mod admission;
mod check;
mod destinations;
mod discovery;
mod engine_metrics;
mod handoff;
mod health;
mod legs;
mod listed;
mod memory;
mod paths;
mod picker;
mod protocol;
mod responses;
mod selection;
mod sharing;

use std::net::SocketAddr;

use serde::Deserialize;

/// The whole configuration document. Unknown fields are refused by name.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The pools this filter routes to, isolated from each other, each with a name of its own.
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = check::MAX_POOLS)))]
    pub pools: Vec<Pool>,
    /// Name the chosen workers in the response (`x-pd-router-prefill`, `x-pd-router-decode`), and the endpoint that answered
    /// (`x-gateway-destination-endpoint-served`): for demonstrations, and for a gateway in front.
    #[serde(default)]
    pub response_headers: bool,
    /// Serve the status page `GET /pd-router/`, and `GET /pd-router/status` as JSON, which show the fleet and its load to whoever
    /// can reach the gateway.
    #[serde(default)]
    pub status: bool,
    /// What one thread's VM may hold at once.
    #[serde(default)]
    pub limits: Limits,
    /// What the proxy's threads tell each other.
    #[serde(default)]
    pub sharing: Sharing,
}

/// Bounds on what requests may make a VM hold.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Bytes of one request's body; a longer one gets 413. The proxy's own limit, `request_body_buffer_limit` of the route, must not
    /// be lower, else it is the proxy that answers.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub body_bytes: usize,
    /// Milliseconds from a request's headers to the end of its body; one that has not come by then gets 408. At most an hour.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 3_600_000)))]
    pub body_timeout_ms: u64,
    /// Bytes of request bodies buffered at once, per worker thread, those of calls to workers included until the calls have ended. Beyond
    /// it a request gets 503: the one that has taken longest and is still not complete, else the new one.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub bodies_in_flight_bytes: usize,
}

impl Default for Limits {
    /// 16 MiB: a prompt of two million ids, or several images. To read the most intricate text of that size takes a thread about a
    /// tenth of a second. 256 MiB in all: a quarter of the 1 GiB that Envoy allows a VM, since one body may be held twice while it
    /// is spliced.
    fn default() -> Self {
        Self {
            body_bytes: 16 * 1024 * 1024,
            body_timeout_ms: 60_000,
            bodies_in_flight_bytes: 256 * 1024 * 1024,
        }
    }
}

/// A set of workers that serve together, and how requests reach them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// For people, logs, metrics, and routes that name their pool; no two pools have the same.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub name: String,
    /// How the prefill worker's KV cache gets to the decode worker.
    pub protocol: ProtocolName,
    /// Where the workers are known from.
    pub discovery: Discovery,
    /// The Dynamo frontends, `ip:port`, to which every request is sent. Required with `direct`, refused otherwise.
    #[serde(default)]
    pub frontends: Vec<SocketAddr>,
    /// The proxy's clusters that hold the workers.
    #[serde(default)]
    pub clusters: Clusters,
    /// Whom the clusters can reach: their members, or any address within named networks.
    #[cfg_attr(feature = "schema", schemars(extend("default" = "members")))]
    #[serde(default)]
    pub destinations: Destinations,
    /// What the workers' own `/metrics` are asked; absent: nothing, and `{}` takes all defaults. Refused with `direct`,
    /// where the workers are not the proxy's to reach.
    pub engine_metrics: Option<EngineMetrics>,
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
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    #[serde(default = "default_block_tokens")]
    pub block_tokens: u32,
    /// KV blocks that fit on one rank of a worker that does not say so itself; absent: not known.
    pub kv_blocks: Option<u32>,
    /// Tokens of a prompt and its answer together at most, on a worker that does not say so itself; absent: not known. What is surely longer
    /// is refused with 400 before any prefill (`nixl`, `mooncake`, `sglang`, `llmd`), and `/v1/models` tells it.
    #[cfg_attr(feature = "schema", schemars(range(min = 1), extend("x-unit" = "tokens")))]
    pub max_model_len: Option<u64>,
    /// What is remembered of the workers' caches.
    #[serde(default)]
    pub prefixes: PrefixKnowledge,
    /// Back-pressure by how busy workers are, and the requests that wait.
    #[serde(default)]
    pub admission: Admission,
    /// Which prompts stay on a decode worker; absent: none. Needs `decode.runs_whole_requests`, and contradicts
    /// `enforce_disagg`.
    pub conditional: Option<Conditional>,
    /// Milliseconds after which a booking that no chunk has renewed counts no more; until a chunk does renew it.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    #[serde(default = "default_booking_expiry")]
    pub booking_expiry_ms: u64,
    /// Whether callers may steer: pin workers, ask who would be picked and why, demand taints, name a subset, give
    /// hints and other weights. Only for gateways behind a gateway.
    #[serde(default)]
    pub trust_clients: bool,
    /// The paths that are forwarded, behind whatever a route puts before them; any other gets 404. `*` stands for any one segment, `**` as the
    /// last for any one or more. A list takes the place of the default, which names what vLLM, SGLang, TensorRT-LLM and Dynamo serve for inference.
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = paths::MAX_PATHS)))]
    #[serde(default = "paths::default")]
    pub paths: Vec<String>,
    /// What happens to a request while there is no prefill worker.
    #[serde(default)]
    pub on_prefill_absent: OnPrefillAbsent,
    /// What happens where a trusted caller names a worker that has left, or takes nothing new; absent: `ignore` where
    /// `on_prefill_absent` is `aggregate`, else `reject`. A role whose `selection` is `direct` always rejects.
    pub on_stale_pin: Option<OnStalePin>,
    /// What happens when a prefill worker has failed, in order. `decode_only` needs `nixl`, `mooncake` or `trtllm`, and
    /// `decode.runs_whole_requests`; it contradicts `enforce_disagg`.
    #[serde(default = "default_on_failure")]
    pub on_prefill_failure: Vec<OnPrefillFailure>,
    /// Shorthand: `on_prefill_absent` is `fail`, and `on_prefill_failure` never `decode_only`.
    #[serde(default)]
    pub enforce_disagg: bool,
    /// `sglang` and `mooncake`: where a prefill worker's bootstrap server is.
    #[serde(default)]
    pub bootstrap: BootstrapSource,
    /// `sglang`: what becomes of `/v1/responses`, whose hand-off some releases drop.
    #[serde(default)]
    pub responses: Responses,
    /// The leg that fetches KV blocks which a client has left behind.
    #[serde(default)]
    pub cleanup: CleanUp,
    /// What is demanded of the hand-offs that prefill workers answer.
    #[serde(default)]
    pub handoff: HandOff,
    /// Whether an answer's `usage.prompt_tokens_details.cached_tokens` is what the prefill worker said (`nixl`,
    /// `mooncake`, `trtllm`): decode's own figure counts the blocks that it was handed.
    #[serde(default)]
    pub report_cached_tokens: bool,
    /// Headers of a client's request that go along on the calls which the filter makes for it (prefill, recovery, clean-up), beside
    /// those that always do: `authorization`, `traceparent`, `tracestate`, `baggage`, `b3`, `x-b3-*`, `user-agent`,
    /// `accept-language`.
    #[cfg_attr(feature = "schema", schemars(extend("default" = [])))]
    #[serde(default)]
    pub call_headers: Vec<String>,
    /// What is read of answers that flow.
    #[serde(default)]
    pub output: Output,
    /// When a worker that keeps failing is left alone.
    #[serde(default)]
    pub health: Health,
    /// What models' names are replaced by, in order: of several that fit, one that names the model wins, then the first.
    #[cfg_attr(feature = "schema", schemars(extend("default" = [])))]
    #[serde(default)]
    pub model_rewrites: Vec<ModelRewrite>,
    /// Priorities by the names of objectives, which a trusted caller gives in `x-llm-d-inference-objective`; default of a request: 0.
    #[serde(default)]
    pub objectives: Objectives,
    /// What becomes of a request while the pool has no worker at all.
    #[serde(default)]
    pub on_empty: OnEmpty,
}

/// What happens where a trusted caller names a worker that is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
#[serde(rename_all = "snake_case")]
pub enum OnStalePin {
    /// It is refused with 503: the caller may name another one.
    Reject,
    /// It goes on as if that worker had not been named.
    Ignore,
}

/// What happens when a prefill worker has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
#[serde(rename_all = "snake_case")]
pub enum BootstrapSource {
    /// On this port of every prefill worker that does not tell its own.
    Port(#[cfg_attr(feature = "schema", schemars(range(min = 1)))] u16),
    /// `sglang` only: each prefill worker is asked, at `/get_server_info`, before it is handed a request, again every two seconds, and at once after it took no connection.
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CleanUp {
    /// Milliseconds until the clean-up leg is given up.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 120000)))]
    pub timeout_ms: u32,
    /// Bytes of requests held for the clean-up leg, per worker thread; beyond it, and with 0 always, there is no such leg and the
    /// blocks are counted as leaked.
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

/// What is read of answers that flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Output {
    /// Whether the pieces of a stream are read after its first token, so that a booking grows with what is generated, and tokens are
    /// counted in the metrics. `false`: they pass without being looked at, which costs a few microseconds less for each; a booking then stays as
    /// it began, and of such an answer only what came with its first token is in `pd_router_output_tokens_total`.
    pub accounting: bool,
}

impl Default for Output {
    fn default() -> Self {
        Self { accounting: true }
    }
}

/// Five minutes, as Dynamo's stale guard has it.
fn default_booking_expiry() -> u64 {
    300_000
}

/// vLLM's default block size.
fn default_block_tokens() -> u32 {
    16
}

/// Names of the proxy's clusters.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Clusters {
    /// The cluster that prefill calls go to. It must hold every prefill worker, by the same `ip:port`.
    pub prefill: String,
    /// The route's cluster. It must hold every other worker, by the same `ip:port`; with `direct` it holds the
    /// frontends, which discovery polls too.
    pub decode: String,
    /// `mooncake`: the cluster of the prefill workers' bootstrap servers (each worker's IP with its bootstrap port),
    /// which are asked at `/query` for the engines' ids.
    pub bootstrap: String,
}

impl Default for Clusters {
    fn default() -> Self {
        Self {
            prefill: "prefill".to_owned(),
            decode: "decode".to_owned(),
            bootstrap: "bootstrap".to_owned(),
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
        let config: Self = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            document_error(&error.path().to_string(), &error.inner().to_string())
        })?;
        json.end().map_err(|error| ConfigError::Document {
            path: ".".to_owned(),
            message: error.to_string(),
        })?;
        config.check()?;
        Ok(config)
    }
}

/// A field that is absent has a path too, and an address an example.
fn document_error(path: &str, message: &str) -> ConfigError {
    let absent = message
        .strip_prefix("missing field `")
        .and_then(|rest| rest.split('`').next());
    // Where the text itself is broken the last step is not known.
    let path = match path.trim_end_matches('?').trim_end_matches('.') {
        "" => ".",
        path => path,
    };
    let path = match absent {
        Some(name) if path == "." => name.to_owned(),
        Some(name) => format!("{path}.{name}"),
        None => path.to_owned(),
    };
    let example = match message.starts_with("invalid socket address") {
        true => "; write it as \"10.0.0.1:8000\": an address, not a host name",
        false => "",
    };
    ConfigError::Document {
        path,
        message: format!("{message}{example}"),
    }
}

pub use admission::{
    Admission, Conditional, ConditionalPolicy, DecodeBusy, PrefillBusy, Queue, QueuePolicy,
};
pub use destinations::{Destinations, OriginalDst};
pub use discovery::{
    Discovery, DocumentDiscovery, DynamoDiscovery, EnvoyClusters, MemberAttributes,
    RegistrationDiscovery, StaticDiscovery, Token,
};
pub use engine_metrics::EngineMetrics;
pub use handoff::HandOff;
pub use health::Health;
pub use legs::{DecodeLeg, PrefillLeg};
pub use listed::ListedWorker;
pub(crate) use listed::{MAX_RANKS, MAX_WORKERS, check_workers, ranks};
pub use picker::{Objectives, OnEmpty};
pub use protocol::ProtocolName;
pub use responses::Responses;
pub use selection::{PrefixKnowledge, Selection, SessionAffinity};

pub use crate::network::{Network, NetworkError};
pub use crate::rendezvous::OnPrefillAbsent;
pub use crate::request::rename::{ModelRewrite, ModelTarget};
pub use crate::selection::{KvWeights, PolicyName};
pub use sharing::Sharing;

#[cfg(test)]
mod tests;
