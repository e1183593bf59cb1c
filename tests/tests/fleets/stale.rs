//! Sources that fail: the last fleet stays for a time, and is reported as stale.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{FAST, Role, with};
use pd_router_e2e::gateway::Gateway;
use serde_json::{Value, json};

use crate::rig::{pairs, until_all_say, until_answered_with, until_listed, version};

async fn start_engines() -> EngineSet {
    let mut engines = EngineSet::with_slots(1, 1, FAST).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    engines
}

/// Engines of both roles, and a gateway that discovers them with these further fields of its source.
async fn open(proxy: Proxy, source: Value) -> (EngineSet, Gateway) {
    let engines = start_engines().await;
    let source = with(engines.document.source(), source);
    let pool = json!({"discovery": {"document": source}});
    let gateway = engines.gateway(proxy, pool).await;
    gateway.is_ready().await;
    (engines, gateway)
}

async fn until_stale(gateway: &Gateway, stale: bool) {
    let what = format!("the fleet is stale: {stale}");
    until_all_say(gateway, &what, |pool| {
        let discovery = &pool["discovery"];
        assert_eq!(discovery["source"], "document", "{pool}");
        discovery["stale"] == stale
    })
    .await;
}

pub async fn a_source_that_fails_leaves_the_fleet_as_it_is_and_that_is_told(proxy: Proxy) {
    let (mut engines, gateway) = open(proxy, json!({})).await;
    until_stale(&gateway, false).await;
    let before = version(&gateway).await;

    engines.document.set_status(500);
    until_stale(&gateway, true).await;
    pairs(&gateway, 8).await;
    engines.document.set_status(200);
    until_stale(&gateway, false).await;

    for page in ["", "{", "[]", r#"{"workers": [{"address": "nowhere"}]}"#] {
        engines.document.publish_text(page);
        until_stale(&gateway, true).await;
        pairs(&gateway, 8).await;
        engines.list(Role::Prefill);
        until_stale(&gateway, false).await;
    }

    engines.document.close();
    until_stale(&gateway, true).await;
    pairs(&gateway, 8).await;
    engines.document.reopen().await;
    until_stale(&gateway, false).await;

    // None of these events is a change of the fleet.
    assert_eq!(version(&gateway).await, before);
    gateway.is_ready().await;
    gateway.assert_comes_to_rest().await;
}

pub async fn a_fleet_is_given_up_when_its_source_has_failed_for_too_long(proxy: Proxy) {
    let (engines, gateway) = open(proxy, json!({"keep_stale_ms": 3000})).await;
    engines.document.set_status(500);
    until_stale(&gateway, true).await;
    pairs(&gateway, 4).await;
    until_answered_with(&gateway, 503).await;
    gateway.is_not_ready().await;
    let before = engines.total(Role::Prefill).await.requests;
    gateway.send(Ask::chat("hello")).await.expect_error(503);
    assert_eq!(engines.total(Role::Prefill).await.requests, before);

    engines.document.set_status(200);
    until_answered_with(&gateway, 200).await;
    until_stale(&gateway, false).await;
    gateway.assert_comes_to_rest().await;
}

pub async fn an_empty_list_is_believed_the_second_time(proxy: Proxy) {
    // Time between two polls in which the empty list is replaced again.
    let (mut engines, gateway) = open(proxy, json!({"interval_ms": 2500})).await;
    let before = version(&gateway).await;
    engines.document.publish(&[]);
    engines.document.until_polled(1).await;
    engines.list(Role::Prefill);
    pairs(&gateway, 4).await;
    engines.document.until_polled(1).await;
    pairs(&gateway, 4).await;
    assert_eq!(version(&gateway).await, before);

    engines.document.publish(&[]);
    until_answered_with(&gateway, 503).await;
    engines.list(Role::Prefill);
    until_answered_with(&gateway, 200).await;
    // A 304 for the empty list confirms it.
    engines.document.tag();
    engines.document.publish(&[]);
    until_answered_with(&gateway, 503).await;
    gateway.assert_comes_to_rest().await;
}

pub async fn what_has_not_changed_costs_nothing(proxy: Proxy) {
    let (mut engines, gateway) = open(proxy, json!({})).await;
    let first = version(&gateway).await;
    engines.document.until_polled(4).await;
    assert_eq!(version(&gateway).await, first, "the same page, read again");

    engines.document.tag();
    engines.document.until_polled(2).await;
    let before = engines.document.unchanged();
    engines.document.until_polled(4).await;
    let unchanged = engines.document.unchanged() - before;
    assert!(unchanged >= 3, "{unchanged} answers of 304");
    assert_eq!(version(&gateway).await, first);
    until_stale(&gateway, false).await;

    // A change is still seen.
    engines.prefill[0].kill().await;
    engines.prefill[0].start().await;
    engines.list_one(Role::Prefill, 0);
    until_listed(&gateway, &engines.prefill[0].name(), true).await;
    assert!(version(&gateway).await > first);
    // After a failure the source is polled without a tag.
    engines.document.set_status(503);
    until_stale(&gateway, true).await;
    engines.document.set_status(200);
    until_stale(&gateway, false).await;
    // The third poll begins when the second has been read.
    engines.document.until_polled(3).await;
    pairs(&gateway, 4).await;
    gateway.assert_comes_to_rest().await;
}
