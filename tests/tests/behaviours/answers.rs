//! Requests that are answered: the workers named, the number of legs, and the client's answer.

use std::collections::{BTreeMap, BTreeSet};

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Pair, Reply, chat_body, crowd};
use pd_router_e2e::engines::{FAST, Fleet, MODEL, Role, in_turns};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

fn completion_body() -> Value {
    json!({"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4})
}

fn streamed(mut body: Value) -> Value {
    body["stream"] = json!(true);
    body
}

pub async fn chats_and_completions_are_answered_by_one_prefill_and_one_decode(proxy: Proxy) {
    let fixture = Fixture::acquire(FixtureSpec::nixl(proxy, (2, 2))).await;
    let (chat, completion) = ("/v1/chat/completions", "/v1/completions");

    let reply = answered(&fixture, chat, &chat_body("hello")).await;
    let content = &reply.json()["choices"][0]["message"]["content"];
    assert!(
        content.as_str().is_some_and(|text| !text.is_empty()),
        "{}",
        reply.text()
    );

    let reply = answered(&fixture, completion, &completion_body()).await;
    let content = &reply.json()["choices"][0]["text"];
    assert!(
        content.as_str().is_some_and(|text| !text.is_empty()),
        "{}",
        reply.text()
    );

    let reply = answered(&fixture, chat, &streamed(chat_body("hello"))).await;
    let text_length = |event: &Value| {
        event["choices"][0]["delta"]["content"]
            .as_str()
            .map(str::len)
    };
    assert!(
        reply.events().iter().filter_map(text_length).sum::<usize>() > 0,
        "{}",
        reply.text()
    );

    let reply = answered(&fixture, completion, &streamed(completion_body())).await;
    let text_length = |event: &Value| event["choices"][0]["text"].as_str().map(str::len);
    assert!(
        reply.events().iter().filter_map(text_length).sum::<usize>() > 0,
        "{}",
        reply.text()
    );

    let prefill = fixture.total(Role::Prefill).await;
    let decode = fixture.total(Role::Decode).await;
    assert_eq!(
        prefill.requests, 4,
        "one prefill for each answer: {prefill:?}"
    );
    assert_eq!(prefill.handoffs_issued, 4, "{prefill:?}");
    assert_eq!(prefill.handoffs_consumed, 4, "{prefill:?}");
    assert_eq!(decode.answered, 4, "{decode:?}");
    assert_eq!(decode.refused(), 0, "{decode:?}");
    assert!(
        decode.prompt_tokens_computed <= decode.answered,
        "at most one prompt token for each request is left to decode: {decode:?}"
    );
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

/// Sends the request; fails unless the answer names a worker of each role.
async fn answered(fixture: &Fixture, path: &str, body: &Value) -> Reply {
    let reply = fixture
        .send(Ask::post(path, body.to_string()))
        .await
        .expect(200);
    let Pair { prefill, decode } = reply.pair();
    for (role, name) in [(Role::Prefill, prefill), (Role::Decode, decode)] {
        let names = fixture.engines.names(role);
        assert!(names.contains(&name), "no {role:?} worker: {name}");
    }
    reply
}

pub async fn responses_are_answered_through_a_hand_off(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let body = json!({"model": MODEL, "input": "hello", "max_output_tokens": 4});
    let ask = Ask::post("/v1/responses", body.to_string());
    let reply = fixture.send(ask).await.expect(200);
    assert!(reply.json().is_object());
    assert_eq!(fixture.total(Role::Prefill).await.handoffs_consumed, 1);
    fixture.assert_good_hand_offs().await;
    // This interface names its limit `max_output_tokens`: it limits the prefill leg as well.
    let leg = fixture.prefill(0).only_request().await.json();
    assert_eq!(leg["max_output_tokens"], 1, "{leg}");
    fixture.release();
}

pub async fn an_answer_streams_while_the_decode_still_runs(proxy: Proxy) {
    // 2,000 tokens of 100 ms: the decode still runs when the first tokens arrive.
    let spec = FixtureSpec::nixl(proxy, (1, 1)).only_options(&["--token-ms", "100"]);
    let fixture = Fixture::acquire(spec).await;
    let mut body = streamed(chat_body("a long story"));
    body["max_tokens"] = json!(2000);
    let request = raw::post("/v1/chat/completions", &[], body.to_string().as_bytes());
    let mut client = Raw::connect(fixture.gateway.listen).await;
    client.write(&request).await;
    client.read_until("data:", 3).await;
    assert_eq!(fixture.total(Role::Decode).await.running, 1);
    drop(client);
    fixture.release();
}

pub async fn workers_are_named_only_where_configured(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut config = fleet.config();
    config
        .as_object_mut()
        .map(|members| members.remove("response_headers"));
    let gateway = Gateway::start(proxy, &config, &[]).await;
    let reply = gateway.send(Ask::chat("hello")).await.expect(200);
    for name in ["x-pd-router-prefill", "x-pd-router-decode"] {
        assert!(!reply.headers.contains_key(name), "{:?}", reply.headers);
    }
}

pub async fn workers_go_by_their_configured_names(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut config = fleet.config();
    let workers = &mut config["pools"][0]["discovery"]["static"]["workers"];
    workers[0]["name"] = json!("prompt-reader");
    workers[1]["name"] = json!("story-teller");
    let gateway = Gateway::start(proxy, &config, &[]).await;
    let pair = gateway.send(Ask::chat("hello")).await.expect(200).pair();
    assert_eq!(pair.prefill, "prompt-reader");
    assert_eq!(pair.decode, "story-teller");
}

pub async fn requests_are_spread_evenly_over_all_pairs(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (2, 2)).pool(in_turns());
    let fixture = Fixture::acquire(spec).await;
    // Ten connections reach both threads.
    let replies = crowd(fixture.gateway.listen, 10, 20, &Ask::chat("hello")).await;

    let mut named: BTreeMap<String, u64> = BTreeMap::new();
    let mut pairs = BTreeSet::new();
    for reply in replies {
        let pair = reply.expect(200).pair();
        *named.entry(pair.prefill.clone()).or_default() += 1;
        *named.entry(pair.decode.clone()).or_default() += 1;
        pairs.insert(pair);
    }
    assert_eq!(pairs.len(), 4, "all pairs are used: {pairs:?}");
    let slots = fixture
        .engines
        .prefill
        .iter()
        .chain(&fixture.engines.decode);
    for slot in slots {
        let name = slot.name();
        let named = named.get(&name).copied().unwrap_or_default();
        let state = slot.state().await;
        assert!(
            (96..=104).contains(&named),
            "{name} was named {named} times"
        );
        assert_eq!(
            state.requests, named,
            "{name} got what the headers say: {state:?}"
        );
        assert_eq!(state.answered, named, "{name}: {state:?}");
    }
    fixture.assert_good_hand_offs().await;
    fixture.release();
}

pub async fn the_models_are_listed(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    for path in ["/v1/models", "/v1/models?limit=1"] {
        let reply = fixture.send(Ask::get(path)).await.expect(200);
        let models = reply.json();
        assert_eq!(models["data"][0]["id"], MODEL, "{models}");
    }
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn the_metrics_count_what_happened(proxy: Proxy) {
    let fleet = Fleet::start(2, 2, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    for reply in crowd(gateway.listen, 4, 3, &Ask::chat("hello")).await {
        reply.expect(200);
    }
    gateway.assert_comes_to_rest().await;
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.expect("pd_router_requests_total"), 12.0);
    assert_eq!(metrics.expect("pd_router_prefill_calls_total"), 12.0);
    for none in [
        "pd_router_prefill_retries_total",
        "pd_router_kv_leaked_handoffs_total",
        "pd_router_kv_leaked_blocks_total",
        "pd_router_kv_unknown_handoffs_total",
        "pd_router_kv_unknown_blocks_total",
    ] {
        assert_eq!(metrics.sum(none).unwrap_or_default(), 0.0, "{none}");
    }
    let fetched = metrics.expect("pd_router_kv_fetched_handoffs_total");
    assert_eq!(fetched, 12.0, "found_b18: each hand-off is counted once");
    // Gauges are published at ticks.
    eventually("the fleet is published", GENEROUS, || async {
        let metrics = gateway.metrics().await;
        let workers = ["prefill", "decode"]
            .map(|role| metrics.sum_where("pd_router_fleet_workers", &[("role", role)]));
        match workers == [Some(2.0); 2] {
            true => Ok(()),
            false => Err(format!("{workers:?}")),
        }
    })
    .await;
}
