//! The gateway's own pages, and the configuration it refuses.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{FAST, Fleet, Role};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use serde_json::{Value, json};

pub async fn readiness_follows_the_workers(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let ready = fixture.send(Ask::get("/pd-router/ready")).await.expect(200);
    assert!(ready.json().is_object(), "{}", ready.text());
    fixture.release();
}

pub async fn without_a_prefill_worker_it_is_not_ready(proxy: Proxy) {
    assert_not_ready(FixtureSpec::nixl(proxy, (0, 1)), "prefill").await;
}

pub async fn without_a_decode_worker_it_is_not_ready(proxy: Proxy) {
    assert_not_ready(FixtureSpec::nixl(proxy, (1, 0)), "decode").await;
}

async fn assert_not_ready(spec: FixtureSpec, missing: &str) {
    let fixture = Fixture::acquire(spec).await;
    let ready = fixture.send(Ask::get("/pd-router/ready")).await.expect(503);
    assert!(ready.json().is_object(), "{}", ready.text());
    let reply = fixture.send(Ask::chat("hello")).await;
    let message = reply.expect_error(503);
    assert!(message.to_lowercase().contains(missing), "{message}");
    assert!(reply.header("retry-after").is_some(), "{reply:?}");
    for engine in fixture.living() {
        assert_eq!(engine.state().await.requests, 0);
    }
    fixture.release();
}

pub async fn the_status_page_is_json_where_configured(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let status = fixture
        .send(Ask::get("/pd-router/status"))
        .await
        .expect(200);
    assert!(status.json().is_object(), "{}", status.text());
    for role in [Role::Prefill, Role::Decode] {
        let name = fixture.slots(role)[0].name();
        assert!(
            status.text().contains(&name),
            "the page tells of {name}: {}",
            status.text()
        );
    }
    fixture.release();
}

pub async fn the_status_page_is_not_there_by_default(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut config = fleet.config();
    config
        .as_object_mut()
        .map(|members| members.remove("status"));
    let gateway = Gateway::start(proxy, &config, &[]).await;
    let status = gateway.send(Ask::get("/pd-router/status")).await;
    assert!((400..500).contains(&status.status), "{status:?}");
    for engine in fleet.engines() {
        let address = engine.address.to_string();
        assert!(!status.text().contains(&address), "{}", status.text());
    }
}

pub async fn an_unknown_field_of_the_configuration_is_refused_by_name(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut at_the_top = fleet.config();
    at_the_top["colour_of_the_top"] = json!("blue");
    assert_refused(proxy, &at_the_top, "colour_of_the_top").await;
    let mut in_a_pool = fleet.config();
    in_a_pool["pools"][0]["colour_of_the_pool"] = json!("blue");
    assert_refused(proxy, &in_a_pool, "colour_of_the_pool").await;
}

async fn assert_refused(proxy: Proxy, config: &Value, field: &str) {
    let started = Gateway::try_start(proxy, config, &[]).await;
    let Err(failure) = started else {
        panic!("started with the unknown field {field}");
    };
    let Some(status) = failure.status else {
        panic!("neither starts nor ends:\n{}", failure.log);
    };
    assert!(!status.success(), "ends as if all were well");
    assert!(
        failure.log.contains(field),
        "does not name {field}:\n{}",
        failure.log
    );
}
