//! Two workers of each role with names and ids, and callers trusted with routing overrides.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Connection, Pair, Reply, chat_body};
use pd_router_e2e::engine_set::EngineSlot;
use pd_router_e2e::engines::{in_turns, with};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use serde_json::{Value, json};

pub const CHAT: &str = "/v1/chat/completions";

/// A worker of the test.
#[derive(Clone, Debug)]
pub struct Worker {
    pub id: u64,
    pub name: String,
}

pub struct Rig {
    pub fixture: Fixture,
    pub prefill: Vec<Worker>,
    pub decode: Vec<Worker>,
}

impl Rig {
    /// A gateway that trusts its callers.
    pub async fn trusting(proxy: Proxy) -> Rig {
        Rig::start(proxy, json!({"trust_clients": true})).await
    }

    /// The same with round robin, so that a taken turn is visible.
    pub async fn trusting_in_turns(proxy: Proxy) -> Rig {
        Rig::start(proxy, with(in_turns(), json!({"trust_clients": true}))).await
    }

    /// A gateway with these further fields of the pool.
    pub async fn start(proxy: Proxy, pool: Value) -> Rig {
        Rig::on(FixtureSpec::nixl(proxy, (2, 2)).pool(pool)).await
    }

    /// The gateway and the workers of this specification.
    pub async fn on(spec: FixtureSpec) -> Rig {
        let fixture = Fixture::acquire(spec).await;
        let workers = |slots: &[EngineSlot]| {
            let worker = |slot: &EngineSlot| Worker {
                id: slot.id(),
                name: slot.name(),
            };
            slots.iter().map(worker).collect()
        };
        Rig {
            prefill: workers(&fixture.engines.prefill),
            decode: workers(&fixture.engines.decode),
            fixture,
        }
    }

    /// The names of these two workers.
    pub fn pair(&self, prefill: usize, decode: usize) -> Pair {
        Pair {
            prefill: self.prefill[prefill].name.clone(),
            decode: self.decode[decode].name.clone(),
        }
    }

    /// Sends one request over its own connection; fails without an answer.
    pub async fn send(&self, ask: Ask) -> Reply {
        self.fixture.send(ask).await
    }

    /// Fails if any engine got a request.
    pub async fn assert_no_engine_requests(&self) {
        for engine in self.fixture.living() {
            let state = engine.state().await;
            assert_eq!(state.requests, 0, "{}: {state:?}", engine.role.as_str());
        }
    }

    /// A connection, whose requests all meet one thread.
    pub async fn connect(&self) -> Connection {
        let opened = Connection::open(self.fixture.gateway.listen).await;
        opened.unwrap_or_else(|failure| panic!("no connection: {failure}"))
    }

    /// Releases the gateway to the next test, once no booking is open.
    pub async fn ends(self) {
        self.fixture.gateway.assert_comes_to_rest().await;
        self.fixture.release();
    }
}

/// A chat request with this `nvext`.
pub fn chat_with(nvext: Value) -> Value {
    with(chat_body("hello"), json!({"nvext": nvext}))
}

pub fn ask(body: &Value) -> Ask {
    Ask::post(CHAT, body.to_string())
}

pub fn query(body: Value) -> Value {
    let mut body = body;
    body["nvext"]["annotations"] = json!(["query_instance_id:"]);
    body
}

/// Sends over this connection; fails without an answer of 200.
pub async fn answered(connection: &mut Connection, ask: Ask) -> Reply {
    let reply = connection.send(ask).await;
    reply
        .unwrap_or_else(|failure| panic!("no answer: {failure}"))
        .expect(200)
}
