//! A late prefill: a second worker is called beside the first, and the first one's hand-off is cleaned up.

use std::time::{Duration, Instant};

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::{FAST, Fleet, in_turns, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

/// Delay of the first worker, in milliseconds: far longer than a quick answer on a busy machine.
const LATE_MS: u64 = 6_000;

pub async fn a_late_prefill_gets_a_second_beside_it(proxy: Proxy) {
    let fleet = Fleet::start(2, 1, FAST).await;
    let pool = with(in_turns(), json!({"prefill": {"hedge_after_ms": 300}}));
    let gateway = Gateway::start(proxy, &fleet.config_with(pool), &[]).await;
    let late = json!({"kind": "delay", "ms": LATE_MS});
    fleet.prefill[0].fault(&late).await;
    let sent = Instant::now();
    // Round robin: on each thread one of two requests meets the late worker.
    for ask in [
        Ask::chat("one"),
        Ask::chat_stream("two"),
        Ask::chat("three"),
        Ask::chat("four"),
    ] {
        gateway.send(ask).await.expect(200);
    }
    assert!(sent.elapsed() < Duration::from_millis(LATE_MS));
    let metrics = gateway.metrics().await;
    let hedges = metrics.expect("pd_router_hedges_total");
    assert!(hedges >= 1.0, "{hedges}");
    // The late prefills end at last; their hand-offs are fetched by clean-up legs, or counted as left.
    eventually("the late prefills end", GENEROUS, || async {
        let state = fleet.prefill_total().await;
        match state.running == 0 && state.handoffs_issued as f64 == 4.0 + hedges {
            true => Ok(()),
            false => Err(format!("{state:?}")),
        }
    })
    .await;
    gateway.assert_comes_to_rest().await;
    let prefill = fleet.prefill_total().await;
    let left = prefill.handoffs_issued - prefill.handoffs_consumed;
    let metrics = gateway.metrics().await;
    let counted = metrics.expect("pd_router_kv_leaked_handoffs_total");
    assert_eq!(left as f64, counted, "{prefill:?}");
    assert_eq!(left, 0, "{prefill:?}");
    fleet.assert_no_decode_refused().await;
}
