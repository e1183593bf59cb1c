//! Requests that an engine refuses.

use std::time::Duration;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::Role;
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::vllm::{CONTEXT, Fleet, MODEL};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

use crate::compare::are_equal;
use crate::corpus::{self, COMPLETIONS};

pub async fn an_engines_refusal_is_passed_on_in_its_own_words(fleet: &Fleet) {
    let gateway = Gateway::start(Proxy::Envoy, &fleet.config(), &[]).await;
    are_equal(&gateway, &fleet.alone, &corpus::refused_by_the_engine()).await;
    nothing_is_held(fleet).await;
    gateway.assert_comes_to_rest().await;
}

pub async fn found_v1_what_decode_refuses_leaves_nothing_held(fleet: &Fleet) {
    let gateway = Gateway::start(Proxy::Envoy, &fleet.config(), &[]).await;
    let expired = fleet.figures(Role::Prefill).await.expired;
    for number in 0..4 {
        let ids: Vec<u64> = (0..100).map(|at| 300 + at + number).collect();
        // Prefill is asked for one token, and sees no fault in it.
        let body = json!({"model": MODEL, "prompt": ids, "max_tokens": CONTEXT + 1});
        let reply = gateway.send(Ask::post(COMPLETIONS, body.to_string())).await;
        let error = reply.expect(400).json()["error"].clone();
        assert_eq!(error["type"], "BadRequestError", "{error}");
    }
    nothing_is_held(fleet).await;
    let cleaned = gateway.metrics().await.expect("pd_router_clean_ups_total");
    assert_eq!(cleaned, 4.0);
    assert_eq!(fleet.figures(Role::Prefill).await.expired, expired);
}

/// Waits until no engine runs anything or holds a block.
pub async fn nothing_is_held(fleet: &Fleet) {
    nothing_is_held_within(GENEROUS, fleet).await;
}

/// The same, where it may take so long.
pub async fn nothing_is_held_within(limit: Duration, fleet: &Fleet) {
    eventually("no engine holds anything", limit, || async {
        for role in [Role::Prefill, Role::Decode] {
            let figures = fleet.figures(role).await;
            if figures.running != 0.0 || figures.held != 0.0 {
                return Err(format!("{}: {figures:?}", role.as_str()));
            }
        }
        Ok(())
    })
    .await;
}
