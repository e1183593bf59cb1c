//! Workers that the proxy's clusters do not list: requests name their address, within the allowed networks.

use pd_router_e2e::Proxy;
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{FAST, MODEL, Role};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::traffic::Traffic;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

use crate::rig::{until_all_say, until_listed};

const ARGUMENTS: [&str; 4] = [
    "--cluster",
    "prefill=original_dst",
    "--cluster",
    "decode=original_dst",
];

pub async fn workers_that_no_cluster_lists_are_reached_within_the_networks(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(2, 2, FAST).await;
    let outside = json!({"address": "10.9.9.9:8000", "role": "decode", "model": MODEL, "id": 3});
    engines.others.push(outside);
    engines.start_and_list(Role::Prefill).await;
    engines.start(Role::Decode).await;
    engines.list_one(Role::Decode, 0);
    let pool = json!({"destinations": {"original_dst": {"networks": ["127.0.0.0/8", "fd00::/8"]}}});
    let config = engines.document.config(pool);
    let mut gateway = Gateway::start(proxy, &config, &ARGUMENTS).await;
    gateway.is_ready().await;
    // Only the worker outside the networks is left out, by name.
    until_all_say(&gateway, "who is allowed is listed", |pool| {
        let workers = pool["workers"].to_string();
        assert!(!workers.contains("10.9.9.9"), "{workers}");
        workers.contains(&engines.decode[0].name())
    })
    .await;
    eventually("who is not is named", GENEROUS, || {
        let log = gateway.process().log();
        async move {
            match log.contains("10.9.9.9") {
                true => Ok(()),
                false => Err(log),
            }
        }
    })
    .await;

    let traffic = Traffic::start(gateway.listen, 4);
    let names = engines.names(Role::Decode);
    traffic.until_answered_by(&names[..1]).await;
    engines.list_one(Role::Decode, 1);
    traffic.until_answered_by(&names).await;
    engines.unlist_one(Role::Decode, 0);
    until_listed(&gateway, &names[0], false).await;
    let before = engines.decode[0].state().await.requests;
    traffic.until_answered_by(&names[1..]).await;
    let seen = traffic.stop().await;
    assert_eq!(engines.decode[0].state().await.requests, before);
    let spoilt = seen.put_off_total() + seen.torn + seen.lost + seen.unknown;
    assert_eq!(spoilt, 0, "{seen:?}");
    gateway.assert_comes_to_rest().await;
}
