//! Decode fails before a byte of its answer has reached the client.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Reply;
use pd_router_e2e::engines::Role;
use pd_router_e2e::protocols::Protocol;
use serde_json::{Value, json};

use crate::row::{AnswerMode, BOTH, Row, STREAMED, UNSTREAMED, assert_engine_error, status};

/// One of two decode workers has the fault: another pair repeats the request, and the client waits a little longer.
async fn recovers(proxy: Proxy, protocol: Protocol, fault: &Value, modes: &[AnswerMode]) -> Row {
    let row = Row::with_one(proxy, protocol, (Role::Decode, fault), modes).await;
    let failed = row.got(Role::Decode).await[0];
    assert!(failed > 0, "the worker that fails was never asked");
    assert_eq!(row.tried_again().await, [0.0, 0.0, failed as f64]);
    row
}

/// All decode workers have the fault: each request is retried once, and its last error reaches the client.
async fn error_reaches_client(row: &mut Row, fault: &Value, modes: &[AnswerMode]) -> Vec<Reply> {
    let (replies, recoveries) = fails_on_all(row, fault, modes).await;
    assert_eq!(recoveries, modes.len() as f64, "one each");
    let got = row.got(Role::Decode).await;
    let each = vec![modes.len(); got.len()];
    assert_eq!(got, each, "a request tries no worker twice");
    replies
}

/// The same for any number of retries; returns it.
async fn fails_on_all(row: &mut Row, fault: &Value, modes: &[AnswerMode]) -> (Vec<Reply>, f64) {
    row.mark().await;
    row.fixture.inject_all(Role::Decode, fault).await;
    let replies = row.replies(modes).await;
    row.fixture.comes_to_rest().await;
    let [_, _, recoveries] = row.tried_again().await;
    row.ejects_only(Role::Decode).await;
    (replies, recoveries)
}

pub async fn decode_refuses(proxy: Proxy, protocol: Protocol) {
    let mut row = Row::begin(proxy, protocol).await;
    row.fixture.engines.decode[0].kill().await;
    row.answers(BOTH).await;
    let [prefills, decodes, recoveries] = row.tried_again().await;
    assert!(decodes > 0.0, "the next one of the list was asked");
    assert_eq!((prefills, recoveries), (0.0, 0.0));
    let answered = row.got_in_all(Role::Decode).await;
    if protocol.has_prefill_leg() {
        let prefilled = row.got_in_all(Role::Prefill).await;
        assert_eq!(prefilled, answered, "one prefill each: its result is used");
    }
    row.ejects_only(Role::Decode).await;

    row.fixture.engines.kill(Role::Decode).await;
    row.mark().await;
    for reply in row.replies(BOTH).await {
        reply.expect_code(503, "unreachable");
        assert!(reply.header("retry-after").is_some(), "{reply:?}");
    }
    row.ejects_only(Role::Decode).await;
    row.ends().await;
}

pub async fn decode_answers_4xx(proxy: Proxy, protocol: Protocol) {
    let row = Row::with_all(proxy, protocol, Role::Decode, &status(422)).await;
    row.replies_are_the_engines(422, BOTH).await;
    row.fixture.comes_to_rest().await;
    let fetched = fetched_for_no_client(&row, BOTH);
    assert_eq!(row.got_in_all(Role::Decode).await, BOTH.len() + fetched);
    assert_eq!(row.tried_again().await, [0.0; 3]);
    row.ejects_no_worker().await;
    row.ends().await;
}

/// Legs that fetch the hand-off of a request that decode refused.
fn fetched_for_no_client(row: &Row, modes: &[AnswerMode]) -> usize {
    match row.protocol.is_sequential() {
        true => modes.len(),
        false => 0,
    }
}

/// Another worker may accept the request: one is tried, with the same hand-off if prefill came first.
pub async fn decode_answers_429(proxy: Proxy, protocol: Protocol) {
    for code in [429, 404] {
        let mut row = recovers(proxy, protocol, &status(code), BOTH).await;
        if protocol.is_sequential() {
            let prefilled = row.got_in_all(Role::Prefill).await;
            let failed = row.got(Role::Decode).await[0];
            let answered = row.got_in_all(Role::Decode).await - failed;
            assert_eq!(prefilled, answered, "one prefill each: its result is used");
        }
        let replies = fails_on_all(&mut row, &status(code), BOTH).await.0;
        let fetched = fetched_for_no_client(&row, BOTH);
        let got = row.got_in_all(Role::Decode).await;
        match (protocol, code) {
            // While all workers are full no new pair begins. A request that comes late is refused by the gateway.
            (Protocol::Sglang | Protocol::Aggregated | Protocol::Llmd, 429) => {
                let (by_gateway, by_engine): (Vec<Reply>, Vec<Reply>) = replies
                    .into_iter()
                    .partition(|reply| reply.text().contains("\"overloaded\""));
                assert!(!by_engine.is_empty(), "{by_gateway:?}");
                let asked = by_engine.len()..=2 * by_engine.len();
                assert!(asked.contains(&got), "{got} of {asked:?}");
                by_gateway
                    .into_iter()
                    .for_each(|reply| drop(reply.expect(429)));
                by_engine
                    .into_iter()
                    .for_each(|reply| assert_engine_error(reply, code));
            }
            _ => {
                assert_eq!(got, 2 * BOTH.len() + fetched, "one other is asked");
                for reply in replies {
                    assert_engine_error(reply, code);
                }
            }
        }
        row.ends().await;
    }
}

pub async fn decode_answers_5xx(proxy: Proxy, protocol: Protocol) {
    breaks_with_a_status(proxy, protocol, UNSTREAMED).await;
}

pub async fn decode_answers_5xx_to_a_stream(proxy: Proxy, protocol: Protocol) {
    breaks_with_a_status(proxy, protocol, STREAMED).await;
}

async fn breaks_with_a_status(proxy: Proxy, protocol: Protocol, modes: &[AnswerMode]) {
    let mut row = recovers(proxy, protocol, &status(500), modes).await;
    for reply in error_reaches_client(&mut row, &status(500), modes).await {
        assert_engine_error(reply, 500);
    }
    row.ends().await;
}

pub async fn decode_breaks_before_headers(proxy: Proxy, protocol: Protocol) {
    breaks_without_an_answer(proxy, protocol, UNSTREAMED).await;
}

pub async fn decode_breaks_before_headers_of_a_stream(proxy: Proxy, protocol: Protocol) {
    breaks_without_an_answer(proxy, protocol, STREAMED).await;
}

async fn breaks_without_an_answer(proxy: Proxy, protocol: Protocol, modes: &[AnswerMode]) {
    let fault = json!({"kind": "reset_before_headers"});
    let mut row = recovers(proxy, protocol, &fault, modes).await;
    let (replies, recoveries) = fails_on_all(&mut row, &fault, modes).await;
    for reply in replies {
        reply.expect_code(503, "unreachable");
    }
    // A first reset may be that of a closed idle connection: the last worker is tried once more.
    assert_eq!(recoveries, 2.0 * modes.len() as f64);
    row.ends_with_resets().await;
}

async fn recovers_or_fails(
    proxy: Proxy,
    protocol: Protocol,
    (fault, modes): (&Value, &[AnswerMode]),
    (status, code): (u16, &str),
) {
    let mut row = recovers(proxy, protocol, fault, modes).await;
    for reply in error_reaches_client(&mut row, fault, modes).await {
        reply.expect_code(status, code);
    }
    row.ends_with_resets().await;
}

pub async fn decode_answers_nothing(proxy: Proxy, protocol: Protocol) {
    let fault = json!({"kind": "empty"});
    recovers_or_fails(proxy, protocol, (&fault, BOTH), (502, "empty_answer")).await;
}

pub async fn decode_hangs(proxy: Proxy, protocol: Protocol) {
    let fault = json!({"kind": "hang"});
    recovers_or_fails(proxy, protocol, (&fault, BOTH), (504, "decode_timeout")).await;
}

pub async fn decode_is_silent_before_its_first_token(proxy: Proxy, protocol: Protocol) {
    let fault = json!({"kind": "silent"});
    recovers_or_fails(proxy, protocol, (&fault, BOTH), (504, "decode_timeout")).await;
}

pub async fn decode_breaks_after_headers(proxy: Proxy, protocol: Protocol) {
    let fault = json!({"kind": "reset_after_headers"});
    let row = Row::with_all(proxy, protocol, Role::Decode, &fault).await;
    for reply in row.replies(BOTH).await {
        reply.expect_code(503, "broken_off");
    }
    row.fixture.comes_to_rest().await;
    assert_eq!(row.tried_again().await, [0.0; 3]);
    row.ejects_only(Role::Decode).await;
    row.ends_with_resets().await;
}
