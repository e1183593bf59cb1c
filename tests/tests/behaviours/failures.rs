//! Workers that die or refuse: the workers tried instead, and the client's error if none is left.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Ask, Reply, chat_body, crowd};
use pd_router_e2e::engines::{Engine, FAST, Fleet, Role};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};

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

pub async fn with_one_of_two_decode_workers_dead_all_are_answered(proxy: Proxy) {
    let mut fleet = Fleet::start(2, 2, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    gateway.send(Ask::chat("hello")).await.expect(200);
    let mut dead = fleet.decode.remove(0);
    dead.kill();
    let alive = fleet.decode[0].address.to_string();

    let before = fleet.decode_total().await.answered;
    let replies = crowd(gateway.listen, 40, 5, &Ask::chat("hello")).await;
    assert_eq!(replies.len(), 200);
    for reply in replies {
        let pair = reply.expect(200).pair();
        assert_eq!(pair.decode, alive, "the worker that answered is named");
    }
    assert_eq!(fleet.decode_total().await.answered - before, 200);
    fleet.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;
}

pub async fn with_both_decode_workers_dead_the_client_is_told_until_one_is_back(proxy: Proxy) {
    let mut fleet = Fleet::start(1, 2, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    gateway.send(Ask::chat("hello")).await.expect(200);
    for engine in &mut fleet.decode {
        engine.kill();
    }
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        assert_unavailable(&gateway.send(ask).await, "decode");
    }
    gateway.assert_comes_to_rest().await;
    // Hand-offs of these prefills are never pulled.
    eventually(
        "hand-offs that were never pulled are counted",
        GENEROUS,
        || async {
            let prefill = fleet.prefill_total().await;
            let metrics = gateway.metrics().await;
            let leaked = ["leaked", "unknown"]
                .map(|fate| metrics.sum(&format!("pd_router_kv_{fate}_blocks_total")));
            let leaked: f64 = leaked.into_iter().flatten().sum();
            match leaked == prefill.blocks_unpulled as f64 {
                true => Ok(()),
                false => Err(format!("{leaked} of {prefill:?}")),
            }
        },
    )
    .await;

    let address = fleet.decode[0].address;
    let back = Engine::start_at(address, Role::Decode, FAST).await;
    eventually("a worker that is back is used again", GENEROUS, || async {
        let reply = gateway.try_send(Ask::chat("hello")).await;
        let reply = reply.map_err(|failure| failure.to_string())?;
        if reply.status == 200 {
            return Ok(());
        }
        Err(format!("{}: {}", reply.status, reply.text()))
    })
    .await;
    let state = back.state().await;
    assert!(state.answered > 0 && state.refused() == 0, "{state:?}");
}

pub async fn with_one_of_two_prefill_workers_dead_all_are_answered(proxy: Proxy) {
    let mut fleet = Fleet::start(2, 2, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    let mut dead = fleet.prefill.remove(0);
    dead.kill();
    let alive = fleet.prefill[0].address.to_string();
    for reply in crowd(gateway.listen, 5, 10, &Ask::chat("hello")).await {
        let pair = reply.expect(200).pair();
        assert_eq!(pair.prefill, alive, "the worker that prefilled is named");
    }
    let state = fleet.prefill_total().await;
    assert_eq!(state.handoffs_consumed, 50, "{state:?}");
    fleet.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;
    let retries = gateway
        .metrics()
        .await
        .expect("pd_router_prefill_retries_total");
    assert!(retries > 0.0, "a second try is counted");
}

pub async fn with_both_prefill_workers_dead_the_client_is_told(proxy: Proxy) {
    let mut fleet = Fleet::start(2, 1, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    for engine in &mut fleet.prefill {
        engine.kill();
    }
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        assert_unavailable(&gateway.send(ask).await, "prefill");
    }
    let decode = fleet.decode_total().await;
    assert_eq!(
        decode.requests, 0,
        "no decode without a hand-off: {decode:?}"
    );
    gateway.assert_comes_to_rest().await;

    let address = fleet.prefill[0].address;
    let _back = Engine::start_at(address, Role::Prefill, FAST).await;
    eventually("a worker that is back is used again", GENEROUS, || async {
        let reply = gateway.try_send(Ask::chat("hello")).await;
        let reply = reply.map_err(|failure| failure.to_string())?;
        if reply.status == 200 {
            return Ok(());
        }
        Err(format!("{}: {}", reply.status, reply.text()))
    })
    .await;
    fleet.assert_no_decode_refused().await;
}

pub async fn a_refusal_by_the_prefill_worker_is_the_answer(proxy: Proxy) {
    // Ten blocks of sixteen tokens of four bytes hold 640 bytes of prompt.
    let fleet = Fleet::start(1, 1, &["--speedup", "50", "--kv-blocks", "10"]).await;
    let mut gateway = Gateway::over(proxy, &fleet).await;
    let body = chat_body(&"too long ".repeat(500)).to_string();
    let reply = gateway.send(Ask::post("/v1/chat/completions", body)).await;

    // The same leg, sent straight to the engine, gives the engine's own answer.
    let leg = fleet.prefill[0].only_request().await;
    let straight = Ask::post(&leg.path, leg.text().to_owned());
    let direct = client::send(fleet.prefill[0].address, straight).await;
    assert!((400..500).contains(&direct.status), "{direct:?}");
    assert_eq!(reply.status, direct.status);
    assert_eq!(reply.text(), direct.text());
    assert_eq!(reply.header("content-type"), direct.header("content-type"));

    assert_eq!(fleet.decode_total().await.requests, 0);
    let retries = gateway
        .metrics()
        .await
        .sum("pd_router_prefill_retries_total");
    assert_eq!(
        retries.unwrap_or_default(),
        0.0,
        "a refusal is not tried again"
    );
    gateway.assert_comes_to_rest().await;
    gateway.assert_serves().await;
}
