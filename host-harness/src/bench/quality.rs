//! Owns the measurement of routing quality: a recorded trace through each contender in turn, onto new engines that cache the
//! prefixes of their prompts, take time to compute the rest, and are strict about the hand-off.

use std::fs::File;
use std::io::BufReader;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;

use super::contender;
use super::fleet::{DisaggregatedEngines, EngineCounts, MODEL};
use super::peers::{EngineAddresses, Peer};
use super::results::TraceRow;
use super::running_contender::{ContenderError, ContenderFiles, RunningContender};
use super::trace::{self, PlayOptions};
use crate::engine::{Dialect, EngineConfig, EngineError, PrefixCache, Role};
use crate::http::HttpError;
use crate::replay::{Trace, TraceError};

/// Engines of each role: a trace of long prompts mostly loads prefill.
const COUNTS: EngineCounts = EngineCounts {
    prefill: 8,
    decode: 2,
};
/// Block size of the trace, so that its ids identify cached blocks.
const BLOCK_TOKENS: u32 = 512;
/// Blocks of each prefill engine; the trace has much more than eight times that.
const KV_BLOCKS: u32 = 4000;
/// Prompt tokens computed per second of the trace.
const PREFILL_RATE: f64 = 8000.0;
/// Tokens of each answer: decode is not measured.
const MAX_TOKENS: u64 = 1;
/// Limit of the wait for an answer, in wall-clock time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit of an engine's state report.
const STATE_LIMIT: Duration = Duration::from_secs(10);
/// Worker threads of the proxies.
const THREADS: u16 = 1;

/// A contender that plays the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceContender {
    /// Envoy with pd-router.
    Ours(Policy),
    /// Another router.
    Peer(Peer),
}

/// pd-router's policy for prefill workers, and its engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Default policy, vLLM's engines.
    Nixl,
    /// Default policy, SGLang's engines.
    Sglang,
    /// Round robin, vLLM's engines: the difference to the default is the gain from the policy.
    RoundRobin,
}

impl TraceContender {
    /// All players.
    pub fn all() -> Vec<Self> {
        let policies = [Policy::Nixl, Policy::Sglang, Policy::RoundRobin];
        let ours = policies.map(Self::Ours);
        ours.into_iter().chain(Peer::ALL.map(Self::Peer)).collect()
    }

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours(Policy::Nixl) => "pd-router nixl",
            Self::Ours(Policy::Sglang) => "pd-router sglang",
            Self::Ours(Policy::RoundRobin) => "pd-router round_robin",
            Self::Peer(peer) => peer.name(),
        }
    }

    fn dialect(self) -> Dialect {
        match self {
            Self::Ours(Policy::Sglang) => Dialect::Sglang,
            Self::Ours(_) => Dialect::Vllm,
            Self::Peer(peer) => peer.dialect(),
        }
    }
}

impl Policy {
    fn configuration(self, fleet: &EngineAddresses) -> Value {
        let mut pool = match self {
            Self::Nixl | Self::RoundRobin => contender::nixl(fleet),
            Self::Sglang => contender::sglang(fleet),
        };
        pool["block_tokens"] = json!(BLOCK_TOKENS);
        pool["kv_blocks"] = json!(KV_BLOCKS);
        if self == Self::RoundRobin {
            pool["selection"] = json!({"prefill": "round_robin"});
        }
        contender::document(pool)
    }
}

/// Result of a trace.
#[derive(Clone, Debug)]
pub struct TraceOutcome {
    /// Row of the report.
    pub row: TraceRow,
    /// Lateness of the client itself, in milliseconds of the trace: 99th percentile.
    pub late_ms: f64,
}

/// Largest share of the mean time to first token that the client may cause.
const MOST_OF_TTFT: f64 = 0.1;

impl TraceOutcome {
    /// A complaint about the measurement, if any.
    pub fn complaint(&self) -> Option<String> {
        let TraceRow {
            contender,
            ttft_mean_ms,
            ..
        } = &self.row;
        (self.late_ms > ttft_mean_ms * MOST_OF_TTFT).then(|| {
            format!(
                "the trace through {contender}: the client was late itself, one request in a hundred by {:.0} ms of the trace or more; \
                 a lower speedup would measure better",
                self.late_ms
            )
        })
    }
}

/// The trace and its playing options.
pub struct TracePlay {
    trace: Trace,
    options: PlayOptions,
}

/// Why there is no row.
#[derive(Debug, thiserror::Error)]
pub enum QualityError {
    /// The trace does not exist.
    #[error("{} is not there", .0.display())]
    Missing(PathBuf),
    /// The trace cannot be read.
    #[error("{}: {source}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: TraceError,
    },
    /// An engine did not start.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The contender did not start.
    #[error(transparent)]
    Contender(#[from] ContenderError),
    /// An engine's state report failed.
    #[error("an engine's state: {0}")]
    State(#[from] HttpError),
    /// An engine's state report timed out.
    #[error("an engine did not tell its state within {} s", STATE_LIMIT.as_secs())]
    Silent,
}

impl TracePlay {
    /// Reads a trace, of which `requests` requests are to be sent.
    ///
    /// # Errors
    /// When the trace is missing or cannot be read.
    pub fn read(path: &Path, requests: usize, speedup: f64) -> Result<Self, QualityError> {
        let unreadable = |source| QualityError::Trace {
            path: path.to_owned(),
            source,
        };
        if !path.exists() {
            return Err(QualityError::Missing(path.to_owned()));
        }
        let file = File::open(path).map_err(|error| unreadable(error.into()))?;
        let trace = Trace::read(BufReader::new(file), BLOCK_TOKENS, None).map_err(unreadable)?;
        let requests = requests.min(trace.requests.len());
        Ok(Self {
            trace,
            options: PlayOptions {
                speedup,
                requests,
                model: MODEL.to_owned(),
                max_tokens: MAX_TOKENS,
                block_tokens: BLOCK_TOKENS,
                patience: PATIENCE,
            },
        })
    }

    /// Number of requests sent.
    pub fn requests(&self) -> usize {
        self.options.requests
    }

    /// Wall-clock time from the first request to the last.
    pub fn lasts(&self) -> Duration {
        let last = self.trace.requests.get(self.requests().saturating_sub(1));
        let arrival = last.map(|request| request.arrival);
        arrival.unwrap_or_default().div_f64(self.options.speedup)
    }

    /// Plays the trace; calls `passed` with the number of ended requests.
    ///
    /// # Errors
    /// When the engines or the contender do not start, or an engine's state report fails.
    pub async fn play(
        &self,
        contender: TraceContender,
        parts: &ContenderFiles,
        passed: impl Fn(usize),
    ) -> Result<TraceOutcome, QualityError> {
        let legs =
            DisaggregatedEngines::start(COUNTS, |role| self.engine(role, contender.dialect()))
                .await?;
        let fleet = legs.addresses();
        let running = match contender {
            TraceContender::Ours(policy) => {
                RunningContender::routed(policy.configuration(&fleet), THREADS, parts).await?
            }
            TraceContender::Peer(peer) => RunningContender::router(peer, &fleet, parts).await?,
        };
        let played = trace::play(&self.trace, running.address, &self.options, passed).await;
        let engines = addresses(&fleet);
        let states = timeout(STATE_LIMIT, trace::states(&engines)).await;
        running.stop().await;
        legs.stop().await;
        let states = states.map_err(|_| QualityError::Silent)??;
        Ok(TraceOutcome {
            row: trace::row(contender.name(), &played, &states),
            late_ms: played.late_ms().p99,
        })
    }

    fn engine(&self, role: Role, dialect: Dialect) -> EngineConfig {
        EngineConfig {
            dialect,
            model: MODEL.to_owned(),
            speedup: self.options.speedup,
            block_tokens: BLOCK_TOKENS,
            kv_blocks: KV_BLOCKS,
            prefill_rate: PREFILL_RATE,
            prefix_cache: match role {
                Role::Decode => PrefixCache::Off,
                Role::Prefill | Role::Aggregated => PrefixCache::Lru,
            },
            ..EngineConfig::new(role)
        }
    }
}

fn addresses(fleet: &EngineAddresses) -> Vec<SocketAddr> {
    let prefill = fleet.prefill.iter().map(|(address, _)| *address);
    prefill.chain(fleet.decode.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use routing::config::Config;

    #[test]
    fn configurations_are_right() {
        let fleet = EngineAddresses {
            prefill: vec![(
                SocketAddr::from(([127, 0, 0, 1], 1)),
                Some(SocketAddr::from(([127, 0, 0, 1], 2))),
            )],
            decode: vec![SocketAddr::from(([127, 0, 0, 1], 3))],
        };
        for policy in [Policy::Nixl, Policy::Sglang, Policy::RoundRobin] {
            let document = policy.configuration(&fleet).to_string();
            let read = Config::parse(document.as_bytes());
            assert!(read.is_ok(), "{:?} of {document}", read.err());
        }
    }

    #[test]
    fn a_client_that_is_late_says_so() {
        let outcome = |late_ms| TraceOutcome {
            row: TraceRow {
                contender: "smg nixl".to_owned(),
                requests: 1,
                speedup: 10.0,
                success_rate: 1.0,
                hit_rate: 0.0,
                ttft_mean_ms: 1000.0,
                ttft_p50_ms: 0.0,
                ttft_p90_ms: 0.0,
                ttft_p99_ms: 0.0,
                imbalance: 1.0,
            },
            late_ms,
        };
        assert_eq!(outcome(99.0).complaint(), None);
        let complaint = outcome(101.0).complaint().unwrap();
        assert!(
            complaint.contains("smg nixl") && complaint.contains("101 ms"),
            "{complaint}"
        );
    }

    #[test]
    fn a_trace_that_is_not_there_is_named() {
        let error = TracePlay::read(Path::new("/no/trace"), 1, 1.0).err();
        let message = error.map(|error| error.to_string());
        assert_eq!(message.as_deref(), Some("/no/trace is not there"));
    }
}
