//! Workers that leave and join: removed ones get nothing, and requests that wait for a removed worker move on at once.

use std::time::{Duration, Instant};

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Ask, Reply};
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{FAST, Role};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::traffic::Traffic;
use pd_router_e2e::wait::{GENEROUS, count, eventually};
use pd_router_e2e::worker_document::INTERVAL_MS;
use serde_json::json;

use crate::rig::{INTERVAL, SLACK, until_listed};

const CLIENTS: usize = 8;

/// Deadline of a request that waits for a worker that stays.
const DEADLINE_MS: u64 = 40_000;

/// A request that waits for a removed worker is answered in far less.
const AT_ONCE: Duration = Duration::from_secs(15);

/// Answers after which each client has sent another request.
const ANEW: u64 = 20 * CLIENTS as u64;

/// Polls, in two seconds, and answers in which a removed worker must get no request.
const WATCHED_POLLS: u64 = 2000 / INTERVAL_MS;
const WATCHED_ANSWERS: u64 = 400;

pub async fn who_is_gone_gets_nothing_and_who_comes_is_used(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(2, 2, FAST).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let gateway = engines.gateway(proxy, json!({})).await;
    gateway.answers().await;
    let traffic = Traffic::start(gateway.listen, CLIENTS);
    for round in 0..count(2, 10) {
        for role in [Role::Prefill, Role::Decode] {
            let at = round % 2;
            let name = engines.slots(role)[at].name();
            let unlisted = Instant::now();
            engines.unlist_one(role, at);
            until_listed(&gateway, &name, false).await;
            let took = unlisted.elapsed();
            assert!(took < INTERVAL + SLACK, "it left within {took:?}");
            // Requests that had selected it may still reach it.
            traffic.until_answered(ANEW).await;
            let before = engines.slots(role)[at].state().await.requests;
            engines.document.until_polled(WATCHED_POLLS).await;
            traffic.until_answered(WATCHED_ANSWERS).await;
            let after = engines.slots(role)[at].state().await.requests;
            assert_eq!(before, after, "a worker that is gone got requests");
            engines.list_one(role, at);
            eventually("who comes is used", INTERVAL + SLACK, || async {
                let now = engines.slots(role)[at].state().await.requests;
                match now > after {
                    true => Ok(()),
                    false => Err(format!("{now} requests")),
                }
            })
            .await;
        }
    }
    let tally = traffic.stop().await;
    // Another pair was always present, and no engine died.
    let spoilt = tally.put_off_total() + tally.torn + tally.lost + tally.unknown;
    assert_eq!(spoilt, 0, "{tally:?}");
    gateway.assert_comes_to_rest().await;
}

/// A gateway over one listed worker of each role, with another running.
async fn open(proxy: Proxy) -> (EngineSet, Gateway) {
    let mut engines = EngineSet::with_slots(2, 2, FAST).await;
    engines.start(Role::Prefill).await;
    engines.start(Role::Decode).await;
    engines.list_one(Role::Prefill, 0);
    engines.list_one(Role::Decode, 0);
    let pool = json!({
        "prefill": {"timeout_ms": DEADLINE_MS, "base_timeout_ms": DEADLINE_MS},
        "decode": {"first_token_timeout_ms": DEADLINE_MS},
        "health": {"cold_timeout_ms": 0},
    });
    let gateway = engines.gateway(proxy, pool).await;
    gateway.is_ready().await;
    (engines, gateway)
}

/// Sends a request that hangs at the only worker of this role, which another then replaces; returns the answer.
async fn outlives(role: Role, ask: Ask, engines: &mut EngineSet, gateway: &Gateway) -> Reply {
    let leg = json!({"kind": "hang", "leg": role.as_str()});
    let hangs = &engines.slots(role)[0];
    hangs.engine().fault(&leg).await;
    let before = hangs.state().await.requests;
    let pending = tokio::spawn(client::try_send(gateway.listen, ask));
    eventually("the request hangs", GENEROUS, || async {
        let state = hangs.state().await;
        match state.requests > before {
            true => Ok(()),
            false => Err(format!("{state:?}")),
        }
    })
    .await;
    engines.list_one(role, 1);
    until_listed(gateway, &engines.slots(role)[1].name(), true).await;
    assert!(!pending.is_finished(), "it was to hang");
    let left = Instant::now();
    engines.unlist_one(role, 0);
    let outcome = pending.await.unwrap_or_else(|error| panic!("{error}"));
    let reply = outcome.unwrap_or_else(|failure| panic!("{failure}"));
    let took = left.elapsed();
    assert!(took < AT_ONCE, "it took {took:?}: {reply:?}");
    reply
}

/// Fails unless the answer is complete and by the other worker; nothing stays booked.
async fn judge(role: Role, reply: Reply, engines: &EngineSet, gateway: &Gateway) {
    let pair = reply.expect_tokens(4).pair();
    let named = match role {
        Role::Prefill => pair.prefill,
        Role::Decode | Role::Aggregated => pair.decode,
    };
    assert_eq!(named, engines.slots(role)[1].name());
    // The hanging engine would keep a call until its deadline.
    engines.slots(role)[0].engine().clear_faults().await;
    gateway.assert_comes_to_rest().await;
    let decode = engines.total(Role::Decode).await;
    assert_eq!(decode.refused(), 0, "{decode:?}");
}

pub async fn a_request_whose_prefill_worker_leaves_goes_to_another_at_once(proxy: Proxy) {
    let (mut engines, gateway) = open(proxy).await;
    let ask = Ask::chat("hello");
    let reply = outlives(Role::Prefill, ask, &mut engines, &gateway).await;
    judge(Role::Prefill, reply, &engines, &gateway).await;
}

pub async fn a_request_whose_decode_worker_leaves_goes_to_another_at_once(proxy: Proxy) {
    let (mut engines, gateway) = open(proxy).await;
    let ask = Ask::chat("hello");
    let reply = outlives(Role::Decode, ask, &mut engines, &gateway).await;
    judge(Role::Decode, reply, &engines, &gateway).await;
}

pub async fn a_stream_whose_decode_worker_leaves_before_its_first_byte_goes_to_another_at_once(
    proxy: Proxy,
) {
    let (mut engines, gateway) = open(proxy).await;
    // The hand-off stays on the prefill worker, which does not leave.
    let ask = Ask::chat_stream("hello");
    let reply = outlives(Role::Decode, ask, &mut engines, &gateway).await;
    judge(Role::Decode, reply, &engines, &gateway).await;
}
