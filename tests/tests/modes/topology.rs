//! Pairs that may exchange KV: required or preferred racks, and sets that exceed the limit.

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Pair, crowd};
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{FAST, Fleet, Role, static_config, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::{pair, workers};

fn in_rack(rack: &str, enforcement: &str) -> Value {
    json!({"topology": {
        "domains": {"rack": rack},
        "kv_transfer_domain": "rack",
        "kv_transfer_enforcement": enforcement,
        "kv_transfer_preferred_weight": 1.0,
    }})
}

/// A gateway over two workers of each role in these racks: two of prefill, then two of decode.
async fn in_racks(proxy: Proxy, racks: [&str; 4], enforcement: &str) -> (Fleet, Gateway) {
    let fleet = Fleet::start(2, 2, FAST).await;
    let workers = workers(&fleet);
    let placed = workers.into_iter().zip(racks);
    let placed = placed.map(|(worker, rack)| with(worker, in_rack(rack, enforcement)));
    let config = static_config(placed.collect(), json!({}));
    let gateway = Gateway::start(proxy, &config, &[]).await;
    (fleet, gateway)
}

pub async fn required_domains_make_pairs_within_racks(proxy: Proxy) {
    let (fleet, gateway) = in_racks(proxy, ["r0", "r1", "r0", "r1"], "required").await;
    let replies = crowd(gateway.listen, 4, 8, &Ask::chat("hello")).await;
    let pairs: BTreeSet<Pair> = replies
        .into_iter()
        .map(|reply| reply.expect(200).pair())
        .collect();
    let within = BTreeSet::from([pair("p0", "d0"), pair("p1", "d1")]);
    assert_eq!(pairs, within);
    fleet.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;
}

pub async fn required_domains_fail_closed(proxy: Proxy) {
    let (fleet, gateway) = in_racks(proxy, ["r0", "r0", "r1", "r1"], "required").await;
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        gateway.send(ask).await.expect_code(503, "topology");
    }
    for engine in fleet.engines() {
        assert_eq!(engine.state().await.requests, 0);
    }
    gateway.assert_comes_to_rest().await;
}

pub async fn preferred_domains_never_fail(proxy: Proxy) {
    let (fleet, gateway) = in_racks(proxy, ["r0", "r0", "r1", "r1"], "preferred").await;
    for reply in crowd(gateway.listen, 2, 4, &Ask::chat("hello")).await {
        reply.expect(200);
    }
    fleet.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;
}

async fn until_ambiguous(gateway: &Gateway) {
    eventually("the sets are ambiguous", GENEROUS, || async {
        for _ in 0..8 {
            let reply = gateway.try_send(Ask::chat("hello")).await;
            let reply = reply.map_err(|failure| failure.to_string())?;
            if reply.status != 503 || reply.json()["error"]["code"] != "ambiguous_sets" {
                return Err(format!("{}: {}", reply.status, reply.text()));
            }
            if reply.header("retry-after").is_none() {
                return Err(format!("it does not say when: {reply:?}"));
            }
        }
        Ok(())
    })
    .await;
}

pub async fn two_sets_of_one_role_are_ambiguous_until_one_is_gone(proxy: Proxy) {
    for role in [Role::Prefill, Role::Decode] {
        let mut engines = EngineSet::with_slots(2, 2, FAST).await;
        engines.describe(role, |at| json!({"set": format!("set-{at}")}));
        engines.start_and_list(Role::Prefill).await;
        engines.start_and_list(Role::Decode).await;
        let gateway = engines.gateway(proxy, json!({})).await;
        until_ambiguous(&gateway).await;
        gateway.send(Ask::get("/pd-router/ready")).await.expect(503);
        assert_eq!(engines.total(Role::Decode).await.requests, 0);

        engines.unlist_one(role, 0);
        gateway.answers().await;
        engines.list_one(role, 0);
        until_ambiguous(&gateway).await;
        engines.unlist_one(role, 1);
        gateway.answers().await;
        assert_eq!(engines.total(Role::Decode).await.refused(), 0);
        gateway.assert_comes_to_rest().await;
    }
}
