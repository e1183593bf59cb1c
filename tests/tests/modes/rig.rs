//! Two workers of each role with names and ids, and callers trusted with routing overrides.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Connection, Pair, Reply, chat_body};
use pd_router_e2e::engines::{Engine, FAST, Fleet, in_turns, static_config, with};
use pd_router_e2e::gateway::Gateway;
use serde_json::{Value, json};

pub const CHAT: &str = "/v1/chat/completions";

/// Ids that neither a signed number nor a float holds, and a small one.
pub const PREFILL_IDS: [u64; 2] = [u64::MAX, 9_007_199_254_740_993];
pub const DECODE_IDS: [u64; 2] = [10_786_370_784_182_999_275, 7];

pub const PREFILL_NAMES: [&str; 2] = ["p0", "p1"];
pub const DECODE_NAMES: [&str; 2] = ["d0", "d1"];

pub struct Rig {
    pub fleet: Fleet,
    pub gateway: Gateway,
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
        let fleet = Fleet::start(2, 2, FAST).await;
        let config = static_config(workers(&fleet), pool);
        let gateway = Gateway::start(proxy, &config, &[]).await;
        Rig { fleet, gateway }
    }

    /// Fails if any engine got a request.
    pub async fn assert_no_engine_requests(&self) {
        for engine in self.fleet.engines() {
            let state = engine.state().await;
            assert_eq!(state.requests, 0, "{}: {state:?}", engine.role.as_str());
        }
    }

    /// A connection, whose requests all meet one thread.
    pub async fn connect(&self) -> Connection {
        let opened = Connection::open(self.gateway.listen).await;
        opened.unwrap_or_else(|failure| panic!("no connection: {failure}"))
    }
}

/// The fleet's workers with names and ids.
pub fn workers(fleet: &Fleet) -> Vec<Value> {
    let named = |engines: &[Engine], names: [&str; 2], ids: [u64; 2]| -> Vec<Value> {
        let one = |(at, engine): (usize, &Engine)| {
            with(engine.listed(), json!({"name": names[at], "id": ids[at]}))
        };
        engines.iter().enumerate().map(one).collect()
    };
    [
        named(&fleet.prefill, PREFILL_NAMES, PREFILL_IDS),
        named(&fleet.decode, DECODE_NAMES, DECODE_IDS),
    ]
    .concat()
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

pub fn pair(prefill: &str, decode: &str) -> Pair {
    Pair {
        prefill: prefill.to_owned(),
        decode: decode.to_owned(),
    }
}

/// Sends over this connection; fails without an answer of 200.
pub async fn answered(connection: &mut Connection, ask: Ask) -> Reply {
    let reply = connection.send(ask).await;
    reply
        .unwrap_or_else(|failure| panic!("no answer: {failure}"))
        .expect(200)
}
