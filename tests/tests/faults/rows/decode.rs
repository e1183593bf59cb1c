//! Decode fails before a byte of its answer has reached the client.

use pd_router_e2e::Proxy;
use pd_router_e2e::engines::Role;
use pd_router_e2e::protocols::Protocol;
use serde_json::{Value, json};

use crate::row::{Asked, BOTH, Row, STREAMED, WHOLE, assert_torn, status};

/// One of two decode workers does this once: another pair does it all again, and the client waits a little longer.
async fn is_mended(proxy: Proxy, protocol: Protocol, fault: Value, asked: &[Asked]) -> Row {
    let row = Row::with_one(proxy, protocol, (Role::Decode, fault), asked).await;
    assert_eq!(row.tried_again().await, [0.0, 0.0, 1.0]);
    row
}

/// All decode workers do this: it is tried once again, and the client learns how that ended.
async fn is_told(proxy: Proxy, protocol: Protocol, fault: &Value, asked: &[Asked]) -> Row {
    let row = Row::with_all(proxy, protocol, Role::Decode, fault).await;
    for reply in row.replies(asked).await {
        match fault["kind"].as_str() {
            Some("status") => unreachable!("compared whole elsewhere"),
            Some("empty") => reply.expect_code(502, "empty_answer"),
            Some("hang" | "silent") => reply.expect_code(504, "decode_timeout"),
            _ => reply.expect_error(503),
        };
    }
    assert_tried_twice(&row, asked).await;
    row
}

async fn assert_tried_twice(row: &Row, asked: &[Asked]) {
    let [_, _, recoveries] = row.tried_again().await;
    assert_eq!(recoveries, asked.len() as f64, "one each");
    let got = row.got(Role::Decode).await;
    let each = vec![asked.len(); got.len()];
    assert_eq!(got, each, "nobody is asked twice by one request");
    row.blames_only(Role::Decode).await;
}

pub async fn decode_refuses(proxy: Proxy, protocol: Protocol) {
    let mut row = Row::begin(proxy, protocol).await;
    row.stage.crew.decode[0].kill().await;
    row.answers(BOTH).await;
    let [prefills, decodes, recoveries] = row.tried_again().await;
    assert!(decodes > 0.0, "the next one of the list was asked");
    assert_eq!((prefills, recoveries), (0.0, 0.0));
    let answered = row.got_in_all(Role::Decode).await;
    if protocol.has_prefill_leg() {
        let prefilled = row.got_in_all(Role::Prefill).await;
        assert_eq!(prefilled, answered, "one prefill each: its result is used");
    }
    row.blames_only(Role::Decode).await;
    row.ends().await;

    let mut row = Row::begin(proxy, protocol).await;
    row.stage.crew.kill(Role::Decode).await;
    for reply in row.replies(BOTH).await {
        reply.expect_code(503, "unreachable");
        assert!(reply.header("retry-after").is_some(), "{reply:?}");
    }
    row.blames_only(Role::Decode).await;
    row.ends().await;
}

pub async fn decode_answers_4xx(proxy: Proxy, protocol: Protocol) {
    is_the_answer(proxy, protocol, 422).await;
}

pub async fn decode_answers_429(proxy: Proxy, protocol: Protocol) {
    is_the_answer(proxy, protocol, 429).await;
}

async fn is_the_answer(proxy: Proxy, protocol: Protocol, code: u16) {
    let row = Row::with_all(proxy, protocol, Role::Decode, &status(code)).await;
    row.replies_are_the_engines(code, BOTH).await;
    row.stage.comes_to_rest().await;
    assert_eq!(row.got_in_all(Role::Decode).await, BOTH.len());
    assert_eq!(row.tried_again().await, [0.0; 3]);
    row.blames_nobody().await;
    row.ends().await;
}

pub async fn decode_answers_5xx(proxy: Proxy, protocol: Protocol) {
    breaks_with_a_status(proxy, protocol, WHOLE).await;
}

pub async fn decode_answers_5xx_to_a_stream(proxy: Proxy, protocol: Protocol) {
    breaks_with_a_status(proxy, protocol, STREAMED).await;
}

async fn breaks_with_a_status(proxy: Proxy, protocol: Protocol, asked: &[Asked]) {
    let row = is_mended(proxy, protocol, status(503), asked).await;
    row.ends().await;
    let row = Row::with_all(proxy, protocol, Role::Decode, &status(503)).await;
    row.replies_are_the_engines(503, asked).await;
    assert_tried_twice(&row, asked).await;
    row.ends().await;
}

pub async fn decode_breaks_before_headers(proxy: Proxy, protocol: Protocol) {
    breaks_without_an_answer(proxy, protocol, WHOLE).await;
}

pub async fn decode_breaks_before_headers_of_a_stream(proxy: Proxy, protocol: Protocol) {
    breaks_without_an_answer(proxy, protocol, STREAMED).await;
}

async fn breaks_without_an_answer(proxy: Proxy, protocol: Protocol, asked: &[Asked]) {
    let fault = json!({"kind": "reset_before_headers"});
    let row = is_mended(proxy, protocol, fault.clone(), asked).await;
    row.ends_with_resets().await;
    let row = is_told(proxy, protocol, &fault, asked).await;
    row.ends_with_resets().await;
}

pub async fn decode_answers_nothing(proxy: Proxy, protocol: Protocol) {
    let fault = json!({"kind": "empty"});
    for asked in [WHOLE, STREAMED] {
        let row = is_mended(proxy, protocol, fault.clone(), asked).await;
        row.ends_with_resets().await;
    }
    let row = is_told(proxy, protocol, &fault, BOTH).await;
    row.ends_with_resets().await;
}

pub async fn decode_hangs(proxy: Proxy, protocol: Protocol) {
    passes_its_deadline(proxy, protocol, "hang").await;
}

pub async fn decode_is_silent_before_its_first_token(proxy: Proxy, protocol: Protocol) {
    passes_its_deadline(proxy, protocol, "silent").await;
}

async fn passes_its_deadline(proxy: Proxy, protocol: Protocol, kind: &str) {
    let fault = json!({"kind": kind});
    for asked in [WHOLE, STREAMED] {
        let row = is_mended(proxy, protocol, fault.clone(), asked).await;
        row.ends_with_resets().await;
    }
    let row = is_told(proxy, protocol, &fault, BOTH).await;
    row.ends_with_resets().await;
}

pub async fn decode_breaks_after_headers(proxy: Proxy, protocol: Protocol) {
    let fault = json!({"kind": "reset_after_headers"});
    let row = Row::with_all(proxy, protocol, Role::Decode, &fault).await;
    for outcome in row.outcomes(BOTH).await {
        assert_torn(&outcome);
    }
    row.stage.comes_to_rest().await;
    assert_eq!(row.tried_again().await, [0.0; 3]);
    let resets = row.counted("pd_router_resets_total").await;
    assert_eq!(resets, BOTH.len() as f64);
    row.blames_only(Role::Decode).await;
    row.ends_with_resets().await;
}
