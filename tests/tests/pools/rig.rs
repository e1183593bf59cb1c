//! Two pools, each with a route, workers and a model of its own.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::conversation::CHAT;
use pd_router_e2e::engines::{Engine, FAST, Fleet, MODEL, with};
use pd_router_e2e::gateway::Gateway;
use serde_json::{Value, json};

/// The pools' names, and the authorities that lead to them.
pub const ONE: &str = "one";
pub const TWO: &str = "two";
pub const TO_ONE: &str = "one.test";
pub const TO_TWO: &str = "two.test";

/// The second pool's model; the first serves [`MODEL`].
pub const OTHER_MODEL: &str = "other";

/// The routes as command-line arguments of a gateway; the last one names no pool.
pub const ROUTES: [&str; 6] = [
    "--route",
    "one.test=one",
    "--route",
    "two.test=two",
    "--route",
    "none.test=",
];

/// A configuration of these pools, with the status page and response headers on.
pub fn configuration(pools: Vec<Value>) -> Value {
    json!({"pools": pools, "response_headers": true, "status": true})
}

/// A pool of this name and these workers in clusters of its own.
pub fn pool(name: &str, protocol: &str, workers: Vec<Value>) -> Value {
    json!({
        "name": name,
        "protocol": protocol,
        "clusters": {"prefill": format!("{name}-prefill"), "decode": format!("{name}-decode")},
        "discovery": {"static": {"workers": workers}},
    })
}

/// A gateway over two pools without anything in common.
pub struct Rig {
    /// Two and two vLLM engines.
    pub one: Fleet,
    /// One and two SGLang engines.
    pub two: Fleet,
    pub gateway: Gateway,
}

impl Rig {
    pub async fn start(proxy: Proxy) -> Rig {
        let one = Fleet::start(2, 2, FAST).await;
        let options = [FAST, &["--dialect", "sglang", "--model", OTHER_MODEL]].concat();
        let two = Fleet::start(1, 2, &options).await;
        let pools = vec![
            pool(ONE, "nixl", one.engines().map(Engine::listed).collect()),
            pool(TWO, "sglang", two.engines().map(listed_with_port).collect()),
        ];
        let gateway = Gateway::start(proxy, &configuration(pools), &ROUTES).await;
        Rig { one, two, gateway }
    }
}

fn listed_with_port(engine: &Engine) -> Value {
    let port = engine.bootstrap.map(|bootstrap| bootstrap.port());
    let line = with(engine.listed(), json!({"model": OTHER_MODEL}));
    match port {
        Some(port) => with(line, json!({"bootstrap_port": port})),
        None => line,
    }
}

/// A chat request for this model through this authority.
pub fn chat(authority: &str, model: &str) -> Ask {
    let body = with(chat_body("hello"), json!({"model": model}));
    Ask::post(CHAT, body.to_string()).to(authority)
}

/// A chat request that the pool behind this authority can answer.
pub fn fitting(authority: &str) -> Ask {
    match authority {
        TO_TWO => chat(TO_TWO, OTHER_MODEL),
        _ => chat(authority, MODEL),
    }
}

/// The pool of this name on a status page.
pub fn pool_of(page: &Value, name: &str) -> Value {
    let pools = page["pools"].as_array().cloned().unwrap_or_default();
    let found = pools.into_iter().find(|pool| pool["pool"] == name);
    found.unwrap_or_else(|| panic!("no pool {name} in {page}"))
}
