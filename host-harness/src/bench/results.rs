//! Owns the results of a benchmark, as written to `report.json`. None of them is entered by hand.

use std::collections::BTreeMap;

use serde::Serialize;

/// One run of `pd-harness bench`.
#[derive(Debug, Clone, Serialize)]
pub struct Results {
    /// The machine.
    pub machine: Machine,
    /// Start in UTC, in RFC 3339 format.
    pub date: String,
    /// Name and version of each measured program.
    pub versions: BTreeMap<String, String>,
    /// Seconds of each round of a row.
    pub round_s: f64,
    /// Contenders under loads.
    pub rows: Vec<Row>,
    /// Memory over many distinct prompts.
    pub memory: Vec<MemoryRow>,
    /// A recorded trace, through each contender.
    pub trace: Vec<TraceRow>,
    /// Missing measurements with the reason, one sentence each.
    pub absent: Vec<String>,
}

/// The machine.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// Cores available to this run.
    pub cores: usize,
    /// Memory in MB (2^20 bytes).
    pub memory_mb: u64,
    /// The kernel's release.
    pub kernel: String,
}

/// How requests are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LoopKind {
    /// Each connection sends its next request after the answer to the last.
    Closed,
    /// Requests are sent at fixed times, independent of the answers. Latencies count from these times.
    Open,
}

/// A load.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Load {
    /// How requests are sent.
    pub load: LoopKind,
    /// Requests per second of an open loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Connections; the maximum, in an open loop.
    pub connections: usize,
    /// Whether the answer is a stream of events.
    pub streamed: bool,
    /// Events of a streamed answer, without the closing ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<u64>,
    /// Milliseconds between two events; 0: no pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk_ms: Option<f64>,
    /// Worker threads of the proxy.
    pub threads: u16,
}

/// One contender under one load.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Name of the contender.
    pub contender: String,
    /// The load.
    #[serde(flatten)]
    pub load: Load,
    /// Number of rounds.
    pub rounds: usize,
    /// Median of each figure over the rounds.
    #[serde(flatten)]
    pub median: Figures,
    /// Minimum of each figure.
    pub min: Figures,
    /// Maximum of each figure.
    pub max: Figures,
}

/// Figures of one round, or of many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Answers per second.
    pub rps: f64,
    /// Time to the end of an answer, in milliseconds: median.
    pub p50_ms: f64,
    /// 90th percentile.
    pub p90_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Time to the first event of a stream, or to the end of an unstreamed answer, in milliseconds: median.
    pub ttft_p50_ms: f64,
    /// User and system time of all processes of the gateway, in microseconds per request.
    pub cpu_us_per_request: f64,
    /// Memory of all processes of the gateway (resident set) at the end, in MB.
    pub rss_mb: f64,
    /// Share of requests answered with 200 and a complete answer.
    pub success_rate: f64,
}

/// Memory of one contender over many distinct prompts.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryRow {
    /// Name of the contender.
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
    /// Name of the contender.
    pub contender: String,
    /// Requests sent.
    pub requests: usize,
    /// Factor by which the trace was played faster than recorded.
    pub speedup: f64,
    /// Share of requests answered with 200 and a complete answer.
    pub success_rate: f64,
    /// Share of prompt tokens found in an engine's cache, of all prompt tokens computed or found.
    pub hit_rate: f64,
    /// Time from the request to its first token, in milliseconds of the trace: mean.
    pub ttft_mean_ms: f64,
    /// Median.
    pub ttft_p50_ms: f64,
    /// 90th percentile.
    pub ttft_p90_ms: f64,
    /// 99th percentile.
    pub ttft_p99_ms: f64,
    /// Tokens computed by the busiest prefill engine, divided by the mean of all.
    pub imbalance: f64,
}
