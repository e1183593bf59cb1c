//! Hand-offs that decode cannot use: never a wrong token, and the right engine is blamed.

use std::collections::BTreeSet;
use std::slice;
use std::time::Duration;

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::engines::{Role, in_turns, static_config, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::vllm::{Engine, Fleet, patient};
use serde_json::{Value, json};

use crate::compare::are_equal;
use crate::corpus;
use crate::relay::{Fault, Relay};

/// A configuration with the relays and these engines.
fn config<'a>(relays: &[Relay], engines: impl Iterator<Item = &'a Engine>, pool: Value) -> Value {
    let relays = relays.iter().map(Relay::listed);
    let workers = relays.chain(engines.map(Engine::listed));
    static_config(workers.collect(), with(in_turns(), pool))
}

pub async fn found_v2_a_load_failure_is_recovered_streamed_or_not(fleet: &Fleet) {
    for case in corpus::one_of_each_that_is_handed_over() {
        let relay = Relay::start(fleet.first(Role::Prefill), Fault::OtherEngine(1)).await;
        let config = config(slice::from_ref(&relay), fleet.of(Role::Decode), patient());
        let gateway = Gateway::start_on_one_thread(Proxy::Envoy, &config, &[]).await;
        are_equal(&gateway, &fleet.alone, &[case]).await;
        // The first hand-off was of no use, so there was a second one.
        assert_eq!(relay.legs(), 2);
        gateway.assert_comes_to_rest().await;
    }
}

pub async fn found_v8_a_prefill_engine_whose_blocks_cannot_be_fetched_is_blamed(fleet: &Fleet) {
    let relay = Relay::start(fleet.first(Role::Prefill), Fault::Unreachable).await;
    let config = config(slice::from_ref(&relay), fleet.engines.iter(), patient());
    let gateway = Gateway::start_on_one_thread(Proxy::Envoy, &config, &[]).await;
    for case in corpus::handed_over(24) {
        are_equal(&gateway, &fleet.alone, &[case]).await;
    }
    let metrics = gateway.metrics().await;
    let ejections = |role| metrics.sum_where("pd_router_ejections_total", &[("role", role)]);
    let legs = relay.legs();
    assert!(
        ejections("prefill") >= Some(1.0),
        "the relay was used {legs} times"
    );
    assert_eq!(ejections("decode"), Some(0.0));
    gateway.assert_comes_to_rest().await;
}

pub async fn found_v4_a_first_prefill_that_is_slow_is_waited_for(fleet: &Fleet) {
    // Longer than a warm engine is given.
    let late = Fault::Late(Duration::from_secs(20), 1);
    let relay = Relay::start(fleet.first(Role::Prefill), late).await;
    let config = config(slice::from_ref(&relay), fleet.of(Role::Decode), json!({}));
    let gateway = Gateway::start_on_one_thread(Proxy::Envoy, &config, &[]).await;
    are_equal(&gateway, &fleet.alone, &corpus::handed_over(1)).await;
    assert_eq!(relay.legs(), 1);
}

pub async fn a_hand_off_that_is_cut_is_not_used(fleet: &Fleet) {
    let relay = Relay::start(fleet.first(Role::Prefill), Fault::Cut(1)).await;
    let config = config(slice::from_ref(&relay), fleet.engines.iter(), patient());
    let gateway = Gateway::start_on_one_thread(Proxy::Envoy, &config, &[]).await;
    // In turns: one of them meets the relay.
    are_equal(&gateway, &fleet.alone, &corpus::handed_over(6)).await;
    assert!(relay.legs() > 0, "the relay was not used");
    gateway.assert_comes_to_rest().await;
}

pub async fn found_v3_a_hand_off_is_used_once(fleet: &Fleet) {
    for case in corpus::one_of_each_that_is_handed_over() {
        let relays = fleet
            .of(Role::Decode)
            .map(|engine| Relay::start(engine, Fault::Loses(1)));
        let relays = join_all(relays).await;
        let config = config(&relays, fleet.of(Role::Prefill), patient());
        let gateway = Gateway::start_on_one_thread(Proxy::Envoy, &config, &[]).await;
        are_equal(&gateway, &fleet.alone, &[case]).await;
        let fetched: Vec<String> = relays.iter().flat_map(Relay::fetched).collect();
        let different: BTreeSet<&String> = fetched.iter().collect();
        assert!(fetched.len() > 1, "no answer was lost");
        assert_eq!(different.len(), fetched.len(), "{fetched:?}");
        gateway.assert_comes_to_rest().await;
    }
}
