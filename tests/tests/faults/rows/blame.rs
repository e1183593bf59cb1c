//! Blame: only the faulty worker is ejected, even if the other role's workers are affected.

use std::time::Duration;

use pd_router_e2e::Proxy;
use pd_router_e2e::engines::Role;
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::wait::{GENEROUS, eventually};
use tokio::time::sleep;

use crate::row::{AnswerMode, Row, TOKENS, status};

/// Pause between two requests: a worker that has failed is avoided for a second.
const PAUSE: Duration = Duration::from_millis(200);

/// One worker of this role fails until it is ejected: no other worker is, and all clients are answered.
async fn alone_is_blamed(proxy: Proxy, protocol: Protocol, role: Role) {
    let row = Row::begin(proxy, protocol).await;
    row.fixture.inject_one(role, &status(500)).await;
    eventually("it is ejected", GENEROUS, || async {
        for mode in [AnswerMode::Unstreamed, AnswerMode::Streamed] {
            row.send(mode).await.expect_tokens(TOKENS);
            sleep(PAUSE).await;
        }
        let ejected = row.ejections().await;
        match ejected.iter().sum::<f64>() {
            0.0 => Err(format!("{ejected:?}")),
            _ => Ok(()),
        }
    })
    .await;
    row.ejects_only(role).await;
    row.ends().await;
}

pub async fn prefill_alone_is_blamed(proxy: Proxy, protocol: Protocol) {
    alone_is_blamed(proxy, protocol, Role::Prefill).await;
}

pub async fn decode_alone_is_blamed(proxy: Proxy, protocol: Protocol) {
    alone_is_blamed(proxy, protocol, Role::Decode).await;
}
