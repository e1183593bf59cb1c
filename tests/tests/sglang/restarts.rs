//! SGLang workers that come back with a new identity and another bootstrap port, while clients send requests.

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::Role;
use pd_router_e2e::traffic::Traffic;
use pd_router_e2e::wait::count;

use crate::rig::{Ports, QUICK, pool};

const CLIENTS: usize = 8;

/// Restarts all of `role` in good order, repeatedly: SGLang's legs do not survive the death of a worker.
async fn restarted(proxy: Proxy, role: Role) {
    let mut engines = EngineSet::with_slots(2, 2, QUICK).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let mut gateway = engines.gateway(proxy, pool(Ports::Fetched)).await;
    gateway.answers().await;
    let processes = gateway.processes();
    let traffic = Traffic::start(gateway.listen, CLIENTS);
    let mut ports = BTreeSet::new();
    for _ in 0..count(2, 10) {
        engines.unlist(role);
        gateway.is_not_ready().await;
        engines.is_idle(Role::Prefill).await;
        engines.is_idle(Role::Decode).await;
        engines.kill(role).await;
        engines.start_and_list(role).await;
        traffic
            .until_answered_by(&engines.names(Role::Decode))
            .await;
        let bootstraps = engines.prefill.iter().map(|slot| slot.engine().bootstrap);
        ports.extend(bootstraps.flatten());
    }
    assert!(ports.len() >= 2, "{ports:?}");
    let tally = traffic.stop().await;
    let bad = (tally.torn, tally.lost, tally.unknown);
    assert_eq!(bad, (0, 0, 0), "{tally:?}");
    for role in [Role::Prefill, Role::Decode] {
        let state = engines.total(role).await;
        assert_eq!(state.refused(), 0, "{}: {state:?}", role.as_str());
    }
    let decode = engines.total(Role::Decode).await;
    assert!(
        decode.prompt_tokens_computed <= decode.requests,
        "{decode:?}"
    );
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(&processes);
}

pub async fn prefill_workers_that_restart_are_asked_again(proxy: Proxy) {
    restarted(proxy, Role::Prefill).await;
}

pub async fn decode_workers_that_restart_are_used_again(proxy: Proxy) {
    restarted(proxy, Role::Decode).await;
}
