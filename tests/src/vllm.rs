//! Owns a real vLLM on the CPU: engines of each role that hand KV over through NIXL, and one aggregated engine.

use std::fmt;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::client::{self, Ask};
use crate::engines::{Role, in_turns, static_config, with};
use crate::metrics::Metrics;
use crate::paths;
use crate::process::ProcessGroup;
use crate::wait::eventually;

/// Model name of the engines.
pub const MODEL: &str = "tiny";

/// An engine's context, in tokens.
pub const CONTEXT: u64 = 4096;

/// Tokens in one of an engine's KV blocks.
pub const BLOCK_TOKENS: u64 = 32;

/// Lease of a hand-off on a prefill engine, as in serve.sh.
pub const LEASE: Duration = Duration::from_secs(120);

/// Limit of an answer: engines that poll take the CPU from each other.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Five engines that start side by side on two busy cores.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(900);

/// Last lines of an engine's log that a failed start shows.
const SHOWN_LINES: usize = 12;

/// Port of the first engine. The port after it is its side channel; the next engine's ports are two higher.
const FIRST_PORT: u16 = 18100;

/// An engine's part in a hand-off, in vLLM's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvRole {
    /// Computes prompts, and issues hand-offs.
    Producer,
    /// Pulls hand-offs.
    Consumer,
    /// Either.
    Both,
    /// No connector at all.
    None,
}

impl KvRole {
    fn as_str(self) -> &'static str {
        match self {
            KvRole::Producer => "kv_producer",
            KvRole::Consumer => "kv_consumer",
            KvRole::Both => "kv_both",
            KvRole::None => "none",
        }
    }
}

/// One engine, which can be killed and restarted at the same address.
pub struct Engine {
    /// Name in the configuration, such as `prefill-0`.
    pub name: String,
    /// Role for the gateway.
    pub role: Role,
    /// Address of the engine.
    pub address: SocketAddr,
    kv: KvRole,
    process: Mutex<Option<ProcessGroup>>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} at {}", self.name, self.address)
    }
}

impl Engine {
    fn new(name: &str, role: Role, kv: KvRole, place: u16) -> Engine {
        Engine {
            name: name.to_owned(),
            role,
            address: local(FIRST_PORT + 2 * place),
            kv,
            process: Mutex::new(None),
        }
    }

    /// Starts the engine and waits until it serves. Fails with the end of its log if it ends first.
    pub async fn start(&self) {
        let process = ProcessGroup::start(&serve(self.kv, self.address.port()), &self.name).await;
        self.hold(Some(process));
        self.wait_until_it_serves().await;
    }

    /// Kills the engine with all its processes at once, like a machine that is switched off.
    pub fn kill(&self) {
        self.hold(None);
    }

    /// The engine's entry in a configuration.
    pub fn listed(&self) -> Value {
        json!({
            "name": self.name,
            "address": self.address.to_string(),
            "role": self.role.as_str(),
            "model": MODEL,
        })
    }

    async fn wait_until_it_serves(&self) {
        eventually("vLLM serves", START_LIMIT, || async {
            if self.is_well().await {
                return Ok(());
            }
            if let Some(log) = self.log_of_its_end() {
                panic!("vLLM ended before it served ({self:?}); the end of its log:\n{log}");
            }
            Err(format!("{self:?} does not answer"))
        })
        .await;
    }

    async fn is_well(&self) -> bool {
        let reply = client::try_send(self.address, Ask::get("/health")).await;
        reply.is_ok_and(|reply| reply.status == 200)
    }

    /// The last lines of its log, if its process has ended.
    fn log_of_its_end(&self) -> Option<String> {
        let process = self
            .process
            .lock()
            .expect("no test panics while it holds this");
        let Some(process) = process.as_ref() else {
            return Some("it was killed".to_owned());
        };
        if process.is_running() {
            return None;
        }
        let log = process.log();
        let lines: Vec<&str> = log.lines().collect();
        Some(lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n"))
    }

    fn hold(&self, process: Option<ProcessGroup>) {
        let mut held = self
            .process
            .lock()
            .expect("no test panics while it holds this");
        *held = process;
    }

    /// Sends a request to the engine, past the gateway.
    pub async fn send(&self, ask: Ask) -> client::Reply {
        client::send(self.address, ask).await
    }

    /// The engine's metrics page.
    pub async fn metrics(&self) -> Metrics {
        metrics_at(self.address).await
    }

    /// The engine's current figures.
    pub async fn figures(&self) -> Figures {
        let metrics = self.metrics().await;
        let sum = |name: &str| metrics.sum(name).unwrap_or_default();
        let prompt = |source| {
            let labels = [("source", source)];
            let name = "vllm:prompt_tokens_by_source_total";
            metrics.sum_where(name, &labels).unwrap_or_default()
        };
        Figures {
            prompt_tokens: sum("vllm:prompt_tokens_total"),
            computed: prompt("local_compute"),
            transferred: prompt("external_kv_transfer"),
            failed_transfers: sum("vllm:nixl_num_failed_transfers_total"),
            expired: sum("vllm:nixl_num_kv_expired_reqs_total"),
            running: sum("vllm:num_requests_running") + sum("vllm:num_requests_waiting"),
            held: sum("vllm:kv_cache_usage_perc"),
        }
    }
}

fn serve(kv: KvRole, port: u16) -> Command {
    let mut command = Command::new(paths::workspace().join("tests/engines/serve.sh"));
    command
        .arg(paths::vllm_venv())
        .arg(paths::vllm_model())
        .arg(kv.as_str())
        .arg(port.to_string())
        .arg((port + 1).to_string());
    command
}

/// The command of a Dynamo worker that is a vLLM.
pub(crate) fn dynamo_worker(role: Role) -> Command {
    let kv = match role {
        Role::Prefill => KvRole::Producer,
        Role::Decode | Role::Aggregated => KvRole::Consumer,
    };
    let mut command = serve(kv, dynamo_port(role));
    command.env("DYNAMO", paths::vllm_dynamo());
    command
}

/// Port of the worker's metrics; the port above it is its side channel.
fn dynamo_port(role: Role) -> u16 {
    match role {
        Role::Prefill => 18120,
        Role::Decode | Role::Aggregated => 18122,
    }
}

/// The metrics page of a Dynamo worker that is a vLLM.
pub async fn dynamo_metrics(role: Role) -> Metrics {
    metrics_at(local(dynamo_port(role))).await
}

async fn metrics_at(address: SocketAddr) -> Metrics {
    let page = client::send(address, Ask::get("/metrics")).await;
    Metrics::parse(&page.expect(200).text())
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// An engine's counts, in tokens and requests, and its share of the KV cache in use, from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Prompt tokens.
    pub prompt_tokens: f64,
    /// Prompt tokens computed here.
    pub computed: f64,
    /// Prompt tokens taken over from another engine.
    pub transferred: f64,
    /// Hand-offs that could not be read.
    pub failed_transfers: f64,
    /// Hand-offs that were not read in time.
    pub expired: f64,
    /// Running or waiting requests.
    pub running: f64,
    /// Share of the KV cache in use.
    pub held: f64,
}

/// Number of engines of each role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// One prefill and one decode engine.
    Pair,
    /// Two of each, the second ones `kv_both`.
    TwoPairs,
}

/// Fields of a pool whose deadlines are at least [`PATIENCE`].
pub fn patient() -> Value {
    json!({
        "prefill": {"base_timeout_ms": 120_000},
        "decode": {"first_token_timeout_ms": 240_000},
    })
}

/// Engines of both roles, and one aggregated engine to compare with.
#[derive(Debug)]
pub struct Fleet {
    /// Prefill and decode engines.
    pub engines: Vec<Engine>,
    /// The aggregated engine. No gateway routes to it.
    pub alone: Engine,
}

impl Fleet {
    /// Starts all engines in parallel and waits until they serve.
    pub async fn start(size: Size) -> Fleet {
        let pairs: &[_] = match size {
            Size::Pair => &[(KvRole::Producer, KvRole::Consumer)],
            Size::TwoPairs => &[
                (KvRole::Producer, KvRole::Consumer),
                (KvRole::Both, KvRole::Both),
            ],
        };
        let mut engines = Vec::new();
        for (number, (prefill, decode)) in pairs.iter().enumerate() {
            for (role, kv) in [(Role::Prefill, *prefill), (Role::Decode, *decode)] {
                let name = format!("{}-{number}", role.as_str());
                let place = 1 + engines.len() as u16;
                engines.push(Engine::new(&name, role, kv, place));
            }
        }
        let alone = Engine::new("alone", Role::Aggregated, KvRole::None, 0);
        let fleet = Fleet { engines, alone };
        join_all(fleet.all().map(Engine::start)).await;
        fleet
    }

    fn all(&self) -> impl Iterator<Item = &Engine> {
        self.engines.iter().chain([&self.alone])
    }

    /// The engines of this role.
    pub fn of(&self, role: Role) -> impl Iterator<Item = &Engine> {
        self.engines
            .iter()
            .filter(move |engine| engine.role == role)
    }

    /// A configuration with these engines as its one pool, patient, response headers and the status page on.
    pub fn config(&self) -> Value {
        self.config_with(json!({}))
    }

    /// The same, with these further fields of the pool.
    pub fn config_with(&self, pool: Value) -> Value {
        let workers = self.engines.iter().map(Engine::listed).collect();
        let base = with(in_turns(), json!({"block_tokens": BLOCK_TOKENS}));
        static_config(workers, with(with(base, patient()), pool))
    }

    /// The first engine of this role.
    pub fn first(&self, role: Role) -> &Engine {
        self.of(role).next().expect("an engine of each role")
    }

    /// The sum of the figures of all engines of this role.
    pub async fn figures(&self, role: Role) -> Figures {
        let mut total = Figures::default();
        for engine in self.of(role) {
            let figures = engine.figures().await;
            total.prompt_tokens += figures.prompt_tokens;
            total.computed += figures.computed;
            total.transferred += figures.transferred;
            total.failed_transfers += figures.failed_transfers;
            total.expired += figures.expired;
            total.running += figures.running;
            total.held += figures.held;
        }
        total
    }
}
