//! Pools with different workers, models and protocols.

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{Engine, FAST, Fleet, MODEL, Role, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::{
    ONE, OTHER_MODEL, ROUTES, Rig, TO_ONE, TO_TWO, TWO, chat, configuration, fitting, pool, pool_of,
};

const REQUESTS: usize = 16;

async fn models(gateway: &Gateway, authority: &str) -> Vec<Value> {
    let page = gateway.send(Ask::get("/v1/models").to(authority)).await;
    let page = page.expect(200).json();
    let models = page["data"].as_array().cloned().unwrap_or_default();
    models.iter().map(|model| model["id"].clone()).collect()
}

/// Concurrent requests over their own connections, which meet all threads.
async fn many(gateway: &Gateway, ask: &Ask) -> Vec<Reply> {
    join_all((0..REQUESTS).map(|_| gateway.send(ask.clone()))).await
}

pub async fn each_pool_serves_its_own_models_by_its_own_protocol(proxy: Proxy) {
    let rig = Rig::start(proxy).await;
    let gateway = &rig.gateway;
    assert_eq!(models(gateway, TO_ONE).await, [json!(MODEL)]);
    assert_eq!(models(gateway, TO_TWO).await, [json!(OTHER_MODEL)]);
    // A request that names no pool gets the first.
    assert_eq!(models(gateway, "elsewhere.test").await, [json!(MODEL)]);

    let page = gateway.whole_status().await;
    let (one, two) = (pool_of(&page, ONE), pool_of(&page, TWO));
    assert_eq!(one["workers"].as_array().map(Vec::len), Some(4), "{page}");
    assert_eq!(two["workers"].as_array().map(Vec::len), Some(3), "{page}");
    assert_eq!(two["protocol"], "sglang", "{page}");

    for authority in [TO_ONE, TO_TWO] {
        for reply in many(gateway, &fitting(authority)).await {
            reply.expect_tokens(4);
        }
    }
    let counts = |fleet: &Fleet| {
        let addresses: Vec<_> = fleet.engines().map(|engine| engine.address).collect();
        async move {
            let states = addresses.into_iter().map(pd_router_e2e::engines::state_of);
            let states = join_all(states).await;
            states.iter().map(|state| state.requests).sum::<u64>()
        }
    };
    let served = (counts(&rig.one).await, counts(&rig.two).await);
    assert_eq!(served, (2 * REQUESTS as u64, 2 * REQUESTS as u64));

    // Among several pools, a route that names none leads to none.
    for ask in [
        chat("none.test", MODEL),
        Ask::get("/v1/models").to("none.test"),
    ] {
        gateway.send(ask).await.expect_code(404, "no_pool");
    }

    // A model of one pool is unknown in the other, and no engine gets a request for it.
    for (authority, model) in [(TO_ONE, OTHER_MODEL), (TO_TWO, MODEL)] {
        for reply in many(gateway, &chat(authority, model)).await {
            let message = reply.expect_error(404);
            assert_eq!(reply.json()["error"]["type"], "NotFoundError");
            assert!(message.contains(model), "{message}");
        }
    }
    assert_eq!(served, (counts(&rig.one).await, counts(&rig.two).await));
    rig.one.assert_no_decode_refused().await;
    rig.two.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;
}

pub async fn a_dead_pool_does_not_touch_the_other(proxy: Proxy) {
    let mut rig = Rig::start(proxy).await;
    let fleet = &mut rig.one;
    for engine in fleet.prefill.iter_mut().chain(&mut fleet.decode) {
        engine.kill();
    }
    let (dead, alive) = (fitting(TO_ONE), fitting(TO_TWO));
    let (dead, alive) = tokio::join!(many(&rig.gateway, &dead), many(&rig.gateway, &alive));
    for reply in dead {
        assert_eq!(reply.status, 503, "{reply:?}");
    }
    for reply in alive {
        reply.expect_tokens(4);
    }
    // Again, after failures of the first pool's workers.
    for reply in many(&rig.gateway, &fitting(TO_TWO)).await {
        reply.expect_tokens(4);
    }
    rig.gateway.is_ready().await;
    rig.two.assert_no_decode_refused().await;
    rig.gateway.assert_comes_to_rest().await;
}

/// Two pools: one discovered through a document, one listed in the configuration.
pub async fn workers_of_one_pool_come_and_go_and_the_other_never_notices(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(1, 1, FAST).await;
    let steady = Fleet::start(1, 1, FAST).await;
    let first = with(
        pool(ONE, "nixl", Vec::new()),
        json!({"discovery": {"document": engines.document.source()}}),
    );
    let second = pool(TWO, "nixl", steady.engines().map(Engine::listed).collect());
    let members = engines.members().into_iter();
    let members: Vec<String> = members.map(|member| format!("{ONE}-{member}")).collect();
    let members = members.iter().flat_map(|member| ["--member", member]);
    let arguments: Vec<&str> = ROUTES.into_iter().chain(members).collect();
    let config = configuration(vec![first, second]);
    let gateway = Gateway::start(proxy, &config, &arguments).await;
    // The first pool has no worker yet; the gateway is ready all the same.
    gateway.is_ready().await;
    let version = pool_of(&gateway.whole_status().await, TWO)["fleet_version"].clone();

    for _ in 0..2 {
        engines.start_and_list(Role::Prefill).await;
        engines.start_and_list(Role::Decode).await;
        until_status(&gateway, 200).await;
        engines.remove(Role::Prefill).await;
        engines.remove(Role::Decode).await;
        until_status(&gateway, 503).await;
        for reply in many(&gateway, &chat(TO_TWO, MODEL)).await {
            reply.expect_tokens(4);
        }
        gateway.is_ready().await;
    }
    let page = gateway.whole_status().await;
    assert_eq!(pool_of(&page, TWO)["fleet_version"], version, "{page}");
    gateway.assert_comes_to_rest().await;
}

/// Waits until the first pool answers with this status.
async fn until_status(gateway: &Gateway, status: u16) {
    eventually("the first pool's answer", GENEROUS, || async {
        for reply in many(gateway, &chat(TO_ONE, MODEL)).await {
            if reply.status != status {
                return Err(format!("{}: {}", reply.status, reply.text()));
            }
        }
        Ok(())
    })
    .await;
}
