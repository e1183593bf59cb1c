//! A health probe without patience: a decode worker that is too busy to answer it in time is killed and restarted.

use std::time::Duration;

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Failure, Reply, try_send};
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{Engine, Role};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::traffic::Traffic;
use pd_router_e2e::wait::{GENEROUS, count, eventually};
use serde_json::json;
use tokio::time::timeout;

use crate::restarts::{judge, judge_prefills};

/// A decode of four tokens takes 200 ms: bursts overlap.
const SLOW_DECODE: [&str; 4] = ["--token-ms", "50", "--prefill-rate", "80000"];

const CLIENTS: usize = 4;

/// Concurrent requests, beside the clients in a loop.
const BURST: usize = 24;

/// Limit of a probe: a busy engine takes longer to answer.
const PROBE_LIMIT: Duration = Duration::from_millis(200);
const BUSY_HEALTH_MS: u64 = 10_000;

pub async fn a_health_probe_kills_busy_decode_workers_under_bursts(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(2, 2, &SLOW_DECODE).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let mut gateway = engines.gateway(proxy, json!({})).await;
    gateway.answers().await;
    let processes = gateway.processes();
    let before = engines.total(Role::Prefill).await;
    let traffic = Traffic::start(gateway.listen, CLIENTS);
    traffic
        .until_answered_by(&engines.names(Role::Decode))
        .await;
    let mut sent = 0;
    for _ in 0..count(1, 3) {
        let probed = async {
            for at in 0..engines.decode.len() {
                until_busy(engines.decode[at].engine()).await;
                probe(&mut engines, at).await;
            }
        };
        let (replies, ()) = tokio::join!(burst(&gateway), probed);
        sent += replies.len() as u64;
        for reply in replies {
            assert_fit(&reply);
        }
        traffic
            .until_answered_by(&engines.names(Role::Decode))
            .await;
    }
    let mut tally = traffic.stop().await;
    tally.sent += sent;
    judge(&engines, &tally).await;
    judge_prefills(&engines, &gateway, &tally, &before).await;
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(&processes);
}

async fn burst(gateway: &Gateway) -> Vec<Result<Reply, Failure>> {
    let one = |number| {
        let ask = match number % 2 {
            0 => Ask::chat("one of many"),
            _ => Ask::chat_stream("one of many"),
        };
        gateway.try_send(ask)
    };
    join_all((0..BURST).map(one)).await
}

/// Fails unless the request was answered, put off, or torn by the death of its worker.
fn assert_fit(reply: &Result<Reply, Failure>) {
    match reply {
        Ok(reply) if reply.status == 200 => {
            let text = reply.text();
            let whole = text.contains("[DONE]") || text.contains("\"usage\"");
            assert!(whole, "{reply:?}");
        }
        Ok(reply) => {
            reply.expect_error(503);
            assert!(reply.header("retry-after").is_some(), "{reply:?}");
        }
        Err(Failure::BreaksOff(_)) => {}
        Err(failure) => panic!("{failure}"),
    }
}

/// Waits until the engine is busy, and makes its health check late.
async fn until_busy(engine: &Engine) {
    eventually("the engine is busy", GENEROUS, || async {
        let state = engine.state().await;
        if state.running > 0 {
            return Ok(());
        }
        Err(format!("{state:?}"))
    })
    .await;
    engine
        .set_health(&json!({"delay_ms": BUSY_HEALTH_MS}))
        .await;
}

/// Probes the engine's health and restarts it, as an orchestrator does.
async fn probe(engines: &mut EngineSet, at: usize) {
    let health = try_send(engines.decode[at].address, Ask::get("/health"));
    let healthy =
        matches!(timeout(PROBE_LIMIT, health).await, Ok(Ok(reply)) if reply.status == 200);
    assert!(!healthy, "the engine was to look dead");
    engines.decode[at].kill().await;
    engines.unlist_one(Role::Decode, at);
    engines.decode[at].start().await;
    engines.list_one(Role::Decode, at);
}
