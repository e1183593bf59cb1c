//! Requests that may reach a worker, by method and path.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{FAST, Fleet};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;

/// The simulated engine's own endpoints stand for those by which a real one is operated: if reached, they answer 200.
pub async fn found_b5_what_operates_an_engine_is_not_forwarded(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (0, 0)).aggregated(1);
    let mut fixture = Fixture::acquire(spec).await;
    let fault = r#"{"kind": "status", "status": 503}"#;
    for ask in [
        Ask::get("/__state"),
        Ask::get("/metrics"),
        Ask::get("/flush_cache"),
        Ask::get("/__requests?/v1/models"),
        Ask::post("/__fault", fault),
        Ask::delete("/__fault"),
        Ask::post("/abort_request", r#"{"abort_all": true}"#),
    ] {
        let request = format!("{ask:?}");
        let message = fixture.send(ask).await.expect_code(404, "unknown_path");
        assert!(message.contains("paths"), "{request}: {message}");
    }
    // No fault was injected.
    fixture.gateway.assert_serves().await;
    fixture.send(Ask::get("/version")).await.expect(200);
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn found_b5_a_pool_forwards_what_its_own_list_names(proxy: Proxy) {
    let fleet = Fleet::start_with_aggregated(0, 0, 1, FAST).await;
    let mut config = fleet.config();
    config["pools"][0]["paths"] = serde_json::json!(["/v1/chat/completions", "/__state"]);
    let mut gateway = Gateway::start(proxy, &config, &[]).await;
    gateway.send(Ask::get("/__state")).await.expect(200);
    gateway
        .send(Ask::get("/version"))
        .await
        .expect_code(404, "unknown_path");
    gateway.assert_serves().await;
}
