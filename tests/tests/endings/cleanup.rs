//! Clients that leave during prefill: a clean-up leg fetches the blocks, or they are counted.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::chat_body;
use pd_router_e2e::engines::{FAST, Fleet};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::metrics::Metrics;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// A prefill of the prompt below takes half a second; leases outlast the test.
const SLOW_PREFILL: [&str; 6] = [
    "--prefill-rate",
    "800",
    "--lease-ms",
    "3600000",
    "--token-ms",
    "1",
];

const LEAVERS: u64 = 4;

fn long_body() -> Value {
    chat_body(&"tell ".repeat(320))
}

async fn write(gateway: &Gateway, body: &Value) -> Raw {
    let mut client = Raw::connect(gateway.listen).await;
    let request = raw::post(CHAT, &[], body.to_string().as_bytes());
    client.write(&request).await;
    client
}

/// Sends these requests one after the other, each until its prefill has begun, and leaves.
async fn leave_during_prefill(fleet: &Fleet, gateway: &Gateway, bodies: &[Value]) {
    let mut clients = Vec::new();
    let before = fleet.prefill_total().await.requests;
    for body in bodies {
        clients.push(write(gateway, body).await);
    }
    eventually("the prefills have begun", GENEROUS, || async {
        let state = fleet.prefill_total().await;
        if state.requests == before + bodies.len() as u64 {
            return Ok(());
        }
        Err(format!("{state:?}"))
    })
    .await;
    // Each prefill takes half a second, one after the other.
    drop(clients);
    eventually("the prefills end", GENEROUS, || async {
        let state = fleet.prefill_total().await;
        if state.running == 0 && state.handoffs_issued >= before + bodies.len() as u64 {
            return Ok(());
        }
        Err(format!("{state:?}"))
    })
    .await;
}

fn cleaned_up(metrics: &Metrics) -> f64 {
    let cleaned = metrics.sum("pd_router_clean_ups_total");
    cleaned.unwrap_or_default()
}

fn of_fate(metrics: &Metrics, fate: &str) -> (f64, f64) {
    let of = |what: &str| metrics.expect(&format!("pd_router_kv_{fate}_{what}_total"));
    (of("handoffs"), of("blocks"))
}

/// Hand-offs known to be left, and hand-offs that may be.
fn leaked(metrics: &Metrics) -> (f64, f64) {
    let [known, unknown] = ["leaked", "unknown"].map(|fate| of_fate(metrics, fate));
    (known.0 + unknown.0, known.1 + unknown.1)
}

/// Waits until the gateway has counted exactly the hand-offs that were never pulled.
async fn assert_leaks_are_counted(fleet: &Fleet, gateway: &Gateway, hand_offs: u64) {
    eventually("what is left is counted", GENEROUS, || async {
        let state = fleet.prefill_total().await;
        let metrics = gateway.metrics().await;
        let counted = leaked(&metrics);
        let unused = state.handoffs_issued - state.handoffs_consumed;
        let right = (unused as f64, state.blocks_unpulled as f64);
        if counted == right && unused == hand_offs {
            return Ok(());
        }
        Err(format!(
            "counted {counted:?}, right is {right:?}: {state:?}"
        ))
    })
    .await;
}

pub async fn what_clients_leave_behind_in_prefill_is_cleaned_up(proxy: Proxy) {
    let fleet = Fleet::start(2, 1, &SLOW_PREFILL).await;
    let mut gateway = Gateway::over(proxy, &fleet).await;
    let mut streamed = long_body();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    streamed["max_completion_tokens"] = json!(50);
    streamed["min_tokens"] = json!(3);
    let bodies = [long_body(), streamed.clone(), long_body(), streamed];
    leave_during_prefill(&fleet, &gateway, &bodies).await;
    eventually("the blocks are fetched", GENEROUS, || async {
        let state = fleet.prefill_total().await;
        if state.blocks_unpulled == 0 && state.handoffs_consumed == LEAVERS {
            return Ok(());
        }
        Err(format!("{state:?}"))
    })
    .await;
    gateway.assert_comes_to_rest().await;
    let metrics = gateway.metrics().await;
    assert_eq!(cleaned_up(&metrics), LEAVERS as f64);
    assert_eq!(leaked(&metrics), (0.0, 0.0));
    let fetched = of_fate(&metrics, "fetched");
    let blocks = fleet.prefill_total().await.blocks_pulled;
    assert_eq!(fetched, (LEAVERS as f64, blocks as f64));

    let legs = fleet.decode[0].requests().await;
    assert_eq!(legs.len() as u64, LEAVERS);
    for leg in legs {
        let body = leg.json();
        assert_eq!(body["max_tokens"], 1, "{body}");
        let most = body["max_completion_tokens"].as_u64();
        assert!(most.is_none_or(|most| most == 1), "{body}");
        assert_ne!(body["stream"], true, "{body}");
        assert!(body.get("stream_options").is_none(), "{body}");
        let least = body["min_tokens"].as_u64();
        assert!(least.is_none_or(|least| least == 1), "{body}");
        assert!(body["kv_transfer_params"].is_object(), "{body}");
    }
    let decode = fleet.decode_total().await;
    assert_eq!(decode.refused(), 0, "{decode:?}");
    assert!(decode.prompt_tokens_computed <= LEAVERS, "{decode:?}");
    gateway.assert_serves().await;
    gateway.assert_comes_to_rest().await;
}

pub async fn what_a_clean_up_cannot_fetch_is_counted(proxy: Proxy) {
    let mut fleet = Fleet::start(1, 1, &SLOW_PREFILL).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    for engine in &mut fleet.decode {
        engine.kill();
    }
    leave_during_prefill(&fleet, &gateway, &[long_body(), long_body()]).await;
    assert_leaks_are_counted(&fleet, &gateway, 2).await;
    // A clean-up leg without an answer may have fetched its hand-off before.
    let known = of_fate(&gateway.metrics().await, "leaked");
    assert_eq!(known, (0.0, 0.0));
    gateway.assert_comes_to_rest().await;
}

pub async fn without_clean_up_what_is_left_is_counted(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, &SLOW_PREFILL).await;
    let config = fleet.config_with(json!({"cleanup": {"held_bytes": 0}}));
    let mut gateway = Gateway::start(proxy, &config, &[]).await;
    leave_during_prefill(&fleet, &gateway, &[long_body(), long_body()]).await;
    assert_leaks_are_counted(&fleet, &gateway, 2).await;
    assert_eq!(fleet.decode_total().await.requests, 0);
    // No leg was sent that could have fetched it.
    let unknown = of_fate(&gateway.metrics().await, "unknown");
    assert_eq!(unknown, (0.0, 0.0));
    assert_eq!(cleaned_up(&gateway.metrics().await), 0.0);
    gateway.assert_serves().await;
    gateway.assert_comes_to_rest().await;
}

/// Leaves in the middle of a stream and waits for the engines to notice.
async fn leave_during_decode(fleet: &Fleet, gateway: &Gateway) {
    let mut body = chat_body("a long story");
    body["stream"] = json!(true);
    body["max_tokens"] = json!(10_000);
    let mut client = write(gateway, &body).await;
    client.read_until("data:", 3).await;
    drop(client);
    eventually("no engine runs anything", GENEROUS, || async {
        for engine in fleet.engines() {
            let state = engine.state().await;
            if state.running > 0 {
                return Err(format!("{state:?}"));
            }
        }
        Ok(())
    })
    .await;
    gateway.assert_comes_to_rest().await;
    let metrics = gateway.metrics().await;
    assert_eq!(cleaned_up(&metrics), 0.0);
    assert_eq!(leaked(&metrics), (0.0, 0.0));
}

pub async fn a_client_that_leaves_an_aggregated_worker_leaves_nothing_to_clean_up(proxy: Proxy) {
    let options = ["--token-ms", "100"];
    let fleet = Fleet::start_with_aggregated(0, 0, 1, &options).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    leave_during_decode(&fleet, &gateway).await;
    assert_eq!(fleet.aggregated[0].state().await.requests, 1);
}

pub async fn a_client_that_leaves_during_decode_leaves_nothing_to_clean_up(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, &["--token-ms", "100"]).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    leave_during_decode(&fleet, &gateway).await;
    assert_eq!(fleet.decode_total().await.requests, 1);
    assert_eq!(fleet.prefill_total().await.blocks_unpulled, 0);
}

/// Their decode legs have no answer yet and may or may not have fetched the hand-off: the leak is in doubt.
pub async fn found_b18_what_decode_was_asked_to_fetch_is_in_doubt_when_clients_leave(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    fleet.decode[0].fault(&json!({"kind": "hang"})).await;
    let mut clients = Vec::new();
    for _ in 0..LEAVERS {
        clients.push(write(&gateway, &chat_body("hello")).await);
    }
    eventually("decode is asked", GENEROUS, || async {
        let requests = fleet.decode_total().await.requests;
        (requests == LEAVERS)
            .then_some(())
            .ok_or(requests.to_string())
    })
    .await;
    drop(clients);
    let fates = eventually("their ends are counted", GENEROUS, || async {
        let metrics = gateway.metrics().await;
        let [unknown, known] = ["unknown", "leaked"].map(|fate| of_fate(&metrics, fate).0);
        match unknown + known >= LEAVERS as f64 {
            true => Ok((unknown, known)),
            false => Err(format!("{unknown} in doubt, {known} known")),
        }
    })
    .await;
    assert_eq!(fates, (LEAVERS as f64, 0.0), "in doubt, and known");
}
