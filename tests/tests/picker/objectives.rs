//! Objectives and their priorities, and flows that take turns. One thread: a queue is one thread's own.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Ask, Failure, Reply, chat_body};
use pd_router_e2e::engines::{Fleet, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::rig::{CHAT, QUICK, REASON};

const OBJECTIVE: &str = "x-llm-d-inference-objective";
const FLOW: &str = "x-llm-d-inference-fairness-id";

/// Headers in which a gateway in front gives a request's priority and flow.
const HEADERS: [&str; 4] = [
    OBJECTIVE,
    FLOW,
    "x-gateway-inference-objective",
    "x-gateway-inference-fairness-id",
];

/// A gateway with one worker of each role, which is busy with one answer.
async fn start(proxy: Proxy, trusts: bool) -> (Fleet, Gateway) {
    let fleet = Fleet::start(1, 1, QUICK).await;
    let pool = json!({
        "trust_clients": trusts,
        "objectives": {"batch": -1, "usual": 0, "urgent": 10},
        "admission": {"decode": {"blocks": 0}, "queue": {"deadline_ms": 120_000}},
    });
    let gateway = Gateway::start_on_one_thread(proxy, &fleet.config_with(pool), &[]).await;
    (fleet, gateway)
}

/// Keeps the decode worker busy until the returned value is dropped.
async fn occupy(gateway: &Gateway) -> Raw {
    let endless = with(
        chat_body("the first"),
        json!({"stream": true, "max_tokens": 1_000_000}),
    );
    let mut client = Raw::connect(gateway.listen).await;
    client
        .write(&raw::post(CHAT, &[], endless.to_string().as_bytes()))
        .await;
    client.read_until("data:", 3).await;
    client
}

type PendingReply = JoinHandle<Result<Reply, Failure>>;

/// Sends a request that waits at position `place`.
async fn wait_in_line(gateway: &Gateway, ask: Ask, place: u64) -> PendingReply {
    let pending = tokio::spawn(client::try_send(gateway.listen, ask));
    eventually(&format!("{place} wait"), GENEROUS, || async {
        let status = gateway.status().await;
        (status["waiting"] == place)
            .then_some(())
            .ok_or(status.to_string())
    })
    .await;
    pending
}

async fn answer(pending: PendingReply) -> Reply {
    let outcome = pending.await.unwrap_or_else(|error| panic!("{error}"));
    outcome.unwrap_or_else(|failure| panic!("no answer: {failure}"))
}

/// Prompts of the decode worker's requests in order, without the first.
async fn served(fleet: &Fleet) -> Vec<String> {
    let legs = fleet.decode[0].requests().await;
    let content = |body: Value| {
        body["messages"][0]["content"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    legs.iter().skip(1).map(|leg| content(leg.json())).collect()
}

/// Fails unless this is the refusal of a sheddable request.
#[track_caller]
fn assert_shed(reply: &Reply) {
    reply.expect_code(429, "overloaded");
    assert_eq!(reply.header(REASON), Some("rejected-saturated"));
    let retry_after = reply.header("retry-after").map(str::parse::<u64>);
    assert!(matches!(retry_after, Some(Ok(_))), "{reply:?}");
}

pub async fn a_sheddable_request_is_refused_where_a_normal_one_waits(proxy: Proxy) {
    let (fleet, gateway) = start(proxy, true).await;
    // While a worker is free, such a request is served like any other.
    gateway
        .send(Ask::chat("hello").header(OBJECTIVE, "batch"))
        .await
        .expect_tokens(4);
    gateway.assert_comes_to_rest().await;

    let first = occupy(&gateway).await;
    let before = fleet.prefill_total().await.requests;
    for name in [OBJECTIVE, "x-gateway-inference-objective"] {
        let reply = gateway.send(Ask::chat("shed").header(name, "batch")).await;
        assert_shed(&reply);
    }
    // llm-d's header takes precedence.
    let both = Ask::chat("shed").header(OBJECTIVE, "batch");
    let both = both.header("x-gateway-inference-objective", "urgent");
    assert_shed(&gateway.send(both).await);

    let mut pending = Vec::new();
    let waits = |objective| Ask::chat("waits").header(OBJECTIVE, objective);
    // An unknown or empty objective counts as none.
    for (ask, place) in [
        (Ask::chat("waits"), 1),
        (waits("usual"), 2),
        (waits("nobody-knows"), 3),
        (waits(""), 4),
    ] {
        pending.push(wait_in_line(&gateway, ask, place).await);
    }
    assert_eq!(
        fleet.prefill_total().await.requests,
        before,
        "no request was admitted"
    );
    drop(first);
    for pending in pending {
        answer(pending).await.expect_tokens(4);
    }
    for engine in fleet.engines() {
        for got in engine.requests().await {
            assert!(
                HEADERS.iter().all(|name| got.values(name).is_empty()),
                "{got:?}"
            );
        }
    }
    gateway.assert_comes_to_rest().await;
}

pub async fn the_urgent_come_first_and_flows_take_turns(proxy: Proxy) {
    let (fleet, gateway) = start(proxy, true).await;
    let first = occupy(&gateway).await;
    let of = |content: &str, flow: &str| Ask::chat(content).header(FLOW, flow);
    let mut pending = Vec::new();
    for (ask, place) in [
        (of("greedy 1", "greedy"), 1),
        (of("greedy 2", "greedy"), 2),
        (of("greedy 3", "greedy"), 3),
        (of("modest", "modest"), 4),
        (of("urgent", "greedy").header(OBJECTIVE, "urgent"), 5),
    ] {
        pending.push(wait_in_line(&gateway, ask, place).await);
    }
    drop(first);
    for pending in pending {
        answer(pending).await.expect_tokens(4);
    }
    let order = served(&fleet).await;
    assert_eq!(order[0], "urgent");
    let at = |content: &str| order.iter().position(|one| one == content);
    assert!(at("modest") < at("greedy 2"), "{order:?}");
    assert!(
        at("greedy 1") < at("greedy 2") && at("greedy 2") < at("greedy 3"),
        "{order:?}"
    );
    gateway.assert_comes_to_rest().await;
}

/// From an untrusted caller these headers are removed and have no effect, better or worse.
pub async fn what_anybody_says_of_its_worth_is_nothing(proxy: Proxy) {
    let (fleet, gateway) = start(proxy, false).await;
    let first = occupy(&gateway).await;
    let mut pending = Vec::new();
    let forged = |content: &str, objective: &str| {
        let ask = Ask::chat(content)
            .header(OBJECTIVE, objective)
            .header(FLOW, content);
        ask.header("X-Gateway-Inference-Objective", objective)
            .header("X-Gateway-Inference-Fairness-ID", content)
    };
    for (ask, place) in [
        (Ask::chat("1"), 1),
        (forged("2", "batch"), 2),
        (forged("3", "urgent"), 3),
    ] {
        pending.push(wait_in_line(&gateway, ask, place).await);
    }
    drop(first);
    for pending in pending {
        answer(pending).await.expect_tokens(4);
    }
    assert_eq!(served(&fleet).await, ["1", "2", "3"]);
    for engine in fleet.engines() {
        for got in engine.requests().await {
            assert!(
                HEADERS.iter().all(|name| got.values(name).is_empty()),
                "{got:?}"
            );
        }
    }
    gateway.assert_comes_to_rest().await;
}
