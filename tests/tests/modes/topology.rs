//! Pairs that may exchange KV: required or preferred racks, and sets that exceed the limit.

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Pair, crowd};
use pd_router_e2e::engines::Role;
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::Rig;

fn in_rack(rack: &str, enforcement: &str) -> Value {
    json!({"topology": {
        "domains": {"rack": rack},
        "kv_transfer_domain": "rack",
        "kv_transfer_enforcement": enforcement,
        "kv_transfer_preferred_weight": 1.0,
    }})
}

/// Two workers of each role in these racks: two of prefill, then two of decode.
async fn in_racks(proxy: Proxy, racks: [&str; 4], enforcement: &str) -> Rig {
    let placed = racks.map(|rack| in_rack(rack, enforcement));
    Rig::on(FixtureSpec::nixl(proxy, (2, 2)).lines(placed)).await
}

pub async fn required_domains_make_pairs_within_racks(proxy: Proxy) {
    let rig = in_racks(proxy, ["r0", "r1", "r0", "r1"], "required").await;
    let replies = crowd(rig.fixture.gateway.listen, 4, 8, &Ask::chat("hello")).await;
    let pairs: BTreeSet<Pair> = replies
        .into_iter()
        .map(|reply| reply.expect(200).pair())
        .collect();
    let within = BTreeSet::from([rig.pair(0, 0), rig.pair(1, 1)]);
    assert_eq!(pairs, within);
    rig.fixture.assert_good_hand_offs().await;
    rig.ends().await;
}

pub async fn required_domains_fail_closed(proxy: Proxy) {
    let rig = in_racks(proxy, ["r0", "r0", "r1", "r1"], "required").await;
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        rig.send(ask).await.expect_code(503, "topology");
    }
    rig.assert_no_engine_requests().await;
    rig.ends().await;
}

pub async fn preferred_domains_never_fail(proxy: Proxy) {
    let rig = in_racks(proxy, ["r0", "r0", "r1", "r1"], "preferred").await;
    for reply in crowd(rig.fixture.gateway.listen, 2, 4, &Ask::chat("hello")).await {
        reply.expect(200);
    }
    rig.fixture.assert_good_hand_offs().await;
    rig.ends().await;
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
        let mut fixture = Fixture::acquire(FixtureSpec::nixl(proxy, (2, 2))).await;
        let set = |at| json!({"set": format!("set-{at}")});
        fixture.engines.describe(role, set);
        fixture.engines.list(role);
        fixture.gateway.is_not_ready().await;
        until_ambiguous(&fixture.gateway).await;
        let ready = fixture.send(Ask::get("/pd-router/ready")).await;
        ready.expect(503);
        assert_eq!(fixture.total(Role::Decode).await.requests, 0);

        fixture.engines.unlist_one(role, 0);
        fixture.gateway.answers().await;
        fixture.engines.list_one(role, 0);
        until_ambiguous(&fixture.gateway).await;
        fixture.engines.unlist_one(role, 1);
        fixture.gateway.answers().await;
        assert_eq!(fixture.total(Role::Decode).await.refused(), 0);
        fixture.gateway.assert_comes_to_rest().await;
        fixture.release();
    }
}
