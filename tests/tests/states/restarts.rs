//! All workers of a role restarted, in good order and not, while clients send requests.

use pd_router_e2e::Proxy;
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{FAST, Role, State};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::traffic::{Tally, Traffic};
use pd_router_e2e::wait::{GENEROUS, count, eventually};
use serde_json::json;

const CLIENTS: usize = 8;

/// Two engines of each role, and a gateway that serves.
async fn at_work(proxy: Proxy) -> (EngineSet, Gateway) {
    let mut engines = EngineSet::with_slots(2, 2, FAST).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let gateway = engines.gateway(proxy, json!({})).await;
    gateway.answers().await;
    (engines, gateway)
}

/// One restart of all of `role`, in one of three ways.
async fn restart(engines: &mut EngineSet, gateway: &Gateway, role: Role, round: usize) {
    match round % 3 {
        // In good order: unlisted, idle, killed, started and listed.
        0 => {
            engines.unlist(role);
            gateway.is_not_ready().await;
            engines.is_idle(role).await;
            engines.kill(role).await;
            engines.start_and_list(role).await;
        }
        // Killed first, then unlisted.
        1 => {
            engines.kill(role).await;
            engines.unlist(role);
            gateway.is_not_ready().await;
            engines.start_and_list(role).await;
        }
        // Killed, and replaced in the document by another at the same address.
        _ => {
            engines.kill(role).await;
            engines.start_and_list(role).await;
        }
    }
}

/// Fails if a decode engine got a request that it should not.
pub async fn judge(engines: &EngineSet, tally: &Tally) {
    let prefill = engines.total(Role::Prefill).await;
    let decode = engines.total(Role::Decode).await;
    let seen = format!("{tally:?}\nprefill: {prefill:?}\ndecode: {decode:?}");
    assert!(tally.answered > 0, "{seen}");
    assert_eq!(decode.refused(), 0, "{seen}");
    assert!(decode.prompt_tokens_computed <= decode.requests, "{seen}");
    assert_eq!(tally.unknown, 0, "the model was never gone: {seen}");
}

/// Fails if a request had two prefills without a failure of its decode worker, or an answer none. `before`: prefill's
/// counters before the traffic.
pub async fn judge_prefills(engines: &EngineSet, gateway: &Gateway, tally: &Tally, before: &State) {
    let prefill = engines.total(Role::Prefill).await;
    let recoveries = gateway.metrics().await.sum("pd_router_recoveries_total");
    let recoveries = recoveries.unwrap_or_default() as u64;
    let seen = format!("{tally:?}\nprefill: {prefill:?}\nrecoveries: {recoveries}");
    let consumed = prefill.handoffs_consumed - before.handoffs_consumed;
    // One for each answer; hand-offs of unanswered requests may be used or not.
    assert!(consumed >= tally.answered, "{seen}");
    let requests = prefill.requests - before.requests;
    assert!(requests <= tally.sent + recoveries, "{seen}");
    assert_eq!(tally.lost, 0, "prefill was always there: {seen}");
}

pub async fn all_decode_workers_are_restarted_again_and_again(proxy: Proxy) {
    let (mut engines, mut gateway) = at_work(proxy).await;
    let processes = gateway.processes();
    // Requests of the preparation are no traffic.
    let before = engines.total(Role::Prefill).await;
    let traffic = Traffic::start(gateway.listen, CLIENTS);
    traffic
        .until_answered_by(&engines.names(Role::Decode))
        .await;
    for round in 0..count(3, 10) {
        restart(&mut engines, &gateway, Role::Decode, round).await;
        traffic
            .until_answered_by(&engines.names(Role::Decode))
            .await;
    }
    let tally = traffic.stop().await;
    judge(&engines, &tally).await;
    judge_prefills(&engines, &gateway, &tally, &before).await;
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(&processes);
}

pub async fn all_prefill_workers_are_restarted_again_and_again(proxy: Proxy) {
    let (mut engines, mut gateway) = at_work(proxy).await;
    let processes = gateway.processes();
    let traffic = Traffic::start(gateway.listen, CLIENTS);
    for round in 0..count(3, 10) {
        restart(&mut engines, &gateway, Role::Prefill, round).await;
        traffic
            .until_answered_by(&engines.names(Role::Decode))
            .await;
        until_all_prefill(&engines).await;
    }
    let tally = traffic.stop().await;
    judge(&engines, &tally).await;
    // No decode engine was ever away.
    let decode = engines.total(Role::Decode).await;
    assert!(decode.answered >= tally.answered, "{tally:?}; {decode:?}");
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(&processes);
}

/// Waits until every running prefill engine has issued a hand-off.
async fn until_all_prefill(engines: &EngineSet) {
    eventually("all new prefill engines are used", GENEROUS, || async {
        for slot in &engines.prefill {
            let state = slot.engine().state().await;
            if state.handoffs_consumed == 0 {
                return Err(format!("{}: {state:?}", slot.name()));
            }
        }
        Ok(())
    })
    .await;
}
