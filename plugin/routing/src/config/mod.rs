//! Owns the plugin's configuration: one JSON document, its defaults, and its checks.

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
mod pool;
mod protocol;
mod responses;
mod selection;
mod sharing;

use std::net::SocketAddr;

use serde::Deserialize;

/// The configuration document. Unknown fields are refused by name.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Pools that this filter routes to, isolated from each other. Each pool has a name of its own.
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = check::MAX_POOLS)))]
    pub pools: Vec<Pool>,
    /// Whether responses name the chosen workers (`x-pd-router-prefill`, `x-pd-router-decode`) and the endpoint that answered
    /// (`x-gateway-destination-endpoint-served`): for demonstrations, and for a gateway in front.
    #[serde(default)]
    pub response_headers: bool,
    /// Whether the status page `GET /pd-router/`, and `GET /pd-router/status` as JSON, are served. Both show the fleet and its
    /// load to every client that can reach the gateway.
    #[serde(default)]
    pub status: bool,
    /// Bounds on the data that one thread's VM holds at once.
    #[serde(default)]
    pub limits: Limits,
    /// Data that the proxy's threads share with each other.
    #[serde(default)]
    pub sharing: Sharing,
}

/// Bounds on the data that a VM holds for requests.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Maximum bytes of one request's body; a longer body gets 413. The proxy's own limit, `request_body_buffer_limit` of the
    /// route, must not be lower, because the proxy would then answer in place of the filter.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub body_bytes: usize,
    /// Milliseconds from a request's headers to the end of its body; a body that is not complete by then gets 408. At most an
    /// hour.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 3_600_000)))]
    pub body_timeout_ms: u64,
    /// Maximum bytes of request bodies held at once, per worker thread: until the request is forwarded or, where the body is kept
    /// for another leg, until the answer begins. What is kept takes half of it at most. The bodies of calls to workers count
    /// until the calls have ended. Beyond the limit requests get 503: those that have taken longest and are still incomplete,
    /// as far as they make room, else the new one. An incomplete body displaces only bodies older than 5 s, or eight times as
    /// long.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub bodies_in_flight_bytes: usize,
}

impl Default for Limits {
    /// 16 MiB: a prompt of two million ids, or several images. A thread takes about a tenth of a second to read the most
    /// intricate text of that size. 256 MiB in all: a quarter of the 1 GiB that Envoy allows a VM, since one body may be held
    /// twice while it is spliced.
    fn default() -> Self {
        Self {
            body_bytes: 16 * 1024 * 1024,
            body_timeout_ms: 60_000,
            bodies_in_flight_bytes: 256 * 1024 * 1024,
        }
    }
}

/// A set of workers that serve together, and the rules by which requests reach them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Name of the pool for people, logs, metrics, and routes that name their pool. No two pools have the same name.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub name: String,
    /// Protocol by which the prefill worker's KV cache gets to the decode worker.
    pub protocol: ProtocolName,
    /// Source of the pool's workers.
    pub discovery: Discovery,
    /// Dynamo frontends, `ip:port`, to which every request is sent. Required with `direct`, refused with any other protocol.
    #[serde(default)]
    pub frontends: Vec<SocketAddr>,
    /// Names of the proxy's clusters that hold the workers.
    #[serde(default)]
    pub clusters: Clusters,
    /// Destinations that the clusters can reach: their members, or any address within named networks.
    #[cfg_attr(feature = "schema", schemars(extend("default" = "members")))]
    #[serde(default)]
    pub destinations: Destinations,
    /// Polls of the workers' own `/metrics`; absent: no polls, and `{}` takes all defaults. Refused with `direct`, where the
    /// proxy does not reach the workers.
    pub engine_metrics: Option<EngineMetrics>,
    /// Policies that pick workers, for each role.
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
    /// KV blocks that fit on one rank of a worker for which neither its source nor its engine has a number; absent: not known.
    pub kv_blocks: Option<u32>,
    /// Maximum tokens of a prompt and its answer together, on a worker without a number of its own; absent: not known. A
    /// request that is surely longer is refused with 400 before any prefill (`nixl`, `mooncake`, `sglang`, `llmd`).
    /// `/v1/models` reports the number.
    #[cfg_attr(feature = "schema", schemars(range(min = 1), extend("x-unit" = "tokens")))]
    pub max_model_len: Option<u64>,
    /// Limits of the knowledge about the workers' caches.
    #[serde(default)]
    pub prefixes: PrefixKnowledge,
    /// Back-pressure by the load of workers, and the queue of waiting requests.
    #[serde(default)]
    pub admission: Admission,
    /// Prompts that stay on a decode worker; absent: none. Needs `decode.runs_whole_requests`, and contradicts
    /// `enforce_disagg`.
    pub conditional: Option<Conditional>,
    /// Milliseconds after which a booking that no chunk has renewed stops counting, until a chunk renews it.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    #[serde(default = "default_booking_expiry")]
    pub booking_expiry_ms: u64,
    /// Whether callers may set routing overrides: pins to workers, queries for the workers that would be picked and why,
    /// required taints, a subset of endpoints, hints, and other weights. Only for gateways behind a gateway.
    #[serde(default)]
    pub trust_clients: bool,
    /// Paths that are forwarded, behind any prefix that a route puts before them; any other path gets 404. `*` stands for any
    /// one segment, a final `**` for one or more segments. A list replaces the default, which names the inference paths of
    /// vLLM, SGLang, TensorRT-LLM and Dynamo.
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = paths::MAX_PATHS)))]
    #[serde(default = "paths::default")]
    pub paths: Vec<String>,
    /// Handling of a request while there is no prefill worker.
    #[serde(default)]
    pub on_prefill_absent: OnPrefillAbsent,
    /// Handling of a request whose trusted caller names a worker that has left, or takes nothing new. Absent: `ignore` where
    /// `on_prefill_absent` is `aggregate`, else `reject`. A role whose `selection` is `direct` always rejects.
    pub on_stale_pin: Option<OnStalePin>,
    /// Steps after a prefill worker has failed, in order. `decode_only` needs `nixl`, `mooncake` or `trtllm`, and
    /// `decode.runs_whole_requests`, and contradicts `enforce_disagg`.
    #[serde(default = "default_on_failure")]
    pub on_prefill_failure: Vec<OnPrefillFailure>,
    /// Shorthand: `on_prefill_absent` is `fail`, and `on_prefill_failure` never contains `decode_only`.
    #[serde(default)]
    pub enforce_disagg: bool,
    /// `sglang` and `mooncake`: location of a prefill worker's bootstrap server.
    #[serde(default)]
    pub bootstrap: BootstrapSource,
    /// `sglang`: handling of `/v1/responses`, whose hand-off some releases drop.
    #[serde(default)]
    pub responses: Responses,
    /// Leg that fetches KV blocks which a client has left behind.
    #[serde(default)]
    pub cleanup: CleanUp,
    /// Demands on the hand-offs that prefill workers answer.
    #[serde(default)]
    pub handoff: HandOff,
    /// Whether an answer's `usage.prompt_tokens_details.cached_tokens` is the figure of the prefill worker (`nixl`, `mooncake`,
    /// `trtllm`). The figure of the decode worker counts the blocks that were handed to it.
    #[serde(default)]
    pub report_cached_tokens: bool,
    /// Further headers of a client's request that are copied to the calls which the filter makes for the request (prefill,
    /// recovery, clean-up). These are always copied: `authorization`, `traceparent`, `tracestate`, `baggage`, `b3`, `x-b3-*`,
    /// `user-agent`, `accept-language`.
    #[cfg_attr(feature = "schema", schemars(extend("default" = [])))]
    #[serde(default)]
    pub call_headers: Vec<String>,
    /// Reading of streamed answers.
    #[serde(default)]
    pub output: Output,
    /// Ejection of workers that keep failing.
    #[serde(default)]
    pub health: Health,
    /// Replacements of model names, in order. Of several that fit, a replacement that names the model wins, then the first.
    #[cfg_attr(feature = "schema", schemars(extend("default" = [])))]
    #[serde(default)]
    pub model_rewrites: Vec<ModelRewrite>,
    /// Priorities by the names of objectives. A trusted caller names an objective in `x-llm-d-inference-objective`; the default
    /// priority of a request is 0.
    #[serde(default)]
    pub objectives: Objectives,
    /// Handling of a request while the pool has no worker at all.
    #[serde(default)]
    pub on_empty: OnEmpty,
}

/// Handling of a request whose trusted caller names a worker that is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
#[serde(rename_all = "snake_case")]
pub enum OnStalePin {
    /// The request is refused with 503: the caller may name another worker.
    Reject,
    /// The request is routed as if that worker had not been named.
    Ignore,
}

/// Step after a prefill worker has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
#[serde(rename_all = "snake_case")]
pub enum OnPrefillFailure {
    /// Another prefill worker is called, as often as `prefill.attempts` allows.
    RetryOther,
    /// The request fails.
    Fail,
    /// The decode worker runs the request aggregated. Refused where decode workers cannot.
    DecodeOnly,
}

/// Another worker is called first; then the request fails.
fn default_on_failure() -> Vec<OnPrefillFailure> {
    vec![OnPrefillFailure::RetryOther, OnPrefillFailure::Fail]
}

/// Location of SGLang's bootstrap servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
#[serde(rename_all = "snake_case")]
pub enum BootstrapSource {
    /// This port, on every prefill worker without a port of its own.
    Port(#[cfg_attr(feature = "schema", schemars(range(min = 1)))] u16),
    /// `sglang` only: the port that each prefill worker reports at `/get_server_info`. The filter polls that path before the
    /// worker is handed a request, again every two seconds, and at once after the worker took no connection.
    Ask,
}

impl Default for BootstrapSource {
    /// SGLang's default port.
    fn default() -> Self {
        Self::Port(8998)
    }
}

/// Leg that fetches KV blocks which a client has left behind, so that the prefill worker can free them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CleanUp {
    /// Milliseconds after which the clean-up leg is abandoned.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 120000)))]
    pub timeout_ms: u32,
    /// Maximum bytes of requests held for clean-up legs, per worker thread, within half of `limits.bodies_in_flight_bytes`. Beyond
    /// that, and with 0 always, there is no such leg, and the blocks are counted as leaked.
    pub held_bytes: usize,
}

impl Default for CleanUp {
    /// As long as vLLM keeps blocks for a request by default; 64 MiB.
    fn default() -> Self {
        Self {
            timeout_ms: 30_000,
            held_bytes: 64 * 1024 * 1024,
        }
    }
}

/// Reading of streamed answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Output {
    /// Whether the pieces of a stream are read after its first token, so that a booking grows with the generated tokens, and
    /// the metrics count these tokens. `false`: the pieces pass unread, which saves a few microseconds each. A booking then
    /// keeps its first size, and `pd_router_output_tokens_total` counts only the tokens that came with the first one.
    pub accounting: bool,
}

impl Default for Output {
    fn default() -> Self {
        Self { accounting: true }
    }
}

/// Five minutes, as in Dynamo's stale guard.
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
    /// Cluster of the prefill calls. The cluster must hold every prefill worker, by the same `ip:port`.
    pub prefill: String,
    /// Cluster of the route. The cluster must hold every other worker, by the same `ip:port`; with `direct` the cluster holds
    /// the frontends, which discovery polls too.
    pub decode: String,
    /// `mooncake`: cluster of the prefill workers' bootstrap servers (each worker's IP with its bootstrap port). The filter
    /// polls them at `/query` for the engines' ids.
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

/// Reason for which a configuration is refused.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ConfigError {
    /// The document is not JSON, or has a field that is unknown or of the wrong type.
    #[error("{path}: {message}")]
    Document {
        /// Path in the document, as `pools[0].protocol`; `.` for the document itself.
        path: String,
        /// The error at that path.
        message: String,
    },
    /// The document is well-formed, but a value in it is wrong.
    #[error("{path}: {problem}")]
    Value {
        /// Path in the document.
        path: String,
        /// The error, and a correct form.
        problem: &'static str,
    },
}

impl Config {
    /// Reads and checks a configuration document.
    ///
    /// # Errors
    /// [`ConfigError`] names the path in the document, the error, and a correct form.
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

/// The error for a document: an absent field gets a path too, and an address an example.
fn document_error(path: &str, message: &str) -> ConfigError {
    let absent = message
        .strip_prefix("missing field `")
        .and_then(|rest| rest.split('`').next());
    // The last step of the path is not known where the JSON itself is broken.
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
