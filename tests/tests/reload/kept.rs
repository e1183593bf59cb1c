//! What is known of the workers outlives the configuration.

use pd_router_e2e::conversation::Conversation;
use pd_router_e2e::engines::FAST;
use serde_json::{Value, json};

use crate::rig::Rig;

const CONVERSATIONS: usize = 6;

pub async fn conversations_stick_across_a_new_configuration() {
    let rig = Rig::start(2, FAST, json!({})).await;
    let mut conversations = Vec::new();
    for number in 0..CONVERSATIONS {
        let mut conversation = Conversation::alone(&format!("matter number {number}"));
        let first = conversation.turn_at(rig.gateway).await.pair().prefill;
        conversations.push((conversation, first));
    }
    rig.reconfigure(rig.configuration(json!({}))).await;
    let pool = rig.pool().await;
    let workers = pool["workers"].as_array().cloned().unwrap_or_default();
    let held = |worker: &Value| worker["prefix_blocks"].as_u64().unwrap_or_default();
    // Each began with some thirty blocks that no other has.
    let blocks: u64 = workers.iter().map(held).sum();
    assert!(blocks > 25 * CONVERSATIONS as u64, "{pool}");
    for turn in 1..4 {
        for (conversation, first) in &mut conversations {
            let pair = conversation.turn_at(rig.gateway).await.pair();
            assert_eq!(&pair.prefill, first, "turn {turn}");
        }
    }
    rig.comes_to_rest().await;
}
