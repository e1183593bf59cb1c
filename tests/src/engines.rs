//! Simulated engines, each its own process, and what they say about the requests they got.

use std::net::SocketAddr;
use std::process::Command;

use futures_util::future::join_all;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::{self, Ask};
use crate::paths;
use crate::process::Process;

/// The model that engines serve unless told otherwise.
pub const MODEL: &str = "sim";

/// Options of engines that answer as fast as a simulation can.
pub const FAST: &[&str] = &["--speedup", "50"];

/// What an engine is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Computes prompts and hands their KV blocks over.
    Prefill,
    /// Takes KV blocks over and generates.
    Decode,
    /// Does both alone.
    Aggregated,
}

impl Role {
    /// As configuration and command line spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Aggregated => "aggregated",
        }
    }
}

/// What `GET /__state` says. Blocks are KV blocks, prompt tokens are tokens.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct State {
    /// Requests to generation paths, refused ones included.
    pub requests: u64,
    /// Requests being computed now; those that stand in line are not among them.
    pub running: u64,
    /// Hand-offs given out.
    pub handoffs_issued: u64,
    /// Hand-offs whose blocks were pulled.
    pub handoffs_consumed: u64,
    /// Hand-offs whose lease ran out first.
    pub handoffs_expired: u64,
    /// Blocks given out for pulling.
    pub blocks_issued: u64,
    /// Blocks pulled.
    pub blocks_pulled: u64,
    /// Issued minus pulled.
    pub blocks_unpulled: u64,
    /// Decode requests without a hand-off.
    pub refused_missing_handoff: u64,
    /// Decode requests with one that was never given out.
    pub refused_wrong_handoff: u64,
    /// Decode requests with one that had been used.
    pub refused_used_handoff: u64,
    /// Prompt tokens that this engine computed itself.
    pub prompt_tokens_computed: u64,
    /// Requests answered with success.
    pub answered: u64,
}

impl State {
    /// Decode requests refused for their hand-off, whatever was wrong with it.
    pub fn refused(&self) -> u64 {
        self.refused_missing_handoff + self.refused_wrong_handoff + self.refused_used_handoff
    }
}

/// One request as an engine got it.
#[derive(Clone, Debug, Deserialize)]
pub struct Recorded {
    /// Its method.
    pub method: String,
    /// Its path.
    pub path: String,
    /// Its headers in order, doubles kept.
    pub headers: Vec<(String, String)>,
    /// Its body where that is UTF-8 and not above 1 MiB.
    pub body: Option<String>,
    /// The length of its body in bytes.
    pub body_bytes: usize,
}

impl Recorded {
    /// Every value of the header `name`.
    pub fn values(&self, name: &str) -> Vec<&str> {
        let named = |(key, _): &&(String, String)| key.eq_ignore_ascii_case(name);
        let values = self.headers.iter().filter(named);
        values.map(|(_, value)| value.as_str()).collect()
    }

    /// The body as text.
    pub fn text(&self) -> &str {
        self.body
            .as_deref()
            .unwrap_or_else(|| panic!("the engine kept no text of {self:?}"))
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(self.text())
            .unwrap_or_else(|error| panic!("not JSON ({error}): {}", self.text()))
    }
}

#[derive(Deserialize)]
struct Ready {
    ready: bool,
    role: String,
    address: SocketAddr,
}

/// A simulated engine.
pub struct Engine {
    /// What it is for.
    pub role: Role,
    /// Where it listens.
    pub address: SocketAddr,
    process: Process,
}

impl Engine {
    /// Starts an engine on a free port.
    pub async fn start(role: Role, options: &[&str]) -> Engine {
        let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
        Engine::start_at(anywhere, role, options).await
    }

    /// Starts an engine at this address.
    pub async fn start_at(address: SocketAddr, role: Role, options: &[&str]) -> Engine {
        let mut command = Command::new(paths::harness());
        command
            .args(["engine", "--role", role.as_str(), "--listen"])
            .arg(address.to_string())
            .args(["--json", "--until-stdin-closes"])
            .args(options);
        let started = Process::start::<Ready>(command, role.as_str()).await;
        let (process, ready) = started.unwrap_or_else(|failure| failure.fail("an engine"));
        assert!(
            ready.ready && ready.role == role.as_str(),
            "not the engine that was asked for"
        );
        Engine {
            role,
            address: ready.address,
            process,
        }
    }

    /// Ends it as `kill -9` does.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Its counters.
    pub async fn state(&self) -> State {
        state_of(self.address).await
    }

    /// The last requests to generation paths, oldest first.
    pub async fn requests(&self) -> Vec<Recorded> {
        ask(self.address, "/__requests").await
    }

    /// The one request to a generation path that it got.
    pub async fn only_request(&self) -> Recorded {
        let mut requests = self.requests().await;
        assert_eq!(
            requests.len(),
            1,
            "the {} engine got {requests:?}",
            self.role.as_str()
        );
        requests.remove(0)
    }
}

/// The counters of the engine at this address.
pub async fn state_of(engine: SocketAddr) -> State {
    ask(engine, "/__state").await
}

async fn ask<T: for<'de> Deserialize<'de>>(engine: SocketAddr, path: &str) -> T {
    let reply = client::send(engine, Ask::get(path)).await.expect(200);
    serde_json::from_slice(&reply.body)
        .unwrap_or_else(|error| panic!("{path} is not as agreed ({error}): {}", reply.text()))
}

/// The engines behind a gateway.
pub struct Fleet {
    /// Those that prefill.
    pub prefill: Vec<Engine>,
    /// Those that decode.
    pub decode: Vec<Engine>,
    /// Those that do both.
    pub aggregated: Vec<Engine>,
}

impl Fleet {
    /// Starts this many engines of each role, all with the same options.
    pub async fn start(prefill: usize, decode: usize, options: &[&str]) -> Fleet {
        Fleet::start_with_aggregated(prefill, decode, 0, options).await
    }

    /// The same, with aggregated engines beside.
    pub async fn start_with_aggregated(
        prefill: usize,
        decode: usize,
        aggregated: usize,
        options: &[&str],
    ) -> Fleet {
        Fleet {
            prefill: several(Role::Prefill, prefill, options).await,
            decode: several(Role::Decode, decode, options).await,
            aggregated: several(Role::Aggregated, aggregated, options).await,
        }
    }

    /// Every engine.
    pub fn engines(&self) -> impl Iterator<Item = &Engine> {
        let disaggregated = self.prefill.iter().chain(&self.decode);
        disaggregated.chain(&self.aggregated)
    }

    /// A configuration with this fleet as its one static pool, response headers and the status page on.
    pub fn config(&self) -> Value {
        let worker = |engine: &Engine| {
            json!({
                "address": engine.address.to_string(),
                "role": engine.role.as_str(),
                "model": MODEL,
            })
        };
        let workers: Vec<Value> = self.engines().map(worker).collect();
        json!({
            "pools": [{
                "name": "sim",
                "protocol": "nixl",
                "discovery": {"static": {"workers": workers}},
            }],
            "response_headers": true,
            "status": true,
        })
    }

    /// The addresses of the prefill engines.
    pub fn prefill_addresses(&self) -> Vec<String> {
        addresses(&self.prefill)
    }

    /// The addresses of the decode engines.
    pub fn decode_addresses(&self) -> Vec<String> {
        addresses(&self.decode)
    }

    /// The counters of the prefill engines, added up.
    pub async fn prefill_total(&self) -> State {
        total(&self.prefill).await
    }

    /// The counters of the decode engines, added up.
    pub async fn decode_total(&self) -> State {
        total(&self.decode).await
    }

    /// Fails where any decode engine was sent a request without a good hand-off.
    pub async fn assert_no_decode_refused(&self) {
        for engine in &self.decode {
            let state = engine.state().await;
            assert_eq!(state.refused(), 0, "a decode engine refused: {state:?}");
        }
    }
}

async fn several(role: Role, count: usize, options: &[&str]) -> Vec<Engine> {
    join_all((0..count).map(|_| Engine::start(role, options))).await
}

fn addresses(engines: &[Engine]) -> Vec<String> {
    let address = |engine: &Engine| engine.address.to_string();
    engines.iter().map(address).collect()
}

async fn total(engines: &[Engine]) -> State {
    let states = join_all(engines.iter().map(Engine::state)).await;
    states.into_iter().fold(State::default(), |sum, one| State {
        requests: sum.requests + one.requests,
        running: sum.running + one.running,
        handoffs_issued: sum.handoffs_issued + one.handoffs_issued,
        handoffs_consumed: sum.handoffs_consumed + one.handoffs_consumed,
        handoffs_expired: sum.handoffs_expired + one.handoffs_expired,
        blocks_issued: sum.blocks_issued + one.blocks_issued,
        blocks_pulled: sum.blocks_pulled + one.blocks_pulled,
        blocks_unpulled: sum.blocks_unpulled + one.blocks_unpulled,
        refused_missing_handoff: sum.refused_missing_handoff + one.refused_missing_handoff,
        refused_wrong_handoff: sum.refused_wrong_handoff + one.refused_wrong_handoff,
        refused_used_handoff: sum.refused_used_handoff + one.refused_used_handoff,
        prompt_tokens_computed: sum.prompt_tokens_computed + one.prompt_tokens_computed,
        answered: sum.answered + one.answered,
    })
}
