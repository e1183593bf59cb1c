//! Prefill that fails beside a running decode, and clients that leave.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Failure, Reply, chat_body};
use pd_router_e2e::engines::{FAST, Role};
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, eventually, within_tries};
use serde_json::{Value, json};

use crate::rig::{CHAT, Rig};

/// Prefill at once, then a token every 20 ms.
const SLOW_DECODE: [&str; 4] = ["--token-ms", "20", "--prefill-rate", "80000"];

fn assert_failed(reply: &Reply) {
    assert!(matches!(reply.status, 502 | 503), "{reply:?}");
    reply.expect_error(reply.status);
    assert!(!reply.text().contains("[DONE]"), "{reply:?}");
}

fn streamed(prompt: &str, tokens: u64) -> Value {
    let mut body = chat_body(prompt);
    body["stream"] = json!(true);
    body["max_tokens"] = json!(tokens);
    body
}

fn request(body: &Value) -> Vec<u8> {
    raw::post(CHAT, &[], body.to_string().as_bytes())
}

pub async fn a_prefill_that_fails_first_is_an_error(proxy: Proxy) {
    let rig = Rig::start(proxy, FAST, (2, 1)).await;
    let prompt = "this one <|fail-prefill|>";
    assert_failed(&rig.fixture.send(Ask::chat(prompt)).await);
    // The client may have a stream's head already; then the gateway breaks the connection.
    match rig.fixture.gateway.try_send(Ask::chat_stream(prompt)).await {
        Ok(reply) => assert_failed(&reply),
        Err(Failure::BreaksOff(_) | Failure::NoAnswer(_)) => {}
        Err(failure) => panic!("{failure}"),
    }
    rig.assert_comes_to_rest().await;
    // A retry has a room of its own.
    rig.assert_none_refused().await;
    rig.fixture.send(Ask::chat("hello")).await.expect(200);
    rig.ends().await;
}

/// Reads the first event of a stream whose prefill fails, and returns the rest.
async fn torn_stream(rig: &Rig, tokens: u64) -> String {
    let mut client = Raw::connect(rig.fixture.gateway.listen).await;
    let body = streamed("this one <|fail-prefill-late|>", tokens);
    client.write(&request(&body)).await;
    client.read_until("data:", 1).await;
    client.read_rest().await
}

fn assert_torn(text: &str) {
    assert!(text.contains("data:"), "{text}");
    assert!(!text.contains("[DONE]"), "{text}");
    assert!(!text.ends_with("0\r\n\r\n"), "it ends as if whole: {text}");
}

pub async fn a_prefill_that_fails_under_a_stream_ends_it_without_done(proxy: Proxy) {
    let rig = Rig::start(proxy, &SLOW_DECODE, (1, 1)).await;
    // A minute of tokens: the stream does not end by itself.
    assert_torn(&torn_stream(&rig, 3000).await);
    rig.assert_comes_to_rest().await;
    rig.fixture.send(Ask::chat("hello")).await.expect(200);
    rig.assert_comes_to_rest().await;
    rig.assert_none_refused().await;
    rig.ends().await;
}

pub async fn a_prefill_that_fails_after_a_short_stream_ends_it_without_done(proxy: Proxy) {
    // Decode ends long before prefill reports its failure.
    let rig = Rig::start(proxy, &SLOW_DECODE, (1, 1)).await;
    assert_torn(&torn_stream(&rig, 3).await);
    rig.ends().await;
}

pub async fn a_prefill_that_fails_late_is_an_error_where_nothing_was_read(proxy: Proxy) {
    let rig = Rig::start(proxy, &SLOW_DECODE, (1, 1)).await;
    let ask = Ask::chat("this one <|fail-prefill-late|>");
    assert_failed(&rig.fixture.send(ask).await);
    rig.assert_comes_to_rest().await;
    rig.fixture.send(Ask::chat("hello")).await.expect(200);
    rig.ends().await;
}

pub async fn a_client_that_leaves_stops_both_legs(proxy: Proxy) {
    // The prefill would take a quarter of an hour.
    let options = ["--prefill-rate", "1"];
    let rig = Rig::start(proxy, &options, (1, 1)).await;
    for (times, stream) in [(1, true), (2, false)] {
        let mut body = streamed(&"tell ".repeat(720), 4);
        body["stream"] = json!(stream);
        let mut client = Raw::connect(rig.fixture.gateway.listen).await;
        client.write(&request(&body)).await;
        eventually("both legs run", GENEROUS, || async {
            let prefill = rig.fixture.total(Role::Prefill).await;
            let decode = rig.fixture.total(Role::Decode).await;
            if (prefill.requests, decode.requests) == (times, times) {
                return Ok(());
            }
            Err(format!("{prefill:?} {decode:?}"))
        })
        .await;
        drop(client);
        rig.assert_comes_to_rest().await;
        let prefill = rig.fixture.total(Role::Prefill).await;
        assert_eq!(prefill.aborted_by_request, times, "{prefill:?}");
    }
    let legs = rig.fixture.prefill(0).requests().await;
    let rids = legs.iter().map(|leg| leg.json()["rid"].clone());
    let rids: Vec<Value> = rids.collect();
    let named = rids
        .iter()
        .all(|rid| rid.as_str().is_some_and(|rid| !rid.is_empty()));
    assert!(named && rids[0] != rids[1], "{rids:?}");
    rig.assert_none_refused().await;
    rig.ends().await;
}

pub async fn a_client_that_leaves_during_decode_stops_it(proxy: Proxy) {
    let rig = Rig::start(proxy, &SLOW_DECODE, (1, 1)).await;
    for _ in 0..3 {
        let mut client = Raw::connect(rig.fixture.gateway.listen).await;
        client
            .write(&request(&streamed("a long story", 3000)))
            .await;
        client.read_until("data:", 3).await;
    }
    rig.assert_comes_to_rest().await;
    rig.fixture.send(Ask::chat("hello")).await.expect(200);
    rig.assert_comes_to_rest().await;
    rig.assert_none_refused().await;
    rig.ends().await;
}

/// A recovery makes the prefill worker drop the request: the answer to that call is expected.
pub async fn found_c10_what_a_recovery_calls_off_is_known_when_it_is_answered(proxy: Proxy) {
    let mut rig = Rig::start(proxy, FAST, (2, 2)).await;
    let fails = json!({"kind": "status", "status": 500, "leg": "decode"});
    rig.fixture.decode(0).fault(&fails).await;
    // Which of two idle workers gets a request is drawn.
    let recoveries = async || {
        let metrics = rig.fixture.gateway.metrics().await;
        metrics
            .sum("pd_router_recoveries_total")
            .unwrap_or_default()
    };
    let before = recoveries().await;
    within_tries("a recovery is counted", async |number| {
        let ask = Ask::chat(&format!("question {number}"));
        rig.fixture.send(ask).await.expect(200);
        let now = recoveries().await;
        let state = rig.fixture.decode(0).state().await;
        match now > before {
            true => Ok(()),
            false => Err(format!("{now}; the worker that fails: {state:?}")),
        }
    })
    .await;
    rig.assert_comes_to_rest().await;
    let log = rig.fixture.gateway.process().log();
    assert!(!log.contains("which nobody made"), "{log}");
    rig.ends().await;
}
