//! Prompts that stay on a decode worker, since a hand-off would cost more than it saves.

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply, chat_body};
use pd_router_e2e::engines::{Engine, FAST, Role, static_config, with};
use pd_router_e2e::gateway::Gateway;
use serde_json::json;

use crate::rig::{CHAT, Conversation, Spelling};

/// The model whose decode workers report their number of blocks.
const KNOWN: &str = "known";
/// The model whose decode workers do not.
const UNKNOWN: &str = "unknown";

/// Engines of these roles, each with its model. Engines listed as decode are aggregated ones.
const ENGINES: [(&str, Role); 5] = [
    (KNOWN, Role::Prefill),
    (KNOWN, Role::Aggregated),
    (KNOWN, Role::Aggregated),
    (UNKNOWN, Role::Prefill),
    (UNKNOWN, Role::Aggregated),
];

struct Rig {
    engines: Vec<Engine>,
    gateway: Gateway,
}

impl Rig {
    async fn start(proxy: Proxy) -> Rig {
        let started = ENGINES.iter().map(|(model, role)| async move {
            let options = [FAST, &["--model", model]].concat();
            Engine::start(*role, &options).await
        });
        let engines = join_all(started).await;
        let workers = engines.iter().zip(ENGINES).map(|(engine, (model, role))| {
            let line = with(engine.listed(), json!({"model": model}));
            match (role, model) {
                (Role::Prefill, _) => line,
                (_, KNOWN) => with(line, json!({"role": "decode", "kv_blocks": 4000})),
                _ => with(line, json!({"role": "decode"})),
            }
        });
        let pool = json!({
            "decode": {"runs_whole_requests": true},
            "conditional": {"short_tokens": 32, "decode_busy_fraction": 0.9},
        });
        let config = static_config(workers.collect(), pool);
        let gateway = Gateway::start_on_one_thread(proxy, &config, &[]).await;
        Rig { engines, gateway }
    }

    /// Number of prompts that the model's prefill engine received.
    async fn prefills(&self, model: &str) -> u64 {
        let at = ENGINES
            .iter()
            .position(|one| *one == (model, Role::Prefill));
        let engine = at.and_then(|at| self.engines.get(at));
        let engine = engine.unwrap_or_else(|| panic!("no prefill engine of {model}"));
        engine.state().await.requests
    }

    /// Sends a conversation's next turn to a model; returns its decode worker and its route.
    async fn turn(&self, conversation: &mut Conversation, model: &str) -> (String, Route) {
        let before = self.prefills(model).await;
        let body = with(conversation.body(), json!({"model": model}));
        let reply = self.gateway.send(Ask::post(CHAT, body.to_string())).await;
        let reply = reply.expect(200);
        conversation.append_reply(&reply);
        let prefilled = self.prefills(model).await - before;
        let decode = reply.header("x-pd-router-decode").unwrap_or_default();
        (decode.to_owned(), route_of(&reply, prefilled))
    }

    async fn bypasses(&self) -> f64 {
        let metrics = self.gateway.metrics().await;
        let labels = [("reason", "conditional")];
        let bypasses = metrics.sum_where("pd_router_bypasses_total", &labels);
        assert_eq!(metrics.sum("pd_router_fallbacks_total"), Some(0.0));
        bypasses.unwrap_or_default()
    }
}

/// Workers that a request passed through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    ThroughPrefill,
    DecodeOnly,
}

/// The route by the response, which must agree with the prefill engine's count.
fn route_of(reply: &Reply, prefilled: u64) -> Route {
    match (reply.header("x-pd-router-prefill"), prefilled) {
        (Some(_), 1) => Route::ThroughPrefill,
        (None, 0) => Route::DecodeOnly,
        other => panic!("named and prefilled: {other:?}"),
    }
}

pub async fn what_decode_holds_and_what_is_short_stays_there(proxy: Proxy) {
    let rig = Rig::start(proxy).await;
    let mut conversation = Conversation::about("rivers", Spelling::Alternating);
    let (decode, route) = rig.turn(&mut conversation, KNOWN).await;
    assert_eq!(route, Route::ThroughPrefill);
    for _ in 0..3 {
        let next = rig.turn(&mut conversation, KNOWN).await;
        assert_eq!(next, (decode.clone(), Route::DecodeOnly));
    }
    assert_eq!(rig.bypasses().await, 3.0);
    let at = rig
        .engines
        .iter()
        .position(|engine| engine.address.to_string() == decode);
    let engine = &rig.engines[at.unwrap_or_default()];
    let legs = engine.requests().await;
    assert!(legs[0].json()["kv_transfer_params"].is_object());
    for leg in &legs[1..] {
        assert!(leg.json().get("kv_transfer_params").is_none(), "{leg:?}");
    }

    let before = rig.prefills(KNOWN).await;
    let short = with(chat_body("hello"), json!({"model": KNOWN}));
    let reply = rig.gateway.send(Ask::post(CHAT, short.to_string())).await;
    assert_eq!(reply.expect(200).header("x-pd-router-prefill"), None);
    assert_eq!(rig.prefills(KNOWN).await, before);

    // The other model's worker reports no number of blocks: its prompts do not stay.
    let mut other = Conversation::about("lakes", Spelling::Text);
    for _ in 0..3 {
        let (_, route) = rig.turn(&mut other, UNKNOWN).await;
        assert_eq!(route, Route::ThroughPrefill);
    }
    clients_have_no_say(&rig).await;
    assert_eq!(rig.bypasses().await, 4.0);
    rig.gateway.assert_comes_to_rest().await;
}

/// Dynamo's mark for such prompts, in both places where a router might look for it.
async fn clients_have_no_say(rig: &Rig) {
    let long = "Tell me of the desert. ".repeat(100);
    let mark = "x-bypass-remote-prefill";
    let fields = json!({"model": KNOWN, "nvext": {"annotations": [mark, format!("{mark}:true")]}});
    let body = with(chat_body(&long), fields);
    let ask = Ask::post(CHAT, body.to_string()).header(mark, "true");
    let before = rig.prefills(KNOWN).await;
    let reply = rig.gateway.send(ask).await.expect(200);
    let prefilled = rig.prefills(KNOWN).await - before;
    assert_eq!(route_of(&reply, prefilled), Route::ThroughPrefill);
    for engine in &rig.engines {
        for got in engine.requests().await {
            assert!(got.values(mark).is_empty(), "{got:?}");
        }
    }
}
