//! What the tests of this suite share: conversations, workers with names, and waiting for those that wait.

use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};

pub use pd_router_e2e::conversation::{CHAT, Conversation, Spelling};
pub use pd_router_e2e::engines::named;
pub use pd_router_e2e::gateway::worker;

/// Waits until so many requests wait.
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
