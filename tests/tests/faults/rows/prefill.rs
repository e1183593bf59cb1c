//! Prefill fails.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::engines::Role;
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::row::{AnswerMode, BOTH, CHAT, Row, TOKENS, assert_torn_text, body, status};

/// Another prefill replaces each failed one, before its decode or together with it.
async fn assert_prefill_was_tried_again(row: &Row, failed: usize) {
    let tried @ [prefills, decodes, recoveries] = row.tried_again().await;
    assert!(failed > 0, "the worker that fails was never asked");
    match row.protocol.is_sequential() {
        true => assert_eq!(tried, [failed as f64, 0.0, 0.0]),
        // A decode that reported first was not replaced.
        false => {
            let again = prefills + recoveries;
            assert!(
                again > 0.0 && again <= failed as f64,
                "{tried:?} of {failed}"
            );
            assert_eq!(decodes, 0.0);
        }
    }
}

/// Decode engines get requests of successful prefills only.
async fn assert_decode_left_alone(row: &Row) {
    row.fixture.comes_to_rest().await;
    let got = row.got_in_all(Role::Decode).await;
    if row.protocol.is_sequential() {
        assert_eq!(got, 0, "requests to decode engines");
    }
}

/// One of two prefill workers has the fault: the other one is tried.
async fn other_prefill_answers(proxy: Proxy, protocol: Protocol, fault: &Value) -> Row {
    let row = Row::with_one(proxy, protocol, (Role::Prefill, fault), BOTH).await;
    let failed = row.got(Role::Prefill).await[0];
    assert_prefill_was_tried_again(&row, failed).await;
    row
}

/// All prefill workers have the fault: the client gets this error.
async fn error_reaches_client(row: &mut Row, fault: &Value, (status, code): (u16, &str)) {
    row.mark().await;
    row.fixture.inject_all(Role::Prefill, fault).await;
    for reply in row.replies(BOTH).await {
        reply.expect_code(status, code);
    }
    assert_decode_left_alone(row).await;
    let got = row.got(Role::Prefill).await;
    assert!(
        got.iter().all(|got| *got <= BOTH.len()),
        "a request tries no worker twice: {got:?}"
    );
    row.ejects_only(Role::Prefill).await;
}

const FAILED: (u16, &str) = (503, "prefill_failed");

pub async fn prefill_refuses(proxy: Proxy, protocol: Protocol) {
    let mut row = Row::begin(proxy, protocol).await;
    row.fixture.engines.prefill[0].kill().await;
    match protocol {
        Protocol::Sglang => row.answers_or_breaks_off(BOTH).await,
        _ => row.answers(BOTH).await,
    }
    let [prefills, decodes, recoveries] = row.tried_again().await;
    // A dead Mooncake worker may be detected at its bootstrap server before any prefill.
    let expected = prefills + recoveries > 0.0 || protocol == Protocol::Mooncake;
    assert!(expected, "it was never asked");
    assert_eq!(decodes, 0.0);
    row.ejects_only(Role::Prefill).await;

    row.fixture.engines.kill(Role::Prefill).await;
    row.mark().await;
    for reply in row.replies(BOTH).await {
        reply.expect_error(FAILED.0);
        let code = reply.json()["error"]["code"].clone();
        let other = match protocol {
            // The engine id of a dead worker is unknown as well.
            Protocol::Mooncake => "prefill_pending",
            // Decode may report first.
            Protocol::Sglang => "broken_off",
            _ => FAILED.1,
        };
        assert!(code == FAILED.1 || code == other, "{reply:?}");
    }
    assert_decode_left_alone(&row).await;
    row.ejects_only(Role::Prefill).await;
    match protocol {
        // Decode engines refuse rooms whose prefill engines are dead.
        Protocol::Sglang => row.ends_with_refusals().await,
        _ => row.ends().await,
    }
}

pub async fn prefill_answers_4xx(proxy: Proxy, protocol: Protocol) {
    let row = Row::with_all(proxy, protocol, Role::Prefill, &status(422)).await;
    row.replies_are_the_engines(422, BOTH).await;
    row.fixture.comes_to_rest().await;
    let got = row.got_in_all(Role::Prefill).await;
    assert_eq!(got, BOTH.len(), "a refusal is not tried again");
    assert_decode_left_alone(&row).await;
    assert_eq!(row.tried_again().await, [0.0; 3]);
    row.ejects_no_worker().await;
    row.ends().await;
}

/// Another worker may accept the request: exactly one is tried.
pub async fn prefill_answers_429(proxy: Proxy, protocol: Protocol) {
    for code in [429, 404] {
        let mut row = other_prefill_answers(proxy, protocol, &status(code)).await;
        row.mark().await;
        row.fixture.inject_all(Role::Prefill, &status(code)).await;
        row.replies_are_the_engines(code, BOTH).await;
        row.fixture.comes_to_rest().await;
        let got = row.got_in_all(Role::Prefill).await;
        assert_eq!(got, 2 * BOTH.len(), "one other is asked");
        assert_decode_left_alone(&row).await;
        row.ejects_only(Role::Prefill).await;
        row.ends().await;
    }
}

pub async fn prefill_answers_5xx(proxy: Proxy, protocol: Protocol) {
    let mut row = other_prefill_answers(proxy, protocol, &status(500)).await;
    error_reaches_client(&mut row, &status(500), FAILED).await;
    row.ends().await;
}

pub async fn prefill_passes_its_deadline(proxy: Proxy, protocol: Protocol) {
    let hangs = json!({"kind": "hang"});
    let mut row = other_prefill_answers(proxy, protocol, &hangs).await;
    error_reaches_client(&mut row, &hangs, FAILED).await;
    row.ends().await;
}

pub async fn prefill_breaks_off(proxy: Proxy, protocol: Protocol) {
    for kind in ["reset_before_headers", "reset_after_headers"] {
        let row = other_prefill_answers(proxy, protocol, &json!({"kind": kind})).await;
        row.ends().await;
    }
}

pub async fn prefill_hands_nothing_off(proxy: Proxy, protocol: Protocol) {
    let fault = json!({"kind": "no_handoff"});
    let mut row = other_prefill_answers(proxy, protocol, &fault).await;
    error_reaches_client(&mut row, &fault, (502, "prefill_no_handoff")).await;
    row.ends().await;
}

/// The text and the finish reason of a complete chat answer, unstreamed or streamed.
fn ending(reply: &Reply) -> (String, Value) {
    let content = reply.header("content-type").unwrap_or_default();
    if !content.starts_with("text/event-stream") {
        let choice = &reply.json()["choices"][0];
        let text = choice["message"]["content"].as_str();
        return (
            text.unwrap_or_default().to_owned(),
            choice["finish_reason"].clone(),
        );
    }
    let events = reply.events();
    let text = |event: &Value| {
        let text = event["choices"][0]["delta"]["content"].as_str();
        text.unwrap_or_default().to_owned()
    };
    let mut reasons = events
        .iter()
        .map(|event| &event["choices"][0]["finish_reason"]);
    let reason = reasons.rfind(|reason| !reason.is_null());
    (
        events.iter().map(text).collect(),
        reason.cloned().unwrap_or_default(),
    )
}

pub async fn prefill_ends_the_answer(proxy: Proxy, protocol: Protocol) {
    let row = Row::begin(proxy, protocol).await;
    for mode in BOTH {
        let body = body(*mode, "this one <|end|>", TOKENS).to_string();
        let reply = row.fixture.gateway.send(Ask::post(CHAT, body)).await;
        let reply = reply.expect(200);
        let (text, reason) = ending(&reply);
        assert!(!text.is_empty() && reason == "stop", "{reply:?}");
        for field in ["kv_transfer_params\":{", "disaggregated_params\":{"] {
            assert!(!reply.text().contains(field), "{reply:?}");
        }
    }
    assert_eq!(row.got_in_all(Role::Prefill).await, BOTH.len());
    assert_decode_left_alone(&row).await;
    assert_eq!(row.tried_again().await, [0.0; 3]);
    row.ejects_no_worker().await;
    row.ends().await;
}

pub async fn prefill_fails_late(proxy: Proxy, protocol: Protocol) {
    let row = Row::begin(proxy, protocol).await;
    row.fixture
        .inject_all(Role::Decode, &json!({"kind": "slow_drip", "ms": 50}))
        .await;
    // More than a minute of tokens: the stream does not end by itself.
    let body = body(AnswerMode::Streamed, "this one <|fail-prefill-late|>", 2000);
    let mut client = row.client(&body).await;
    client.read_until("data:", 1).await;
    let text = client.read_rest().await;
    assert!(text.contains("chat.completion.chunk"), "{text}");
    let error = text.find("data: {\"error\"");
    let chunk = text.rfind("chat.completion.chunk");
    assert!(error.is_some(), "an event says why: {text}");
    assert!(error > chunk, "nothing follows it: {text}");
    assert_torn_text(&text);
    row.fixture.comes_to_rest().await;
    assert_eq!(row.tried_again().await, [0.0; 3]);
    eventually("the reset is counted", GENEROUS, || async {
        match row.counted("pd_router_resets_total").await {
            1.0 => Ok(()),
            counted => Err(format!("{counted}")),
        }
    })
    .await;
    row.ejects_only(Role::Prefill).await;
    row.ends_with_resets().await;
}
