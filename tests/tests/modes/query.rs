//! Query-only requests: the workers that would be selected.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply, chat_body};
use pd_router_e2e::engines::{MODEL, Role};
use pd_router_e2e::sse;
use serde_json::{Value, json};

use crate::rig::{Rig, Worker, answered, ask, chat_with, query};

/// Places of the two workers in an answer.
fn chosen(rig: &Rig, nvext: &Value) -> (usize, usize) {
    let workers = &nvext["worker_id"];
    assert_eq!(workers["prefill_dp_rank"], 0, "{nvext}");
    assert_eq!(workers["decode_dp_rank"], 0, "{nvext}");
    let place = |field: &str, all: &[Worker]| {
        let id = workers[field].as_u64();
        let place = all.iter().position(|worker| Some(worker.id) == id);
        place.unwrap_or_else(|| panic!("{field} is none of {all:?} in {nvext}"))
    };
    (
        place("prefill_worker_id", &rig.prefill),
        place("decode_worker_id", &rig.decode),
    )
}

fn chosen_by(rig: &Rig, reply: &Reply) -> (usize, usize) {
    chosen(rig, &reply.json()["nvext"])
}

async fn prefill_calls(rig: &Rig) -> f64 {
    let metrics = rig.fixture.gateway.metrics().await;
    let calls = metrics.sum("pd_router_prefill_calls_total");
    calls.unwrap_or_default()
}

pub async fn a_query_is_answered_here_and_books_nothing(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    let before = prefill_calls(&rig).await;
    for _ in 0..6 {
        let reply = rig.send(ask(&query(chat_body("hello")))).await;
        let reply = reply.expect(200);
        assert_eq!(reply.header("content-type"), Some("application/json"));
        chosen_by(&rig, &reply);
        let nvext = reply.json()["nvext"].clone();
        // Without tokens the answer can give only their number, in blocks.
        assert!(nvext["block_count"].is_u64(), "{nvext}");
        assert!(nvext["token_ids"].is_null(), "{nvext}");
    }
    rig.assert_no_engine_requests().await;
    let metrics = rig.fixture.gateway.metrics().await;
    for name in ["pd_router_prefill_charges", "pd_router_decode_charges"] {
        assert_eq!(metrics.sum(name).unwrap_or_default(), 0.0, "{name}");
    }
    assert_eq!(prefill_calls(&rig).await, before);
    rig.send(Ask::chat("hello")).await.expect(200);
    rig.ends().await;
}

pub async fn a_query_as_a_stream_is_one_event_and_its_end(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    let mut body = query(chat_body("hello"));
    body["stream"] = json!(true);
    let reply = rig.send(ask(&body)).await.expect(200);
    let events = sse::data(&reply.text());
    assert_eq!(events.len(), 2, "one event and the end: {events:?}");
    let events = reply.events();
    chosen(&rig, &events[0]["nvext"]);
    rig.assert_no_engine_requests().await;
    rig.ends().await;
}

pub async fn a_query_that_carries_tokens_gets_them_back(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    let tokens = json!([3, 602, 614, 4_294_967_295_u64]);
    let body = json!({"model": MODEL, "prompt": tokens, "max_tokens": 4});
    let path = "/v1/completions";
    let reply = rig.send(Ask::post(path, query(body).to_string()));
    let reply = reply.await.expect(200);
    chosen_by(&rig, &reply);
    assert_eq!(reply.json()["nvext"]["token_ids"], tokens);
    rig.assert_no_engine_requests().await;
    rig.ends().await;
}

pub async fn a_query_does_not_move_the_next_request(proxy: Proxy) {
    let rig = Rig::trusting_in_turns(proxy).await;
    let mut connection = rig.connect().await;
    // Two workers of each role have one turn each in a round.
    for _ in 0..8 {
        let first = answered(&mut connection, Ask::chat("hello")).await.pair();
        let query_body = query(chat_body("hello"));
        let chosen = chosen_by(&rig, &answered(&mut connection, ask(&query_body)).await);
        let again = chosen_by(&rig, &answered(&mut connection, ask(&query_body)).await);
        assert_eq!(chosen, again, "asking moves nothing");
        let second = answered(&mut connection, Ask::chat("hello")).await.pair();
        assert_ne!(first.prefill, second.prefill, "prefill's turns");
        assert_ne!(first.decode, second.decode, "decode's turns");
        assert_eq!(rig.pair(chosen.0, chosen.1), second);
    }
    rig.ends().await;
}

pub async fn a_query_keeps_its_pins(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    for (p, prefill) in rig.prefill.iter().enumerate() {
        for (d, decode) in rig.decode.iter().enumerate() {
            let pins = json!({"prefill_worker_id": prefill.id, "decode_worker_id": decode.id});
            let reply = rig.send(ask(&query(chat_with(pins)))).await;
            assert_eq!(chosen_by(&rig, &reply.expect(200)), (p, d));
        }
    }
    let gone = query(chat_with(
        json!({"prefill_worker_id": 424_242, "decode_worker_id": rig.decode[1].id}),
    ));
    let reply = rig.send(ask(&gone)).await;
    assert_eq!(chosen_by(&rig, &reply.expect(200)).1, 1);
    let swapped = query(chat_with(json!({"prefill_worker_id": rig.decode[0].id})));
    let reply = rig.send(ask(&swapped)).await;
    reply.expect_code(400, "invalid_worker_id");
    rig.assert_no_engine_requests().await;
    rig.ends().await;
}

pub async fn a_query_from_an_untrusted_caller_is_an_ordinary_request(proxy: Proxy) {
    let rig = Rig::start(proxy, json!({})).await;
    let reply = rig.send(ask(&query(chat_body("hello")))).await;
    let reply = reply.expect(200);
    assert_eq!(reply.json()["usage"]["completion_tokens"], 4);
    assert_eq!(rig.fixture.total(Role::Decode).await.answered, 1);
    rig.ends().await;
}
