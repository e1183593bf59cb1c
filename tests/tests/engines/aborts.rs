//! Clients that leave, before, during and after prefill.

use std::time::Duration;

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::engines::Role;
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::vllm::{Fleet, LEASE, MODEL};
use pd_router_e2e::wait::GENEROUS;
use serde_json::json;
use tokio::time::sleep;

use crate::corpus::{CHAT, words};
use crate::errors::nothing_is_held_within;

/// Clients that leave, each at a moment of its own.
const CLIENTS: usize = 24;

/// Between the moments of two clients, in milliseconds: the last ones leave while they read.
const STEP_MS: u64 = 40;

pub async fn clients_that_leave_leave_nothing_held(fleet: &Fleet) {
    let gateway = Gateway::start(Proxy::Envoy, &fleet.config(), &[]).await;
    let before = fleet.figures(Role::Prefill).await;
    join_all((0..CLIENTS).map(|number| leave(&gateway, number))).await;
    gateway.assert_comes_to_rest().await;
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.expect("pd_router_kv_leaked_handoffs_total"), 0.0);
    // A busy decode engine may drop a request before its scheduler has seen it, and then fetches nothing.
    let unknown = metrics.expect("pd_router_kv_unknown_handoffs_total");
    let limit = match unknown == 0.0 {
        true => GENEROUS,
        false => LEASE + GENEROUS,
    };
    nothing_is_held_within(limit, fleet).await;
    let after = fleet.figures(Role::Prefill).await;
    assert!(after.prompt_tokens > before.prompt_tokens, "{after:?}");
    // The others were fetched or given up, not left until their lease was over.
    let expired = after.expired - before.expired;
    assert!(
        expired <= unknown,
        "{expired} leases ran out, {unknown} hand-offs are unknown"
    );
}

/// Asks for a long stream with a long prompt, and leaves; one in four does so before the request is complete.
async fn leave(gateway: &Gateway, number: usize) {
    let body = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": words(7000 + number, 900)}],
        "max_tokens": 400,
        "stream": true,
    });
    let request = raw::post(CHAT, &[], body.to_string().as_bytes());
    let sent = if number.is_multiple_of(4) {
        request.len() - 1
    } else {
        request.len()
    };
    let mut client = Raw::connect(gateway.listen).await;
    client.write(&request[..sent]).await;
    sleep(Duration::from_millis(STEP_MS * number as u64)).await;
}
