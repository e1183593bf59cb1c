//! All workers of a role restarted, in good order and not, while clients ask.

use pd_router_e2e::Proxy;
use pd_router_e2e::crew::Crew;
use pd_router_e2e::engines::{FAST, Role, State};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::traffic::{Tally, Traffic};
use pd_router_e2e::wait::{GENEROUS, count, eventually};
use serde_json::json;

const CLIENTS: usize = 8;

/// A crew of two of each role at work, and a gateway that serves.
async fn at_work(proxy: Proxy) -> (Crew, Gateway) {
    let mut crew = Crew::hire(2, 2, FAST).await;
    crew.bring(Role::Prefill).await;
    crew.bring(Role::Decode).await;
    let gateway = crew.gateway(proxy, json!({})).await;
    gateway.answers().await;
    (crew, gateway)
}

/// One restart of all of `role`, in one of three ways.
async fn restart(crew: &mut Crew, gateway: &Gateway, role: Role, round: usize) {
    match round % 3 {
        // In good order: off the roster, idle, gone, back.
        0 => {
            crew.dismiss(role);
            gateway.is_not_ready().await;
            crew.is_idle(role).await;
            crew.kill(role).await;
            crew.bring(role).await;
        }
        // Dead first; the roster follows.
        1 => {
            crew.kill(role).await;
            crew.dismiss(role);
            gateway.is_not_ready().await;
            crew.bring(role).await;
        }
        // Dead, and another at the same address in the next edition of the roster.
        _ => {
            crew.kill(role).await;
            crew.bring(role).await;
        }
    }
}

/// Fails where a decode engine was sent what it should not.
pub async fn judge(crew: &Crew, tally: &Tally) {
    let prefill = crew.total(Role::Prefill).await;
    let decode = crew.total(Role::Decode).await;
    let seen = format!("{tally:?}\nprefill: {prefill:?}\ndecode: {decode:?}");
    assert!(tally.answered > 0, "{seen}");
    assert_eq!(decode.refused(), 0, "{seen}");
    assert!(decode.prompt_tokens_computed <= decode.requests, "{seen}");
    assert_eq!(tally.unknown, 0, "the model was never gone: {seen}");
}

/// Fails where a request had two prefills although its decode worker did not fail, or an answer none. `before` is what
/// prefill did before the traffic.
pub async fn judge_prefills(crew: &Crew, gateway: &Gateway, tally: &Tally, before: &State) {
    let prefill = crew.total(Role::Prefill).await;
    let recoveries = gateway.metrics().await.sum("pd_router_recoveries_total");
    let recoveries = recoveries.unwrap_or_default() as u64;
    let seen = format!("{tally:?}\nprefill: {prefill:?}\nrecoveries: {recoveries}");
    let consumed = prefill.handoffs_consumed - before.handoffs_consumed;
    // One for each answer. Those of requests that were not answered were used too, or not.
    assert!(consumed >= tally.answered, "{seen}");
    let requests = prefill.requests - before.requests;
    assert!(requests <= tally.asked + recoveries, "{seen}");
    assert_eq!(tally.lost, 0, "prefill was always there: {seen}");
}

pub async fn all_decode_workers_are_restarted_again_and_again(proxy: Proxy) {
    let (mut crew, mut gateway) = at_work(proxy).await;
    let processes = gateway.processes();
    // Those of the waiting above are no traffic.
    let before = crew.total(Role::Prefill).await;
    let traffic = Traffic::start(gateway.listen, CLIENTS);
    traffic.until_answered_by(&crew.names(Role::Decode)).await;
    for round in 0..count(3, 10) {
        restart(&mut crew, &gateway, Role::Decode, round).await;
        traffic.until_answered_by(&crew.names(Role::Decode)).await;
    }
    let tally = traffic.stop().await;
    judge(&crew, &tally).await;
    judge_prefills(&crew, &gateway, &tally, &before).await;
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(&processes);
}

pub async fn all_prefill_workers_are_restarted_again_and_again(proxy: Proxy) {
    let (mut crew, mut gateway) = at_work(proxy).await;
    let processes = gateway.processes();
    let traffic = Traffic::start(gateway.listen, CLIENTS);
    for round in 0..count(3, 10) {
        restart(&mut crew, &gateway, Role::Prefill, round).await;
        traffic.until_answered_by(&crew.names(Role::Decode)).await;
        until_all_prefill(&crew).await;
    }
    let tally = traffic.stop().await;
    judge(&crew, &tally).await;
    // None of the decode engines was ever away.
    let decode = crew.total(Role::Decode).await;
    assert!(decode.answered >= tally.answered, "{tally:?}; {decode:?}");
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(&processes);
}

/// Waits until every prefill engine that is there has handed something over.
async fn until_all_prefill(crew: &Crew) {
    eventually("all new prefill engines are used", GENEROUS, || async {
        for post in &crew.prefill {
            let state = post.engine().state().await;
            if state.handoffs_consumed == 0 {
                return Err(format!("{}: {state:?}", post.name()));
            }
        }
        Ok(())
    })
    .await;
}
