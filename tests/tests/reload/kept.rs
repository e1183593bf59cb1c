//! Knowledge about the workers outlives the configuration.

use std::time::Duration;

use pd_router_e2e::conversation::Conversation;
use pd_router_e2e::engines::FAST;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::rig::Rig;

const CONVERSATIONS: usize = 6;

/// Pause of a reader between two turns: several ticks of the thread sync.
const THINKING: Duration = Duration::from_millis(200);

pub async fn conversations_stick_across_a_new_configuration() {
    let pool = json!({"trust_clients": true});
    let rig = Rig::start(2, FAST, pool.clone()).await;
    let mut conversations = Vec::new();
    for number in 0..CONVERSATIONS {
        let mut conversation = Conversation::alone(&format!("matter number {number}"));
        let first = conversation.turn_at(rig.gateway).await.pair().prefill;
        conversations.push((conversation, first));
    }
    // Each conversation begins with some thirty blocks of its own, and all threads learn of all.
    let blocks = until_all_hold(&rig, 25 * CONVERSATIONS as u64).await;
    rig.reconfigure(rig.configuration(pool)).await;
    until_all_hold(&rig, blocks).await;
    for turn in 1..4 {
        for (conversation, first) in &mut conversations {
            sleep(THINKING).await;
            let why = [("x-pd-router-explain", "1")];
            let reply = conversation.turn_with(rig.gateway, &why).await;
            let explanation = reply.header("x-pd-router-explain");
            assert_eq!(&reply.pair().prefill, first, "turn {turn}: {explanation:?}");
        }
    }
    rig.comes_to_rest().await;
}

/// Waits until each thread estimates that the workers hold at least this many blocks; returns the last estimate.
async fn until_all_hold(rig: &Rig, least: u64) -> u64 {
    let what = format!("{least} blocks are known to all threads");
    eventually(&what, GENEROUS, || async {
        let mut blocks = 0;
        for _ in 0..rig.enough_connections() {
            let pool = rig.pool().await;
            let workers = pool["workers"].as_array().cloned().unwrap_or_default();
            let held = |worker: &Value| worker["prefix_blocks"].as_u64().unwrap_or_default();
            blocks = workers.iter().map(held).sum();
            if blocks < least {
                return Err(pool.to_string());
            }
        }
        Ok(blocks)
    })
    .await
}
