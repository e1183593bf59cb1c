//! Owns what a benchmark came to, as `report.json` has it. Nothing in it is typed by hand.

use std::collections::BTreeMap;

use serde::Serialize;

/// One run of `pd-harness bench`.
#[derive(Debug, Clone, Serialize)]
pub struct Results {
    /// Where it ran.
    pub machine: Machine,
    /// When it began, in UTC, as RFC 3339 has it.
    pub date: String,
    /// What was measured: name and version of each program.
    pub versions: BTreeMap<String, String>,
    /// Seconds that each round of a row lasts.
    pub round_s: f64,
    /// Contenders under loads.
    pub rows: Vec<Row>,
    /// What memory comes to as prompts go by of which no two are alike.
    pub memory: Vec<MemoryRow>,
    /// A recorded trace, through each contender.
    pub trace: Vec<TraceRow>,
    /// What could not be measured, and why: a sentence each.
    pub absent: Vec<String>,
}

/// The machine.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// Cores that this run may use.
    pub cores: usize,
    /// Memory in MB (2^20 bytes).
    pub memory_mb: u64,
    /// The kernel's release.
    pub kernel: String,
}

/// How requests are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Loading {
    /// Each connection sends its next request when it has the answer to the last.
    Closed,
    /// Requests are sent at fixed times, whatever the answers do. Latencies count from these times.
    Open,
}

/// A load.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Load {
    /// How requests are sent.
    pub load: Loading,
    /// Requests per second of an open loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Connections; the most there may be, with an open loop.
    pub connections: usize,
    /// Whether the answer is a stream of events.
    pub streamed: bool,
    /// Events of a streamed answer, the closing ones left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<u64>,
    /// Milliseconds from one event to the next; 0 as fast as they can be written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk_ms: Option<f64>,
    /// Worker threads of the proxy.
    pub threads: u16,
}

/// One contender under one load.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Who.
    pub contender: String,
    /// Under what.
    #[serde(flatten)]
    pub load: Load,
    /// How often it was measured.
    pub rounds: usize,
    /// The median of each figure over the rounds.
    #[serde(flatten)]
    pub median: Figures,
    /// The smallest.
    pub min: Figures,
    /// The largest.
    pub max: Figures,
}

/// What one round came to, or many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Answers per second.
    pub rps: f64,
    /// To the end of an answer, in milliseconds: half of all took no longer.
    pub p50_ms: f64,
    /// Nine tenths.
    pub p90_ms: f64,
    /// 99 in a hundred.
    pub p99_ms: f64,
    /// To the first event of a stream, or to the end of an answer in one piece, in milliseconds.
    pub ttft_p50_ms: f64,
    /// User and system time of all processes of the gateway, in microseconds a request.
    pub cpu_us_per_request: f64,
    /// Memory of all processes of the gateway (resident set), in MB, at the end.
    pub rss_mb: f64,
    /// Requests answered with 200 and a whole answer, of all.
    pub success_rate: f64,
}

/// Memory of one contender as prompts go by that are all different.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryRow {
    /// Who.
    pub contender: String,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Worker threads of the proxy.
    pub threads: u16,
    /// (prompts sent until then, resident set of all its processes in MB), in order; the first at 0 prompts.
    pub points: Vec<(u64, f64)>,
}

/// A recorded trace through one contender, in the trace's own time.
#[derive(Debug, Clone, Serialize)]
pub struct TraceRow {
    /// Who.
    pub contender: String,
    /// Requests sent.
    pub requests: usize,
    /// How much faster than recorded.
    pub speedup: f64,
    /// Requests answered with 200 and a whole answer, of all.
    pub success_rate: f64,
    /// Prompt tokens found in an engine's cache, of all prompt tokens computed or found.
    pub hit_rate: f64,
    /// From the request to its first token, in milliseconds of the trace: the mean.
    pub ttft_mean_ms: f64,
    /// Half of all took no longer.
    pub ttft_p50_ms: f64,
    /// Nine tenths.
    pub ttft_p90_ms: f64,
    /// 99 in a hundred.
    pub ttft_p99_ms: f64,
    /// Tokens computed by the busiest prefill engine, over the mean of all.
    pub imbalance: f64,
}
