//! Invalid configurations of several pools: refused as a whole, with the path of the error.

use pd_router_e2e::Proxy;
use pd_router_e2e::engines::with;
use pd_router_e2e::gateway::Gateway;
use serde_json::{Value, json};

use crate::rig::{ONE, TWO, configuration, pool};

/// The log of a gateway that refuses these two pools.
async fn refusal(proxy: Proxy, first: Value, second: Value) -> String {
    let config = configuration(vec![first, second]);
    match Gateway::try_start(proxy, &config, &[]).await {
        Ok(_) => panic!("the gateway starts with {config}"),
        Err(failure) => failure.log,
    }
}

/// A valid pool; its workers are never called.
fn sound(name: &str) -> Value {
    let worker = |port: u16, role| json!({"address": format!("127.0.0.1:{port}"), "role": role});
    pool(
        name,
        "nixl",
        vec![worker(1, "prefill"), worker(2, "decode")],
    )
}

pub async fn two_pools_of_one_name_are_refused(proxy: Proxy) {
    let reason = refusal(proxy, sound(ONE), sound(ONE)).await;
    assert!(reason.contains("pools[1].name"), "{reason}");
}

pub async fn a_wrong_second_pool_is_refused_by_its_place(proxy: Proxy) {
    let wrong = with(sound(TWO), json!({"prefill": {"attempts": "many"}}));
    let reason = refusal(proxy, sound(ONE), wrong).await;
    assert!(reason.contains("pools[1].prefill.attempts"), "{reason}");
}
