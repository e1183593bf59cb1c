//! Hand-offs that decode cannot use: never a wrong token, and the right engine is blamed.

use std::time::Duration;

use pd_router_e2e::Proxy;
use pd_router_e2e::engines::{Role, in_turns, static_config, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::vllm::{Engine, Fleet};
use serde_json::{Value, json};

use crate::compare::are_equal;
use crate::corpus;
use crate::relay::{Fault, Relay};

/// A configuration with the relay and these engines.
fn config<'a>(relay: &Relay, engines: impl Iterator<Item = &'a Engine>, pool: Value) -> Value {
    let workers = std::iter::once(relay.listed()).chain(engines.map(Engine::listed));
    static_config(workers.collect(), with(in_turns(), pool))
}

fn prefill(fleet: &Fleet) -> &Engine {
    fleet.of(Role::Prefill).next().expect("a prefill engine")
}

pub async fn found_v2_a_load_failure_is_recovered_streamed_or_not(fleet: &Fleet) {
    for case in corpus::one_of_each_that_is_handed_over() {
        let relay = Relay::start(prefill(fleet).address, Fault::OtherEngine(1)).await;
        let config = config(&relay, fleet.of(Role::Decode), json!({}));
        let gateway = Gateway::start_on_one_thread(Proxy::Envoy, &config, &[]).await;
        are_equal(&gateway, &fleet.alone, &[case]).await;
        // The first hand-off was of no use, so there was a second one.
        assert_eq!(relay.legs(), 2);
        gateway.assert_comes_to_rest().await;
    }
}

pub async fn found_v8_a_prefill_engine_whose_blocks_cannot_be_fetched_is_blamed(fleet: &Fleet) {
    let relay = Relay::start(prefill(fleet).address, Fault::Unreachable).await;
    let config = config(&relay, fleet.engines.iter(), json!({}));
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
    let relay = Relay::start(prefill(fleet).address, late).await;
    let config = config(&relay, fleet.of(Role::Decode), json!({}));
    let gateway = Gateway::start_on_one_thread(Proxy::Envoy, &config, &[]).await;
    are_equal(&gateway, &fleet.alone, &corpus::handed_over(1)).await;
    assert_eq!(relay.legs(), 1);
}
