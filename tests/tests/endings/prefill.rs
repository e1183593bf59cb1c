//! Answers of prefill without a hand-off: a complete answer, or a failure.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::engines::{MODEL, Role};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use serde_json::{Value, json};

const ENDS: &str = "this one <|end|>";
const LOSES: &str = "this one <|lose|>";

/// Fails unless prefill ran this often and decode got no request.
async fn assert_prefill_alone(fixture: &Fixture, times: u64) {
    let prefill = fixture.total(Role::Prefill).await;
    assert_eq!(prefill.requests, times, "{prefill:?}");
    assert_eq!(prefill.handoffs_issued, 0, "{prefill:?}");
    let decode = fixture.total(Role::Decode).await;
    assert_eq!(decode.requests, 0, "{decode:?}");
}

pub async fn a_prefill_that_ends_the_answer_is_the_answer(proxy: Proxy) {
    let fixture = Fixture::acquire(FixtureSpec::nixl(proxy, (2, 1))).await;
    let reply = fixture.send(Ask::chat(ENDS)).await.expect(200);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let answer = reply.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "stop", "{answer}");
    let text = choice["message"]["content"].as_str().unwrap_or_default();
    assert!(!text.is_empty(), "{answer}");
    assert!(answer.get("kv_transfer_params").is_none(), "{answer}");

    let body = json!({"model": MODEL, "prompt": ENDS, "max_tokens": 4});
    let ask = Ask::post("/v1/completions", body.to_string());
    let answer = fixture.send(ask).await.expect(200).json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    assert!(answer.get("kv_transfer_params").is_none(), "{answer}");
    assert_prefill_alone(&fixture, 2).await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn a_prefill_that_ends_the_answer_is_a_stream_for_who_asked_for_one(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let mut body = chat_body(ENDS);
    body["stream"] = json!(true);
    let mut with_usage = body.clone();
    with_usage["stream_options"] = json!({"include_usage": true});
    for (body, usage) in [(body, false), (with_usage, true)] {
        let ask = Ask::post("/v1/chat/completions", body.to_string());
        let reply = fixture.send(ask).await.expect(200);
        let events = reply.events();
        let text = |event: &Value| {
            let text = event["choices"][0]["delta"]["content"].as_str();
            text.unwrap_or_default().len()
        };
        assert!(events.iter().map(text).sum::<usize>() > 0, "{events:?}");
        let reasons: Vec<&Value> = events
            .iter()
            .map(|event| &event["choices"][0]["finish_reason"])
            .filter(|reason| !reason.is_null())
            .collect();
        assert_eq!(reasons, [&json!("stop")], "{events:?}");
        let chunk = |event: &Value| event["object"] == "chat.completion.chunk";
        assert!(events.iter().all(chunk), "{events:?}");
        let has_usage = events.iter().any(|event| event["usage"].is_object());
        assert_eq!(has_usage, usage, "{events:?}");
        assert!(!reply.text().contains("kv_transfer_params"), "{events:?}");
    }
    assert_prefill_alone(&fixture, 2).await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn a_prefill_without_a_hand_off_is_a_failure(proxy: Proxy) {
    let mut fixture = Fixture::acquire(FixtureSpec::nixl(proxy, (2, 1))).await;
    for (times, ask) in [(1, Ask::chat(LOSES)), (2, Ask::chat_stream(LOSES))] {
        let reply = fixture.send(ask).await;
        reply.expect_code(502, "prefill_no_handoff");
        for at in 0..2 {
            let state = fixture.prefill(at).state().await;
            assert_eq!(state.requests, times, "each is tried once: {state:?}");
        }
    }
    assert_prefill_alone(&fixture, 4).await;
    fixture.gateway.assert_serves().await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}
