//! Owns simulated engines, each its own process, and their reports about received requests.

use std::net::SocketAddr;
use std::process::Command;

use futures_util::future::join_all;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::{self, Ask};
use crate::paths;
use crate::process::Process;

/// Default model of the engines.
pub const MODEL: &str = "sim";

/// Options of engines that answer as fast as a simulation can.
pub const FAST: &[&str] = &["--speedup", "50"];

/// Role of an engine.
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
    /// Name in configuration and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Aggregated => "aggregated",
        }
    }
}

/// Body of `GET /__state`. Blocks are KV blocks, prompt tokens are tokens.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct State {
    /// Requests to generation paths, refused ones included.
    pub requests: u64,
    /// Requests being computed now, without queued ones.
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
    /// Decode requests with a hand-off that was never given out.
    pub refused_wrong_handoff: u64,
    /// Decode requests with a hand-off already used.
    pub refused_used_handoff: u64,
    /// Prompt tokens that this engine computed itself.
    pub prompt_tokens_computed: u64,
    /// Requests answered with success.
    pub answered: u64,
    /// Hand-offs given out.
    pub issued: u64,
    /// Hand-offs pulled.
    pub pulled: u64,
    /// Hand-offs whose lease ran out first.
    pub expired: u64,
    /// Hand-offs given out and neither pulled nor still under lease: expired or lost.
    pub leaked: u64,
    /// Requests refused because of their hand-off, whether the hand-off or its engine was at fault.
    pub refused: u64,
    /// Decode: prompt tokens computed beyond those that the protocol leaves to decode. Must be 0.
    pub recomputed: u64,
    /// Requests that failed because of an injected fault.
    pub failed_by_fault: u64,
    /// SGLang: requests ended by `/abort_request`.
    #[serde(default)]
    pub aborted_by_request: u64,
    /// SGLang: requests without a room.
    #[serde(default)]
    pub refused_missing_room: u64,
    /// SGLang: requests whose room is no number up to 2^63 − 1.
    #[serde(default)]
    pub refused_bad_room: u64,
    /// SGLang: requests that name a wrong bootstrap server.
    #[serde(default)]
    pub refused_wrong_bootstrap: u64,
    /// SGLang: requests with a room already used.
    #[serde(default)]
    pub refused_used_room: u64,
    /// SGLang: requests whose room belongs to another rank.
    #[serde(default)]
    pub refused_rank_conflict: u64,
    /// Requests by kind.
    #[serde(default)]
    pub requests_by_leg: LegCounts,
}

/// Requests by kind.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct LegCounts {
    /// Prefill legs.
    pub prefill: u64,
    /// Decode legs.
    pub decode: u64,
    /// Aggregated requests.
    pub whole: u64,
}

impl State {
    /// Requests refused because of their hand-off or their room, for any reason.
    pub fn refused(&self) -> u64 {
        let handoff =
            self.refused_missing_handoff + self.refused_wrong_handoff + self.refused_used_handoff;
        let room = self.refused_missing_room
            + self.refused_bad_room
            + self.refused_wrong_bootstrap
            + self.refused_used_room
            + self.refused_rank_conflict;
        handoff + room
    }

    /// The sum of both.
    pub fn plus(&self, other: &State) -> State {
        let legs =
            |one: fn(&LegCounts) -> u64| one(&self.requests_by_leg) + one(&other.requests_by_leg);
        State {
            requests: self.requests + other.requests,
            running: self.running + other.running,
            handoffs_issued: self.handoffs_issued + other.handoffs_issued,
            handoffs_consumed: self.handoffs_consumed + other.handoffs_consumed,
            handoffs_expired: self.handoffs_expired + other.handoffs_expired,
            blocks_issued: self.blocks_issued + other.blocks_issued,
            blocks_pulled: self.blocks_pulled + other.blocks_pulled,
            blocks_unpulled: self.blocks_unpulled + other.blocks_unpulled,
            refused_missing_handoff: self.refused_missing_handoff + other.refused_missing_handoff,
            refused_wrong_handoff: self.refused_wrong_handoff + other.refused_wrong_handoff,
            refused_used_handoff: self.refused_used_handoff + other.refused_used_handoff,
            prompt_tokens_computed: self.prompt_tokens_computed + other.prompt_tokens_computed,
            answered: self.answered + other.answered,
            issued: self.issued + other.issued,
            pulled: self.pulled + other.pulled,
            expired: self.expired + other.expired,
            leaked: self.leaked + other.leaked,
            refused: self.refused + other.refused,
            recomputed: self.recomputed + other.recomputed,
            failed_by_fault: self.failed_by_fault + other.failed_by_fault,
            aborted_by_request: self.aborted_by_request + other.aborted_by_request,
            refused_missing_room: self.refused_missing_room + other.refused_missing_room,
            refused_bad_room: self.refused_bad_room + other.refused_bad_room,
            refused_wrong_bootstrap: self.refused_wrong_bootstrap + other.refused_wrong_bootstrap,
            refused_used_room: self.refused_used_room + other.refused_used_room,
            refused_rank_conflict: self.refused_rank_conflict + other.refused_rank_conflict,
            requests_by_leg: LegCounts {
                prefill: legs(|one| one.prefill),
                decode: legs(|one| one.decode),
                whole: legs(|one| one.whole),
            },
        }
    }
}

/// One request as an engine received it.
#[derive(Clone, Debug, Deserialize)]
pub struct RecordedRequest {
    /// HTTP method.
    pub method: String,
    /// HTTP path.
    pub path: String,
    /// Headers in order, duplicates kept.
    pub headers: Vec<(String, String)>,
    /// Body, if UTF-8 and at most 1 MiB.
    pub body: Option<String>,
    /// Length of the body in bytes.
    pub body_bytes: usize,
}

impl RecordedRequest {
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
    // Only of an SGLang prefill engine.
    #[serde(default)]
    bootstrap: Option<SocketAddr>,
}

/// A simulated engine.
pub struct Engine {
    /// Role of the engine.
    pub role: Role,
    /// Address of the engine.
    pub address: SocketAddr,
    /// Bootstrap address of an SGLang prefill engine, for its partners.
    pub bootstrap: Option<SocketAddr>,
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
            bootstrap: ready.bootstrap,
            process,
        }
    }

    /// Ends the engine as `kill -9` does.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// The engine's entry in a configuration or a document of workers.
    pub fn listed(&self) -> Value {
        json!({
            "address": self.address.to_string(),
            "role": self.role.as_str(),
            "model": MODEL,
        })
    }

    /// Sets the answer of the health check, such as `{"status": 503}` or `{"delay_ms": 3000}`.
    pub async fn set_health(&self, health: &Value) {
        let ask = Ask::post("/__health", health.to_string());
        client::send(self.address, ask).await.expect(200);
    }

    /// Injects a fault, such as `{"kind": "status", "status": 503}`; returns its id. `pd-harness engine --help` lists them.
    pub async fn fault(&self, fault: &Value) -> u64 {
        let ask = Ask::post("/__fault", fault.to_string());
        let reply = client::send(self.address, ask).await.expect(200);
        let answer: Value = serde_json::from_slice(&reply.body).expect("JSON");
        answer["id"].as_u64().expect("an id")
    }

    /// Ends all faults. A request that already hangs keeps hanging.
    pub async fn clear_faults(&self) {
        let ask = Ask::delete("/__fault");
        client::send(self.address, ask).await.expect(200);
    }

    /// The engine's counters.
    pub async fn state(&self) -> State {
        state_of(self.address).await
    }

    /// The last requests to generation paths, oldest first.
    pub async fn requests(&self) -> Vec<RecordedRequest> {
        ask(self.address, "/__requests").await
    }

    /// The only request to a generation path; fails unless there is exactly one.
    pub async fn only_request(&self) -> RecordedRequest {
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
    /// Prefill engines.
    pub prefill: Vec<Engine>,
    /// Decode engines.
    pub decode: Vec<Engine>,
    /// Aggregated engines.
    pub aggregated: Vec<Engine>,
}

impl Fleet {
    /// Starts this many engines of each role, all with the same options.
    pub async fn start(prefill: usize, decode: usize, options: &[&str]) -> Fleet {
        Fleet::start_with_aggregated(prefill, decode, 0, options).await
    }

    /// The same, with aggregated engines in addition.
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

    /// A configuration with this fleet as its one static pool, response headers and the status page enabled.
    pub fn config(&self) -> Value {
        self.config_with(json!({}))
    }

    /// The same, with these further fields of the pool.
    pub fn config_with(&self, pool: Value) -> Value {
        let workers = self.engines().map(Engine::listed).collect();
        static_config(workers, pool)
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

    /// Fails if any decode engine received a request without a valid hand-off.
    pub async fn assert_no_decode_refused(&self) {
        for engine in &self.decode {
            let state = engine.state().await;
            assert_eq!(state.refused(), 0, "a decode engine refused: {state:?}");
        }
    }
}

/// The engines as a configuration lists them: named by `letter` and number, with fixed ids.
pub fn named(engines: &[Engine], letter: &str, first_id: u64) -> Vec<Value> {
    let one = |(at, engine): (usize, &Engine)| {
        let fields = json!({"name": format!("{letter}{at}"), "id": first_id + at as u64});
        with(engine.listed(), fields)
    };
    engines.iter().enumerate().map(one).collect()
}

/// A configuration with one pool of these workers and these further fields, response headers and the status page enabled.
pub fn static_config(workers: Vec<Value>, pool: Value) -> Value {
    let base = json!({"discovery": {"static": {"workers": workers}}});
    config(with(base, pool))
}

/// A configuration with one NIXL pool of these fields, response headers and the status page enabled.
pub fn config(pool: Value) -> Value {
    let base = json!({"name": "sim", "protocol": "nixl"});
    json!({
        "pools": [with(base, pool)],
        "response_headers": true,
        "status": true,
    })
}

/// A pool field that selects workers in turn, for tests that rely on the order.
pub fn in_turns() -> Value {
    json!({"selection": {"prefill": "round_robin", "decode": "round_robin"}})
}

/// `base` with the members of `more`; `more` wins.
pub fn with(mut base: Value, more: Value) -> Value {
    if let (Some(base), Value::Object(more)) = (base.as_object_mut(), more) {
        base.extend(more);
    }
    base
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
    let sum = |sum: State, one: State| sum.plus(&one);
    states.into_iter().fold(State::default(), sum)
}
