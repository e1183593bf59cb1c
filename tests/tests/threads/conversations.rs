//! Decisions of one thread reach all threads: a conversation stays on the worker that holds its prefix.

use std::collections::BTreeSet;
use std::time::Duration;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::conversation::{Conversation, Spelling};
use pd_router_e2e::engines::FAST;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::rig::Rig;

const TURNS: usize = 10;
const PREFILLS: usize = 4;

/// Pause of a reader between two turns: several ticks of the thread sync.
const THINKING: Duration = Duration::from_millis(250);

/// The prefill workers that each conversation met. The first turn names a different worker for each, so that none is where a
/// thread without knowledge would route all. Every turn has a new connection, to a thread in turn or at random.
async fn converse(proxy: Proxy, sharing: Value) -> Vec<BTreeSet<String>> {
    let rig = Rig::open(proxy, (PREFILLS, 2), FAST, sharing).await;
    let gateway = rig.gateway.listen;
    let mut conversations: Vec<Conversation> = (0..PREFILLS)
        .map(|at| Conversation::about(&format!("part {at}"), Spelling::Text))
        .collect();
    let mut seen = vec![BTreeSet::new(); PREFILLS];
    for turn in 0..TURNS {
        for (at, conversation) in conversations.iter_mut().enumerate() {
            let reply = match turn {
                0 => {
                    let id = (11 + at).to_string();
                    let pin = [("x-prefill-instance-id", id.as_str())];
                    conversation.turn_with(gateway, &pin).await
                }
                _ => conversation.turn_at(gateway).await,
            };
            seen[at].insert(reply.pair().prefill);
        }
        // An extra connection, so that connections dealt in turn do not give a conversation the same thread each time.
        rig.gateway.send(Ask::get("/pd-router/ready")).await;
        sleep(THINKING).await;
    }
    rig.fleet.assert_no_decode_refused().await;
    rig.gateway.assert_comes_to_rest().await;
    seen
}

pub async fn conversations_stick_on_whatever_thread_they_go_on(proxy: Proxy) {
    for (at, seen) in converse(proxy, json!({"decisions": true}))
        .await
        .iter()
        .enumerate()
    {
        assert_eq!(seen, &BTreeSet::from([format!("p{at}")]));
    }
}

pub async fn without_sharing_conversations_move(proxy: Proxy) {
    // A thread without knowledge picks one worker for the same prefix, or draws one. The chance that this is right for four
    // conversations on four workers in nine turns each is negligible.
    let seen = converse(proxy, json!({"decisions": false})).await;
    let moved = seen.iter().filter(|seen| seen.len() > 1).count();
    assert!(moved > 0, "{seen:?}");
}
