//! Helpers of this suite: conversations, workers with names, and the wait for queued requests.

use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};

pub use pd_router_e2e::conversation::{CHAT, Conversation, Spelling};
pub use pd_router_e2e::engines::named;
pub use pd_router_e2e::gateway::worker;

/// Waits until this many requests are queued.
pub async fn until_waiting(gateway: &Gateway, count: u64) {
    eventually(&format!("{count} wait"), GENEROUS, || async {
        let status = gateway.status().await;
        if status["waiting"] == count {
            return Ok(());
        }
        Err(status.to_string())
    })
    .await;
}
