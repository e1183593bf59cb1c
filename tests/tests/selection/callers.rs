//! Requests of trusted callers for an explanation of the selection, and for a subset of the workers.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply, chat_body};
use pd_router_e2e::engines::{FAST, Fleet, static_config, with};
use pd_router_e2e::gateway::Gateway;
use serde_json::{Value, json};

use crate::rig::{CHAT, Conversation, Spelling, named};

const EXPLAIN: &str = "x-pd-router-explain";
const SUBSET: &str = "x-gateway-destination-endpoint-subset";

/// Default tokens of a block.
const BLOCK_TOKENS: f64 = 16.0;

async fn start(proxy: Proxy, trusts: bool) -> (Fleet, Gateway) {
    let fleet = Fleet::start(2, 2, FAST).await;
    let workers = [
        named(&fleet.prefill, "p", 11),
        named(&fleet.decode, "d", 21),
    ];
    let config = static_config(workers.concat(), json!({"trust_clients": trusts}));
    let gateway = Gateway::start(proxy, &config, &[]).await;
    (fleet, gateway)
}

fn number(of: &Value, name: &str) -> f64 {
    let number = of[name].as_f64();
    number.unwrap_or_else(|| panic!("no number {name} in {of}"))
}

/// Fails unless these are equal up to rounding.
fn assert_adds_up(sum: f64, parts: f64, terms: &Value) {
    assert!((sum - parts).abs() < 1e-6 * sum.abs().max(1.0), "{terms}");
}

/// The only explanation for this role; its candidates' terms add up, and the selected one has the least cost.
fn choice(reply: &Reply, role: &str) -> Value {
    let header = reply.header(EXPLAIN);
    let header = header.unwrap_or_else(|| panic!("no explanation: {:?}", reply.headers));
    let all: Value =
        serde_json::from_str(header).unwrap_or_else(|error| panic!("not JSON ({error}): {header}"));
    let all = all.as_array().cloned().unwrap_or_default();
    let mut of_role = all.into_iter().filter(|one| one["role"] == role);
    let (Some(choice), None) = (of_role.next(), of_role.next()) else {
        panic!("not one choice of {role} in {header}");
    };
    assert_eq!(choice["policy"], "kv", "{choice}");
    let candidates = choice["candidates"].as_array().cloned();
    let candidates = candidates.unwrap_or_default();
    assert_eq!(candidates.len(), 2, "{choice}");
    let costs: Vec<f64> = candidates.iter().map(|one| cost(one, &choice)).collect();
    let picked: Vec<bool> = candidates.iter().map(|one| one["picked"] == true).collect();
    assert_eq!(picked, [true, false], "{choice}");
    assert!(costs[0] <= costs[1], "{choice}");
    choice
}

/// A candidate's cost, whose terms must add up to it.
fn cost(candidate: &Value, choice: &Value) -> f64 {
    let terms = &candidate["terms"];
    let term = |name| number(terms, name);
    let prefill = match choice["role"] == "prefill" {
        true => {
            let wait = term("queued_tokens") / BLOCK_TOKENS;
            let prompt = number(choice, "prompt_tokens") / BLOCK_TOKENS;
            ((wait + prompt - term("credit_blocks")) * term("slowness")).max(0.0)
        }
        false => 0.0,
    };
    assert_adds_up(term("prefill"), prefill, choice);
    let cost = (term("prefill") + term("decode")) * term("factor");
    assert_adds_up(term("cost"), cost, choice);
    term("cost")
}

fn picked(choice: &Value) -> &str {
    choice["candidates"][0]["worker"]
        .as_str()
        .unwrap_or_default()
}

pub async fn a_trusted_caller_may_ask_why_and_name_a_subset(proxy: Proxy) {
    let (mut fleet, gateway) = start(proxy, true).await;
    an_answer_tells_why(&fleet, &gateway).await;
    a_query_tells_why(&gateway).await;
    a_subset_leaves_only_its_workers(&fleet, &gateway).await;
    // A refusal after a selection carries the explanation too.
    for engine in &mut fleet.prefill {
        engine.kill();
    }
    let reply = gateway.send(Ask::chat("hello").header(EXPLAIN, "1")).await;
    reply.expect_code(503, "prefill_failed");
    choice(&reply, "prefill");
    gateway.assert_comes_to_rest().await;
}

async fn an_answer_tells_why(fleet: &Fleet, gateway: &Gateway) {
    let mut conversation = Conversation::about("why", Spelling::Text);
    for turn in 0..3 {
        let ask = conversation.ask().header(EXPLAIN, "1");
        let reply = gateway.send(ask).await.expect(200);
        conversation.append_reply(&reply);
        let pair = reply.pair();
        let prefill = choice(&reply, "prefill");
        assert_eq!(picked(&prefill), pair.prefill);
        assert_eq!(picked(&choice(&reply, "decode")), pair.decode);
        let blocks = number(&prefill, "prompt_blocks");
        assert!(blocks > 30.0, "turn {turn}: {prefill}");
    }
    let reply = gateway.send(Ask::chat("hello")).await.expect(200);
    assert_eq!(reply.header(EXPLAIN), None, "no explanation was requested");
    for engine in fleet.engines() {
        for got in engine.requests().await {
            assert!(got.values(EXPLAIN).is_empty(), "{got:?}");
        }
    }
}

async fn a_query_tells_why(gateway: &Gateway) {
    let mut query = chat_body("where to?");
    query["nvext"] = json!({"annotations": ["query_instance_id:"]});
    let ask = Ask::post(CHAT, query.to_string()).header(EXPLAIN, "1");
    let reply = gateway.send(ask).await.expect(200);
    assert!(reply.json()["nvext"]["worker_id"].is_object(), "{reply:?}");
    choice(&reply, "prefill");
    choice(&reply, "decode");
}

async fn a_subset_leaves_only_its_workers(fleet: &Fleet, gateway: &Gateway) {
    let (prefills, decodes) = (fleet.prefill_addresses(), fleet.decode_addresses());
    for (p, d) in [(0, 1), (1, 0), (1, 1)] {
        let subset = format!("{}, {}", prefills[p], decodes[d]);
        for _ in 0..4 {
            let reply = gateway.send(Ask::chat("hello").header(SUBSET, &subset));
            let pair = reply.await.expect(200).pair();
            let wanted = (format!("p{p}"), format!("d{d}"));
            assert_eq!((pair.prefill, pair.decode), wanted);
        }
    }
    let all_of_a_host = Ask::chat("hello").header(SUBSET, "127.0.0.1");
    gateway.send(all_of_a_host).await.expect(200);

    let before = fleet.prefill_total().await.requests;
    for (subset, role) in [
        ("", "prefill"),
        ("10.9.9.9:80", "prefill"),
        (decodes[0].as_str(), "prefill"),
        (prefills[0].as_str(), "decode"),
    ] {
        let reply = gateway
            .send(Ask::chat("hello").header(SUBSET, subset))
            .await;
        let message = reply.expect_code(503, "no_eligible_worker");
        assert!(message.contains(role), "{subset}: {message}");
        assert!(message.contains("subset"), "{subset}: {message}");
    }
    assert_eq!(fleet.prefill_total().await.requests, before);
}

pub async fn an_untrusted_caller_gets_no_explanation_and_no_subset(proxy: Proxy) {
    let (fleet, gateway) = start(proxy, false).await;
    for subset in ["", "10.9.9.9:80"] {
        let body = with(
            chat_body("hello"),
            json!({"nvext": {"annotations": ["query_instance_id:"]}}),
        );
        let ask = Ask::post(CHAT, body.to_string()).header(EXPLAIN, "1");
        let reply = gateway.send(ask.header(SUBSET, subset)).await.expect(200);
        assert_eq!(reply.header(EXPLAIN), None, "{reply:?}");
    }
    for engine in fleet.engines() {
        for got in engine.requests().await {
            for header in [EXPLAIN, SUBSET] {
                assert!(got.values(header).is_empty(), "{header}: {got:?}");
            }
        }
    }
    assert_eq!(fleet.decode_total().await.answered, 2);
}
