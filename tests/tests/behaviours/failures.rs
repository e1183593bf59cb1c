//! Workers that die or refuse: the workers tried instead, and the client's error if none is left.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Ask, Reply, chat_body, crowd};
use pd_router_e2e::engines::Role;
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

/// Fails unless this is the answer of a gateway that lacks workers of `role`.
fn assert_unavailable(reply: &Reply, role: &str) {
    let message = reply.expect_error(503);
    assert!(message.to_lowercase().contains(role), "{message}");
    let retry_after = reply.header("retry-after").map(str::parse::<u64>);
    assert!(
        matches!(retry_after, Some(Ok(_))),
        "retry-after, in seconds: {reply:?}"
    );
}

/// Blocks that no decode worker has fetched, or may not have.
async fn leaked_blocks(gateway: &Gateway) -> f64 {
    let metrics = gateway.metrics().await;
    let of = |fate| metrics.sum(&format!("pd_router_kv_{fate}_blocks_total"));
    ["leaked", "unknown"].into_iter().filter_map(of).sum()
}

async fn prefill_retries(gateway: &Gateway) -> f64 {
    let retries = gateway
        .metrics()
        .await
        .sum("pd_router_prefill_retries_total");
    retries.unwrap_or_default()
}

pub async fn with_one_of_two_decode_workers_dead_all_are_answered(proxy: Proxy) {
    let mut fixture = Fixture::acquire(FixtureSpec::nixl(proxy, (2, 2))).await;
    fixture.send(Ask::chat("hello")).await.expect(200);
    fixture.engines.decode[0].kill().await;
    let alive = fixture.engines.decode[1].name();

    let before = fixture.total(Role::Decode).await.answered;
    let replies = crowd(fixture.gateway.listen, 40, 5, &Ask::chat("hello")).await;
    assert_eq!(replies.len(), 200);
    for reply in replies {
        let pair = reply.expect(200).pair();
        assert_eq!(pair.decode, alive, "the worker that answered is named");
    }
    assert_eq!(fixture.total(Role::Decode).await.answered - before, 200);
    fixture.assert_good_hand_offs().await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn with_both_decode_workers_dead_the_client_is_told_until_one_is_back(proxy: Proxy) {
    let mut fixture = Fixture::acquire(FixtureSpec::nixl(proxy, (1, 2))).await;
    let before = leaked_blocks(&fixture.gateway).await;
    fixture.send(Ask::chat("hello")).await.expect(200);
    fixture.engines.kill(Role::Decode).await;
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        assert_unavailable(&fixture.send(ask).await, "decode");
    }
    fixture.gateway.assert_comes_to_rest().await;
    // Hand-offs of these prefills are never pulled.
    eventually(
        "hand-offs that were never pulled are counted",
        GENEROUS,
        || async {
            let prefill = fixture.total(Role::Prefill).await;
            let leaked = leaked_blocks(&fixture.gateway).await - before;
            match leaked == prefill.blocks_unpulled as f64 {
                true => Ok(()),
                false => Err(format!("{leaked} of {prefill:?}")),
            }
        },
    )
    .await;

    fixture.engines.decode[0].start().await;
    eventually("a worker that is back is used again", GENEROUS, || async {
        let reply = fixture.gateway.try_send(Ask::chat("hello")).await;
        let reply = reply.map_err(|failure| failure.to_string())?;
        if reply.status == 200 {
            return Ok(());
        }
        Err(format!("{}: {}", reply.status, reply.text()))
    })
    .await;
    let state = fixture.decode(0).state().await;
    assert!(state.answered > 0 && state.refused() == 0, "{state:?}");
    fixture.release();
}

pub async fn with_one_of_two_prefill_workers_dead_all_are_answered(proxy: Proxy) {
    let mut fixture = Fixture::acquire(FixtureSpec::nixl(proxy, (2, 2))).await;
    let before = prefill_retries(&fixture.gateway).await;
    fixture.engines.prefill[0].kill().await;
    let alive = fixture.engines.prefill[1].name();
    for reply in crowd(fixture.gateway.listen, 5, 10, &Ask::chat("hello")).await {
        let pair = reply.expect(200).pair();
        assert_eq!(pair.prefill, alive, "the worker that prefilled is named");
    }
    let state = fixture.total(Role::Prefill).await;
    assert_eq!(state.handoffs_consumed, 50, "{state:?}");
    fixture.assert_good_hand_offs().await;
    fixture.gateway.assert_comes_to_rest().await;
    let retries = prefill_retries(&fixture.gateway).await;
    assert!(retries > before, "a second try is counted");
    fixture.release();
}

pub async fn with_both_prefill_workers_dead_the_client_is_told(proxy: Proxy) {
    let mut fixture = Fixture::acquire(FixtureSpec::nixl(proxy, (2, 1))).await;
    fixture.engines.kill(Role::Prefill).await;
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        assert_unavailable(&fixture.send(ask).await, "prefill");
    }
    let decode = fixture.total(Role::Decode).await;
    assert_eq!(
        decode.requests, 0,
        "no decode without a hand-off: {decode:?}"
    );
    fixture.gateway.assert_comes_to_rest().await;

    fixture.engines.prefill[0].start().await;
    eventually("a worker that is back is used again", GENEROUS, || async {
        let reply = fixture.gateway.try_send(Ask::chat("hello")).await;
        let reply = reply.map_err(|failure| failure.to_string())?;
        if reply.status == 200 {
            return Ok(());
        }
        Err(format!("{}: {}", reply.status, reply.text()))
    })
    .await;
    fixture.assert_good_hand_offs().await;
    fixture.release();
}

pub async fn a_refusal_by_the_prefill_worker_is_the_answer(proxy: Proxy) {
    // Ten blocks of sixteen tokens of four bytes hold 640 bytes of prompt.
    let small = FixtureSpec::nixl(proxy, (1, 1)).engines(&["--kv-blocks", "10"], json!({}));
    let mut fixture = Fixture::acquire(small).await;
    let before = prefill_retries(&fixture.gateway).await;
    let body = chat_body(&"too long ".repeat(500)).to_string();
    let reply = fixture.send(Ask::post("/v1/chat/completions", body)).await;

    // The same leg, sent straight to the engine, gives the engine's own answer.
    let leg = fixture.prefill(0).only_request().await;
    let straight = Ask::post(&leg.path, leg.text().to_owned());
    let direct = client::send(fixture.prefill(0).address, straight).await;
    assert!((400..500).contains(&direct.status), "{direct:?}");
    assert_eq!(reply.status, direct.status);
    assert_eq!(reply.text(), direct.text());
    assert_eq!(reply.header("content-type"), direct.header("content-type"));

    assert_eq!(fixture.total(Role::Decode).await.requests, 0);
    let retries = prefill_retries(&fixture.gateway).await;
    assert_eq!(retries, before, "a refusal is not tried again");
    fixture.gateway.assert_comes_to_rest().await;
    fixture.gateway.assert_serves().await;
    fixture.release();
}
