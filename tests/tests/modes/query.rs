//! Query-only requests: the workers that would be selected.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply, chat_body};
use pd_router_e2e::engines::MODEL;
use pd_router_e2e::sse;
use serde_json::{Value, json};

use crate::rig::{DECODE_IDS, PREFILL_IDS, Rig, answered, ask, chat_with, query};

/// The two worker ids in an answer.
fn chosen(nvext: &Value) -> (u64, u64) {
    let workers = &nvext["worker_id"];
    let number = |name: &str| {
        workers[name]
            .as_u64()
            .unwrap_or_else(|| panic!("no {name} in {nvext}"))
    };
    assert_eq!(number("prefill_dp_rank"), 0, "{nvext}");
    assert_eq!(number("decode_dp_rank"), 0, "{nvext}");
    let (prefill, decode) = (number("prefill_worker_id"), number("decode_worker_id"));
    assert!(PREFILL_IDS.contains(&prefill), "{nvext}");
    assert!(DECODE_IDS.contains(&decode), "{nvext}");
    (prefill, decode)
}

fn chosen_by(reply: &Reply) -> (u64, u64) {
    chosen(&reply.json()["nvext"])
}

pub async fn a_query_is_answered_here_and_books_nothing(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    for _ in 0..6 {
        let reply = rig.gateway.send(ask(&query(chat_body("hello")))).await;
        let reply = reply.expect(200);
        assert_eq!(reply.header("content-type"), Some("application/json"));
        chosen_by(&reply);
        let nvext = reply.json()["nvext"].clone();
        // Without tokens the answer can give only their number, in blocks.
        assert!(nvext["block_count"].is_u64(), "{nvext}");
        assert!(nvext["token_ids"].is_null(), "{nvext}");
    }
    rig.assert_no_engine_requests().await;
    let metrics = rig.gateway.metrics().await;
    for name in ["pd_router_prefill_charges", "pd_router_decode_charges"] {
        assert_eq!(metrics.sum(name).unwrap_or_default(), 0.0, "{name}");
    }
    let calls = metrics.sum("pd_router_prefill_calls_total");
    assert_eq!(calls.unwrap_or_default(), 0.0);
    rig.gateway.send(Ask::chat("hello")).await.expect(200);
    rig.gateway.assert_comes_to_rest().await;
}

pub async fn a_query_as_a_stream_is_one_event_and_its_end(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    let mut body = query(chat_body("hello"));
    body["stream"] = json!(true);
    let reply = rig.gateway.send(ask(&body)).await.expect(200);
    let events = sse::data(&reply.text());
    assert_eq!(events.len(), 2, "one event and the end: {events:?}");
    let events = reply.events();
    chosen(&events[0]["nvext"]);
    rig.assert_no_engine_requests().await;
    rig.gateway.assert_comes_to_rest().await;
}

pub async fn a_query_that_carries_tokens_gets_them_back(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    let tokens = json!([3, 602, 614, 4_294_967_295_u64]);
    let body = json!({"model": MODEL, "prompt": tokens, "max_tokens": 4});
    let path = "/v1/completions";
    let reply = rig.gateway.send(Ask::post(path, query(body).to_string()));
    let reply = reply.await.expect(200);
    chosen_by(&reply);
    assert_eq!(reply.json()["nvext"]["token_ids"], tokens);
    rig.assert_no_engine_requests().await;
}

pub async fn a_query_does_not_move_the_next_request(proxy: Proxy) {
    let rig = Rig::trusting_in_turns(proxy).await;
    let mut connection = rig.connect().await;
    // Two workers of each role have one turn each in a round.
    for _ in 0..8 {
        let first = answered(&mut connection, Ask::chat("hello")).await.pair();
        let query_body = query(chat_body("hello"));
        let chosen = chosen_by(&answered(&mut connection, ask(&query_body)).await);
        let again = chosen_by(&answered(&mut connection, ask(&query_body)).await);
        assert_eq!(chosen, again, "asking moves nothing");
        let second = answered(&mut connection, Ask::chat("hello")).await.pair();
        assert_ne!(first.prefill, second.prefill, "prefill's turns");
        assert_ne!(first.decode, second.decode, "decode's turns");
        let name = |ids: [u64; 2], id: u64| ids.iter().position(|one| *one == id);
        let place = |name: &str| name[1..].parse().ok();
        assert_eq!(name(PREFILL_IDS, chosen.0), place(&second.prefill));
        assert_eq!(name(DECODE_IDS, chosen.1), place(&second.decode));
    }
}

pub async fn a_query_keeps_its_pins(proxy: Proxy) {
    let rig = Rig::trusting(proxy).await;
    for prefill in PREFILL_IDS {
        for decode in DECODE_IDS {
            let pins = json!({"prefill_worker_id": prefill, "decode_worker_id": decode});
            let reply = rig.gateway.send(ask(&query(chat_with(pins)))).await;
            assert_eq!(chosen_by(&reply.expect(200)), (prefill, decode));
        }
    }
    let gone = query(chat_with(
        json!({"prefill_worker_id": 424_242, "decode_worker_id": DECODE_IDS[1]}),
    ));
    let reply = rig.gateway.send(ask(&gone)).await;
    assert_eq!(chosen_by(&reply.expect(200)).1, DECODE_IDS[1]);
    let swapped = query(chat_with(json!({"prefill_worker_id": DECODE_IDS[0]})));
    let reply = rig.gateway.send(ask(&swapped)).await;
    reply.expect_code(400, "invalid_worker_id");
    rig.assert_no_engine_requests().await;
}

pub async fn a_query_from_an_untrusted_caller_is_an_ordinary_request(proxy: Proxy) {
    let rig = Rig::start(proxy, json!({})).await;
    let reply = rig.gateway.send(ask(&query(chat_body("hello")))).await;
    let reply = reply.expect(200);
    assert_eq!(reply.json()["usage"]["completion_tokens"], 4);
    assert_eq!(rig.fleet.decode_total().await.answered, 1);
}
