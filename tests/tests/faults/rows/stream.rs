//! Decode fails in the middle of a stream.

use std::time::{Duration, Instant};

use pd_router_e2e::Proxy;
use pd_router_e2e::engines::Role;
use pd_router_e2e::protocols::Protocol;
use serde_json::{Value, json};

use crate::row::{AnswerMode, LIMIT_MS, Row, assert_torn_text, body};

/// All decode workers have the fault in the middle of a stream; returns the time until the client sees the end.
async fn torn(proxy: Proxy, protocol: Protocol, fault: &Value) -> Duration {
    let row = Row::with_all(proxy, protocol, Role::Decode, fault).await;
    let begun = Instant::now();
    let body = body(AnswerMode::Streamed, "a long story", 2000);
    let mut client = row.client(&body).await;
    client.read_until("data:", 1).await;
    let text = client.read_rest().await;
    let took = begun.elapsed();
    assert!(text.contains("token0"), "the first token came: {text}");
    assert_torn_text(&text);
    row.fixture.comes_to_rest().await;
    assert_eq!(row.tried_again().await, [0.0; 3]);
    assert_eq!(row.counted("pd_router_resets_total").await, 1.0);
    row.ejects_only(Role::Decode).await;
    // The first token came: the hand-off was used.
    row.ends().await;
    took
}

pub async fn decode_dies_after_its_first_token(proxy: Proxy, protocol: Protocol) {
    torn(
        proxy,
        protocol,
        &json!({"kind": "die_mid_stream", "tokens": 1}),
    )
    .await;
}

pub async fn decode_is_silent_after_its_first_token(proxy: Proxy, protocol: Protocol) {
    let took = torn(
        proxy,
        protocol,
        &json!({"kind": "slow_drip", "ms": 600_000}),
    )
    .await;
    let limit = Duration::from_millis(LIMIT_MS);
    assert!(took >= limit, "not before its time: {took:?}");
}
