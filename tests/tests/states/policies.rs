//! Requests without prefill workers, and requests whose prefill fails, under the pool's policies.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{Engine, FAST, Fleet, Role, static_config};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::traffic::Traffic;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

const CLIENTS: usize = 8;

/// A prompt whose prefill fails after its computation.
const FAILS: &str = "this one <|fail-prefill|>";

fn whole_requests() -> Value {
    json!({"decode": {"runs_whole_requests": true}})
}

/// Waits until normal requests are answered by both threads.
async fn until_answered(gateway: &Gateway) {
    eventually("chats are answered", GENEROUS, || async {
        for _ in 0..8 {
            let reply = chat(gateway).await?;
            if reply.status != 200 {
                return Err(format!("{}: {}", reply.status, reply.text()));
            }
        }
        Ok(())
    })
    .await;
}

/// Waits until both threads report to clients and on their pages that there is no prefill worker.
async fn until_not_activated(gateway: &Gateway) {
    eventually("prefill is not activated", GENEROUS, || async {
        for _ in 0..8 {
            let reply = chat(gateway).await?;
            // A thread that does not know yet tries dead workers.
            if reply.status != 503 || reply.json()["error"]["code"] != "prefill_not_activated" {
                return Err(format!("{}: {}", reply.status, reply.text()));
            }
            let message = reply.expect_error(503);
            assert!(message.to_lowercase().contains("prefill"), "{message}");
            assert!(reply.header("retry-after").is_some(), "{reply:?}");
            let ready = gateway.try_send(Ask::get("/pd-router/ready")).await;
            let ready = ready.map_err(|failure| failure.to_string())?;
            if ready.status != 503 {
                return Err(format!("ready: {}", ready.status));
            }
        }
        Ok(())
    })
    .await;
}

async fn chat(gateway: &Gateway) -> Result<Reply, String> {
    let reply = gateway.try_send(Ask::chat("hello")).await;
    reply.map_err(|failure| failure.to_string())
}

async fn fallbacks(gateway: &Gateway, reason: &str) -> f64 {
    let metrics = gateway.metrics().await;
    let labels = [("reason", reason)];
    let fallbacks = metrics.sum_where("pd_router_fallbacks_total", &labels);
    fallbacks.unwrap_or_default()
}

pub async fn prefill_gone_and_back_where_decode_runs_whole_requests(proxy: Proxy) {
    let roles = (Role::Prefill, Role::Aggregated);
    let mut engines = EngineSet::with_roles(roles, (1, 2), FAST).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let mut gateway = engines.gateway(proxy, whole_requests()).await;
    let processes = gateway.processes();
    gateway.answers().await;
    assert_eq!(engines.total(Role::Decode).await.requests_by_leg.whole, 0);
    assert_eq!(fallbacks(&gateway, "prefill_absent").await, 0.0);

    let traffic = Traffic::start(gateway.listen, CLIENTS);
    engines.remove(Role::Prefill).await;
    // The decode engines count their requests by kind.
    eventually("decode runs whole requests", GENEROUS, || async {
        let state = engines.total(Role::Decode).await;
        if state.requests_by_leg.whole > 20 {
            return Ok(());
        }
        Err(format!("{state:?}"))
    })
    .await;
    gateway.send(Ask::get("/pd-router/ready")).await.expect(200);
    gateway
        .send(Ask::get("/v1/models/sim/ready"))
        .await
        .expect(200);
    assert!(fallbacks(&gateway, "prefill_absent").await > 0.0);

    engines.start_and_list(Role::Prefill).await;
    eventually("prefill is used again", GENEROUS, || async {
        let state = engines.prefill[0].engine().state().await;
        if state.answered > 0 {
            return Ok(());
        }
        Err(format!("{state:?}"))
    })
    .await;
    let tally = traffic.stop().await;
    // Once both threads know, no request runs aggregated any more.
    until_disaggregated(&engines, &gateway).await;
    let decode = engines.total(Role::Decode).await;
    assert_eq!(decode.refused(), 0, "{decode:?}");
    assert!(decode.answered >= tally.answered, "{tally:?} {decode:?}");
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(&processes);
}

async fn until_disaggregated(engines: &EngineSet, gateway: &Gateway) {
    eventually("all are disaggregated", GENEROUS, || async {
        let before = engines.total(Role::Decode).await.requests_by_leg;
        for _ in 0..8 {
            let reply = gateway.try_send(Ask::chat("hello")).await;
            let reply = reply.map_err(|failure| failure.to_string())?;
            if reply.status != 200 {
                return Err(format!("{}: {}", reply.status, reply.text()));
            }
        }
        let after = engines.total(Role::Decode).await.requests_by_leg;
        if after.whole == before.whole && after.decode == before.decode + 8 {
            return Ok(());
        }
        Err(format!("{before:?}, then {after:?}"))
    })
    .await;
}

/// Prefill leaves and comes back; meanwhile requests fail, and decode gets none.
async fn fails_without_prefill(proxy: Proxy, decode: Role, pool: Value) {
    let mut engines = EngineSet::with_roles((Role::Prefill, decode), (2, 2), FAST).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let mut gateway = engines.gateway(proxy, pool).await;
    let processes = gateway.processes();
    until_answered(&gateway).await;
    let traffic = Traffic::start(gateway.listen, CLIENTS);
    for _ in 0..2 {
        engines.remove(Role::Prefill).await;
        until_not_activated(&gateway).await;
        traffic.until_put_off().await;
        engines.start_and_list(Role::Prefill).await;
        until_answered(&gateway).await;
        traffic
            .until_answered_by(&engines.names(Role::Decode))
            .await;
    }
    let tally = traffic.stop().await;
    let state = engines.total(Role::Decode).await;
    assert_eq!(state.refused(), 0, "{tally:?} {state:?}");
    assert_eq!(state.requests_by_leg.whole, 0, "{tally:?} {state:?}");
    assert_eq!(fallbacks(&gateway, "prefill_absent").await, 0.0);
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(&processes);
}

pub async fn prefill_gone_and_back_where_decode_only_decodes(proxy: Proxy) {
    fails_without_prefill(proxy, Role::Decode, json!({})).await;
}

pub async fn prefill_gone_and_back_where_the_policy_is_to_fail(proxy: Proxy) {
    let pool = json!({
        "on_prefill_absent": "fail",
        "decode": {"runs_whole_requests": true},
    });
    fails_without_prefill(proxy, Role::Aggregated, pool).await;
}

pub async fn prefill_gone_and_back_where_disaggregation_is_enforced(proxy: Proxy) {
    let pool = json!({
        "enforce_disagg": true,
        "decode": {"runs_whole_requests": true},
    });
    fails_without_prefill(proxy, Role::Aggregated, pool).await;
}

pub async fn a_failed_prefill_is_tried_elsewhere_and_then_fails(proxy: Proxy) {
    let fleet = Fleet::start(2, 1, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    for ask in [Ask::chat(FAILS), Ask::chat_stream(FAILS)] {
        let reply = gateway.send(ask).await;
        reply.expect_code(503, "prefill_failed");
        assert!(reply.header("retry-after").is_some(), "{reply:?}");
    }
    for engine in &fleet.prefill {
        let state = engine.state().await;
        assert_eq!(state.requests, 2, "each was tried once a time: {state:?}");
    }
    assert_eq!(fleet.decode_total().await.requests, 0);
    gateway.assert_comes_to_rest().await;
}

pub async fn a_failed_prefill_fails_at_once_where_configured(proxy: Proxy) {
    let fleet = Fleet::start(2, 1, FAST).await;
    let config = fleet.config_with(json!({"on_prefill_failure": ["fail"]}));
    let gateway = Gateway::start(proxy, &config, &[]).await;
    let reply = gateway.send(Ask::chat(FAILS)).await;
    reply.expect_code(503, "prefill_failed");
    assert_eq!(fleet.prefill_total().await.requests, 1);
    assert_eq!(fleet.decode_total().await.requests, 0);
    gateway.send(Ask::chat("hello")).await.expect(200);
    gateway.assert_comes_to_rest().await;
}

/// Two prefill engines, and an aggregated one listed as decode.
async fn with_whole_decode(proxy: Proxy, pool: Value) -> (Fleet, Gateway) {
    let fleet = Fleet::start_with_aggregated(2, 0, 1, FAST).await;
    let listed = |engine: &Engine| {
        let mut line = engine.listed();
        if engine.role == Role::Aggregated {
            line["role"] = json!(Role::Decode.as_str());
        }
        line
    };
    let workers = fleet.engines().map(listed).collect();
    let gateway = Gateway::start(proxy, &static_config(workers, pool), &[]).await;
    (fleet, gateway)
}

pub async fn a_failed_prefill_is_done_by_decode_where_configured(proxy: Proxy) {
    let pool = json!({
        "on_prefill_failure": ["retry_other", "decode_only"],
        "decode": {"runs_whole_requests": true},
    });
    let (fleet, gateway) = with_whole_decode(proxy, pool).await;
    let reply = gateway.send(Ask::chat(FAILS)).await.expect(200);
    assert_eq!(reply.json()["usage"]["completion_tokens"], 4);
    let reply = gateway.send(Ask::chat_stream(FAILS)).await.expect(200);
    assert!(!reply.events().is_empty());
    assert_eq!(fleet.prefill_total().await.requests, 4, "both, both times");
    let whole = fleet.aggregated[0].state().await;
    assert_eq!(whole.requests_by_leg.whole, 2, "{whole:?}");
    assert_eq!(whole.requests, 2, "{whole:?}");
    assert_eq!(fallbacks(&gateway, "prefill_failed").await, 2.0);
    gateway.assert_comes_to_rest().await;
}

pub async fn decode_only_is_refused_where_decode_only_decodes(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let pool = json!({"on_prefill_failure": ["retry_other", "decode_only"]});
    let started = Gateway::try_start(proxy, &fleet.config_with(pool), &[]).await;
    let Err(failure) = started else {
        panic!("started with decode_only before decode-only workers");
    };
    let ended = failure.status.is_some_and(|status| !status.success());
    assert!(ended, "{failure:?}");
    assert!(failure.log.contains("decode_only"), "{}", failure.log);
}

pub async fn enforced_disaggregation_is_never_decode_only(proxy: Proxy) {
    let pool = json!({
        "enforce_disagg": true,
        "decode": {"runs_whole_requests": true},
    });
    let (fleet, gateway) = with_whole_decode(proxy, pool).await;
    let reply = gateway.send(Ask::chat(FAILS)).await;
    reply.expect_code(503, "prefill_failed");
    assert_eq!(fleet.aggregated[0].state().await.requests, 0);
    assert_eq!(fallbacks(&gateway, "prefill_failed").await, 0.0);
    gateway.assert_comes_to_rest().await;
}
