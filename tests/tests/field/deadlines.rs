//! Deadlines: long work is not cut off, and quick work is not delayed.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body, send};
use pd_router_e2e::engines::{Engine, Fleet, Role, with};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// 4,000 tokens, at one token for four bytes.
const LONG_PROMPT_BYTES: usize = 16_000;

/// At this rate a prefill of that prompt takes two and a half seconds.
const SLOW_PREFILL: [&str; 2] = ["--prefill-rate", "1600"];

async fn over_slow_prefill(proxy: Proxy, for_each_thousand: u64) -> (Fleet, Gateway) {
    let fleet = Fleet::start(1, 1, &SLOW_PREFILL).await;
    let prefill = json!({"base_timeout_ms": 1000, "timeout_ms_per_1k_tokens": for_each_thousand});
    let health = json!({"cold_timeout_ms": 0});
    let config = fleet.config_with(json!({"prefill": prefill, "health": health}));
    let gateway = Gateway::start(proxy, &config, &[]).await;
    (fleet, gateway)
}

fn long_chat() -> Ask {
    let body = chat_body(&"tell ".repeat(LONG_PROMPT_BYTES / 5));
    Ask::post(CHAT, body.to_string())
}

/// vllm #29906, SemiAnalysisAI/InferenceX #2255: a deadline below what a real prefill takes.
pub async fn a_prefills_deadline_grows_with_what_it_must_compute(proxy: Proxy) {
    let (fleet, gateway) = over_slow_prefill(proxy, 2000).await;
    // Two at once, which an engine computes one after the other: the second one's deadline includes the first one's tokens.
    let replies = join_all([long_chat(), long_chat()].map(|ask| gateway.send(ask))).await;
    for reply in replies {
        reply.expect_tokens(4);
    }
    fleet.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;

    let (fleet, gateway) = over_slow_prefill(proxy, 0).await;
    let reply = gateway.send(long_chat()).await;
    reply.expect_code(503, "prefill_failed");
    assert_eq!(fleet.decode_total().await.requests, 0);
    gateway.assert_comes_to_rest().await;
}

/// llm-d #633: a default time-out on the decode proxy.
pub async fn a_long_decode_is_never_cut_off(proxy: Proxy) {
    // Above the fifteen seconds of Envoy's default time-out.
    let fixture = Fixture::one_of_each(proxy).await;
    fixture
        .decode(0)
        .fault(&json!({"kind": "slow_drip", "ms": 400}))
        .await;
    let body = |stream: bool| {
        with(
            chat_body("slowly"),
            json!({"max_tokens": 45, "stream": stream}),
        )
    };
    let begun = Instant::now();
    let asks = [false, true].map(|stream| Ask::post(CHAT, body(stream).to_string()));
    for reply in join_all(asks.map(|ask| fixture.send(ask))).await {
        reply.expect_tokens(45);
    }
    let took = begun.elapsed();
    assert!(
        took > Duration::from_secs(16),
        "that was not long: {took:?}"
    );
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

/// gateway-api-inference-extension #2928: more than a second until the first token of 220 KB.
pub async fn a_prompt_of_220_kilobytes_costs_little(proxy: Proxy) {
    let quick = ["--speedup", "10000"];
    let spec = FixtureSpec::nixl(proxy, (1, 1)).only_options(&quick);
    let fixture = Fixture::acquire(spec).await;
    let alone = Engine::start(Role::Aggregated, &quick).await;
    fixture.send(Ask::chat("hello")).await.expect(200);
    let body: Value = chat_body(&"tell ".repeat(44_000));
    let ask = Ask::post(CHAT, body.to_string());
    let begun = Instant::now();
    send(alone.address, ask.clone()).await.expect_tokens(4);
    let straight = begun.elapsed();
    let begun = Instant::now();
    fixture.send(ask).await.expect_tokens(4);
    let routed = begun.elapsed();
    let most = 2 * straight + Duration::from_secs(1);
    assert!(routed < most, "{routed:?}, and straight {straight:?}");
    fixture.release();
}
