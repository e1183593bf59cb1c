//! Large bodies: they pass up to the limit, and are refused above it.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Reply, chat_body};
use pd_router_e2e::engines::{Engine, FAST, Fleet};
use pd_router_e2e::fixture::Fixture;
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use serde_json::json;

/// Envoy's own default, in bytes.
const ONE_MEBIBYTE: &str = "1048576";

/// A request of at least this many bytes. The bulk is not prompt, so that no engine computes it.
fn request_of(bytes: usize) -> Vec<u8> {
    let mut body = chat_body("hello");
    body["bulk"] = json!("x".repeat(bytes));
    raw::post("/v1/chat/completions", &[], body.to_string().as_bytes())
}

async fn sent(gateway: &Gateway, bytes: usize) -> Reply {
    Raw::exchange(gateway.listen, request_of(bytes)).await
}

async fn assert_passes(fleet: &Fleet, gateway: &mut Gateway, bytes: usize) {
    sent(gateway, bytes).await.expect(200);
    for engine in fleet.engines() {
        let got = engine.only_request().await;
        assert!(
            got.body_bytes > bytes,
            "only {} bytes arrived",
            got.body_bytes
        );
        let length = got.body_bytes.to_string();
        assert_eq!(got.values("content-length"), [length.as_str()]);
    }
    fleet.assert_no_decode_refused().await;
    gateway.assert_serves().await;
}

/// Fails unless the gateway refuses this many bytes, and none of these engines gets them.
async fn assert_too_large(engines: impl Iterator<Item = &Engine>, gateway: &Gateway, bytes: usize) {
    sent(gateway, bytes).await.expect(413);
    for engine in engines {
        assert_eq!(engine.state().await.requests, 0);
    }
}

pub async fn a_body_of_900_kilobytes_passes_a_limit_of_one_mebibyte(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut gateway = with_one_mebibyte(proxy, &fleet).await;
    assert_passes(&fleet, &mut gateway, 900_000).await;
}

pub async fn a_body_above_a_limit_of_one_mebibyte_is_too_large(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut gateway = with_one_mebibyte(proxy, &fleet).await;
    assert_too_large(fleet.engines(), &gateway, 1_500_000).await;
    gateway.assert_serves().await;
    gateway.assert_comes_to_rest().await;
}

pub async fn a_body_of_20_megabytes_passes_the_shipped_limit(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut config = fleet.config();
    // The bootstrap's limit is above the filter's default, which the configuration raises.
    config["limits"] = json!({"body_bytes": 32 * 1024 * 1024});
    let mut gateway = Gateway::start(proxy, &config, &[]).await;
    assert_passes(&fleet, &mut gateway, 20_000_000).await;
}

pub async fn a_body_above_the_shipped_limit_is_too_large(proxy: Proxy) {
    let mut fixture = Fixture::one_of_each(proxy).await;
    assert_too_large(fixture.living(), &fixture.gateway, 35_000_000).await;
    fixture.gateway.assert_serves().await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn found_b13_a_body_above_the_default_limit_is_told_so_before_it_has_come(proxy: Proxy) {
    let mut fixture = Fixture::one_of_each(proxy).await;
    // A declared length is refused at once, an undeclared one when the bytes exceed the limit.
    let head = |headers| raw::head("POST /v1/chat/completions HTTP/1.1", headers);
    let declared = head(&[("content-length", "20000000")]);
    let mut undeclared = head(&[("transfer-encoding", "chunked")]);
    undeclared.extend(raw::chunk(&vec![b' '; 17_000_000]));
    for request in [declared, undeclared] {
        let reply = Raw::exchange(fixture.gateway.listen, request).await;
        let message = reply.expect_code(413, "body_too_large");
        assert!(message.contains("16777216"), "{message}");
    }
    for engine in fixture.living() {
        assert_eq!(engine.state().await.requests, 0);
    }
    fixture.gateway.assert_serves().await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

async fn with_one_mebibyte(proxy: Proxy, fleet: &Fleet) -> Gateway {
    Gateway::start(proxy, &fleet.config(), &["--buffer-limit", ONE_MEBIBYTE]).await
}
