//! Conversations stay on a worker that holds their prefix, as long as there is one.

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{FAST, Fleet, Role, static_config};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

use crate::rig::{Conversation, Spelling, named, worker};

const TURNS: usize = 10;

pub async fn conversations_stick_to_their_prefill_workers(proxy: Proxy) {
    let fleet = Fleet::start(3, 2, FAST).await;
    let workers = [
        named(&fleet.prefill, "p", 11),
        named(&fleet.decode, "d", 21),
    ];
    let config = static_config(workers.concat(), json!({"trust_clients": true}));
    let gateway = Gateway::start_on_one_thread(proxy, &config, &[]).await;
    let mut conversations = [
        Conversation::about("the sea", Spelling::Text),
        Conversation::about("the wind", Spelling::Alternating),
    ];
    let mut seen = [BTreeSet::new(), BTreeSet::new()];
    for _ in 0..TURNS {
        for (conversation, seen) in conversations.iter_mut().zip(&mut seen) {
            seen.insert(conversation.turn(&gateway).await.pair().prefill);
        }
    }
    for seen in &seen {
        assert_eq!(seen.len(), 1, "a conversation moved: {seen:?}");
    }

    // A caller may pin the first turn: the gateway remembers that decision as well.
    for (name, id) in [("p0", "11"), ("p1", "12"), ("p2", "13")] {
        let mut conversation = Conversation::about(name, Spelling::Alternating);
        let first = conversation.ask().header("x-prefill-instance-id", id);
        let reply = gateway.send(first).await.expect(200);
        conversation.append_reply(&reply);
        assert_eq!(reply.pair().prefill, name);
        for _ in 0..2 {
            assert_eq!(conversation.turn(&gateway).await.pair().prefill, name);
        }
    }
    fleet.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;
}

pub async fn a_worker_that_dies_or_leaves_loses_its_prefixes(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(3, 1, FAST).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let gateway = engines.gateway_on_one_thread(proxy, json!({})).await;
    gateway.is_ready().await;
    let mut conversation = Conversation::about("the moon", Spelling::Text);
    let first = stays(&mut conversation, &gateway).await;
    let status = gateway.status().await;
    let held = worker(&status, &first)["prefix_blocks"].as_u64();
    assert!(held.is_some_and(|blocks| blocks > 30), "{status}");

    // A killed engine that is still listed.
    let at = place(&engines, &first);
    engines.prefill[at].kill().await;
    let second = stays(&mut conversation, &gateway).await;
    assert_ne!(first, second);
    let status = gateway.status().await;
    assert_eq!(worker(&status, &first)["prefix_blocks"], 0, "{status}");
    let retries = async || {
        let metrics = gateway.metrics().await;
        metrics.expect("pd_router_prefill_retries_total")
    };
    assert_eq!(retries().await, 1.0, "it was tried once, when it died");

    // The second worker leaves, and comes back with the same identity.
    let at = place(&engines, &second);
    engines.unlist_one(Role::Prefill, at);
    until_listed(&gateway, &second, false).await;
    let before = engines.prefill[at].state().await.requests;
    let third = stays(&mut conversation, &gateway).await;
    assert!(![first, second.clone()].contains(&third), "{third}");
    engines.list_one(Role::Prefill, at);
    until_listed(&gateway, &second, true).await;
    let status = gateway.status().await;
    assert_eq!(worker(&status, &second)["prefix_blocks"], 0, "{status}");
    assert_eq!(stays(&mut conversation, &gateway).await, third);
    assert_eq!(engines.prefill[at].state().await.requests, before);
    gateway.assert_comes_to_rest().await;
}

/// Three turns, which must meet one prefill worker; returns that worker.
async fn stays(conversation: &mut Conversation, gateway: &Gateway) -> String {
    let first = conversation.turn(gateway).await.pair().prefill;
    for _ in 0..2 {
        assert_eq!(conversation.turn(gateway).await.pair().prefill, first);
    }
    first
}

fn place(engines: &EngineSet, name: &str) -> usize {
    let names = engines.names(Role::Prefill);
    let at = names.iter().position(|one| one == name);
    at.unwrap_or_else(|| panic!("{name} is none of {names:?}"))
}

/// Waits until the gateway lists this worker, or no longer does.
async fn until_listed(gateway: &Gateway, name: &str, listed: bool) {
    eventually("the gateway knows", GENEROUS, || async {
        let status = gateway.status().await;
        if worker(&status, name).is_null() != listed {
            return Ok(());
        }
        Err(status.to_string())
    })
    .await;
}
