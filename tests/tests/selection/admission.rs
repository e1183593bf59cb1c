//! Requests that wait for a less busy worker, and requests that may not. One thread: a queue belongs to one thread.

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Ask, Failure, Reply, chat_body};
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{Fleet, Role, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::rig::{CHAT, until_waiting};

/// Engines that answer soon, though not at once.
const QUICK: &[&str] = &["--prefill-rate", "100000", "--token-ms", "10"];

/// At this rate the prompt below takes a second.
const SLOW_PREFILL: &[&str] = &["--prefill-rate", "1000", "--token-ms", "1"];

/// 1,000 tokens, at one token for four bytes.
fn long_prompt() -> String {
    "tell ".repeat(800)
}

/// A pool whose decode worker is busy with a single answer.
fn one_answer_at_a_time(queue: Value) -> Value {
    json!({"admission": {"decode": {"blocks": 0}, "queue": queue}})
}

async fn start(proxy: Proxy, pool: Value, options: &[&str]) -> (Fleet, Gateway) {
    let fleet = Fleet::start(1, 1, options).await;
    let gateway = Gateway::start_on_one_thread(proxy, &fleet.config_with(pool), &[]).await;
    (fleet, gateway)
}

/// A stream that ends only with its client.
fn endless(content: &str) -> Vec<u8> {
    let fields = json!({"stream": true, "max_tokens": 1_000_000});
    let body = with(chat_body(content), fields).to_string();
    raw::post(CHAT, &[], body.as_bytes())
}

/// Keeps the decode worker busy until the returned value is dropped.
async fn occupy(gateway: &Gateway) -> Raw {
    let mut client = Raw::connect(gateway.listen).await;
    client.write(&endless("the first")).await;
    client.read_until("data:", 3).await;
    client
}

type PendingReply = JoinHandle<Result<Reply, Failure>>;

/// Sends a request that waits at position `place`.
async fn wait_in_line(gateway: &Gateway, content: &str, place: u64) -> PendingReply {
    let ask = Ask::chat(content);
    let pending = tokio::spawn(client::try_send(gateway.listen, ask));
    until_waiting(gateway, place).await;
    pending
}

async fn answer(pending: PendingReply) -> Reply {
    let outcome = pending.await.unwrap_or_else(|error| panic!("{error}"));
    outcome.unwrap_or_else(|failure| panic!("no answer: {failure}"))
}

/// Fails unless this is a 429 of that code with `retry-after`.
fn assert_turned_away(reply: &Reply, code: &str) -> String {
    let message = reply.expect_code(429, code);
    let retry_after = reply.header("retry-after").map(str::parse::<u64>);
    assert!(matches!(retry_after, Some(Ok(_))), "{reply:?}");
    message
}

pub async fn requests_wait_for_a_busy_decode_worker_and_are_served_in_order(proxy: Proxy) {
    let pool = one_answer_at_a_time(json!({"deadline_ms": 120_000}));
    let (fleet, gateway) = start(proxy, pool, QUICK).await;
    let first = occupy(&gateway).await;
    let mut pending = Vec::new();
    for (content, place) in [("the second", 1), ("the third", 2), ("the fourth", 3)] {
        pending.push(wait_in_line(&gateway, content, place).await);
    }
    eventually("all three are in the queue", GENEROUS, || async {
        let waiting = gateway.metrics().await.expect("pd_router_queue_requests");
        (waiting == 3.0).then_some(()).ok_or(waiting.to_string())
    })
    .await;
    assert_eq!(
        fleet.prefill_total().await.requests,
        1,
        "who waits is not prefilled"
    );
    drop(first);
    for reply in join_all(pending.into_iter().map(answer)).await {
        reply.expect(200);
    }
    let legs = fleet.decode[0].requests().await;
    let contents: Vec<Value> = legs
        .iter()
        .map(|leg| leg.json()["messages"][0]["content"].clone())
        .collect();
    assert_eq!(
        contents,
        ["the first", "the second", "the third", "the fourth"]
    );
    until_waiting(&gateway, 0).await;
    gateway.assert_comes_to_rest().await;
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.expect("pd_router_queue_requests"), 0.0);
}

pub async fn a_full_queue_and_a_wait_too_long_are_told_and_leavers_leave_nothing(proxy: Proxy) {
    let queue = json!({"max_requests": 1, "deadline_ms": 2000});
    let (fleet, gateway) = start(proxy, one_answer_at_a_time(queue), QUICK).await;
    let first = occupy(&gateway).await;
    let mut leaver = Raw::connect(gateway.listen).await;
    leaver.write(&endless("the leaver")).await;
    until_waiting(&gateway, 1).await;
    drop(leaver);
    until_waiting(&gateway, 0).await;

    let waits = wait_in_line(&gateway, "the second", 1).await;
    let message = assert_turned_away(&gateway.send(Ask::chat("one too many")).await, "queue_full");
    assert!(message.contains('1'), "{message}");
    let message = assert_turned_away(&answer(waits).await, "queue_deadline");
    assert!(message.contains("2000"), "{message}");
    until_waiting(&gateway, 0).await;

    drop(first);
    gateway.assert_comes_to_rest().await;
    gateway.send(Ask::chat("the last")).await.expect(200);
    assert_eq!(fleet.decode_total().await.requests, 2);
    assert_eq!(fleet.prefill_total().await.requests, 2);
    gateway.assert_comes_to_rest().await;
}

/// Bytes of prompt of each waiting request below.
const LARGE: usize = 2_000_000;

pub async fn found_b2_bodies_of_those_who_wait_are_copied_and_read_once(proxy: Proxy) {
    const WAITING: u64 = 3;
    const LEAVERS: u64 = 20;
    let pool = one_answer_at_a_time(json!({"deadline_ms": 120_000}));
    let (_fleet, gateway) = start(proxy, pool, QUICK).await;
    let first = occupy(&gateway).await;
    let mut waiting = Vec::new();
    for place in 1..=WAITING {
        let mut client = Raw::connect(gateway.listen).await;
        client.write(&endless(&"x".repeat(LARGE))).await;
        until_waiting(&gateway, place).await;
        waiting.push(client);
    }
    // Each arrival and each departure makes the queue try all waiting requests.
    for _ in 0..LEAVERS {
        let mut leaver = Raw::connect(gateway.listen).await;
        leaver.write(&endless("the leaver")).await;
        until_waiting(&gateway, WAITING + 1).await;
        drop(leaver);
        until_waiting(&gateway, WAITING).await;
    }
    let large = (WAITING * LARGE as u64) as f64;
    let others = 500_000.0;
    let metrics = eventually("all bodies are counted", GENEROUS, || async {
        let metrics = gateway.metrics().await;
        let read = metrics.expect("pd_router_body_bytes_read_total");
        (read >= large).then_some(metrics).ok_or(read.to_string())
    })
    .await;
    let read = metrics.expect("pd_router_body_bytes_read_total");
    assert!(read < large + others, "{read} bytes were read");
    let copied = metrics.expect("pd_router_body_bytes_copied_total");
    assert!(copied < large + others, "{copied} bytes were copied");
    drop((first, waiting));
    gateway.assert_comes_to_rest().await;
}

pub async fn the_end_of_a_prefill_lets_the_next_request_in(proxy: Proxy) {
    let pool = json!({"admission": {
        "prefill": {"tokens": 0},
        "queue": {"deadline_ms": 120_000},
    }});
    let (fleet, gateway) = start(proxy, pool, SLOW_PREFILL).await;
    // The first answer never ends: only the end of its prefill admits others.
    let mut first = Raw::connect(gateway.listen).await;
    first.write(&endless(&long_prompt())).await;
    until_prefill_runs(&fleet).await;
    let others = (0..3).map(|_| gateway.send(Ask::chat("hello")));
    for reply in join_all(others).await {
        reply.expect(200);
    }
    first.read_until("data:", 3).await;
    assert_eq!(fleet.prefill_total().await.requests, 4);
    drop(first);
    gateway.assert_comes_to_rest().await;
}

pub async fn without_a_queue_a_busy_worker_is_told_at_once(proxy: Proxy) {
    let pool = json!({"admission": {"prefill": {"tokens": 500}, "decode": {"blocks": 100}}});
    let (fleet, gateway) = start(proxy, pool, SLOW_PREFILL).await;
    let running = tokio::spawn(client::try_send(gateway.listen, Ask::chat(&long_prompt())));
    until_prefill_runs(&fleet).await;
    let message = assert_turned_away(&gateway.send(Ask::chat("hello")).await, "overloaded");
    assert!(message.contains("prefill"), "{message}");
    answer(running).await.expect(200);
    // A small prompt and its answer are within the limit.
    gateway.send(Ask::chat("hello")).await.expect(200);
    assert_eq!(fleet.prefill_total().await.requests, 2);
    gateway.assert_comes_to_rest().await;
}

async fn until_prefill_runs(fleet: &Fleet) {
    eventually("prefill runs", GENEROUS, || async {
        let state = fleet.prefill_total().await;
        if state.requests == 1 {
            return Ok(());
        }
        Err(format!("{state:?}"))
    })
    .await;
}

pub async fn nobody_waits_where_there_is_no_worker(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(1, 1, QUICK).await;
    let pool = one_answer_at_a_time(json!({"deadline_ms": 120_000}));
    let gateway = engines.gateway_on_one_thread(proxy, pool).await;
    let reply = gateway.send(Ask::chat("hello")).await;
    reply.expect_error(503);
    assert!(reply.header("retry-after").is_some(), "{reply:?}");

    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    gateway.is_ready().await;
    let first = occupy(&gateway).await;
    let waits = wait_in_line(&gateway, "the second", 1).await;
    // The only worker is unlisted: requests that wait for it are answered.
    engines.unlist(Role::Decode);
    answer(waits).await.expect_error(503);
    until_waiting(&gateway, 0).await;
    drop(first);
    gateway.assert_comes_to_rest().await;
}
