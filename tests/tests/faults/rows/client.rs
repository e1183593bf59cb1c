//! The client leaves.

use pd_router_e2e::Proxy;
use pd_router_e2e::engines::Role;
use pd_router_e2e::protocols::Protocol;
use serde_json::{Value, json};

use crate::row::{BOTH, Row, STREAMED, body};

/// A client of each mode leaves once an engine of this role has its request, and all work ends.
async fn leaves(proxy: Proxy, protocol: Protocol, (role, fault): (Role, &Value)) {
    for mode in BOTH {
        let row = Row::with_all(proxy, protocol, role, fault).await;
        let client = row.client(&body(*mode, "a question", 4)).await;
        row.until_requested(role).await;
        drop(client);
        row.fixture.comes_to_rest().await;
        assert_eq!(
            row.tried_again().await,
            [0.0; 3],
            "no retry without a client"
        );
        row.ejects_no_worker().await;
        row.ends_with_resets().await;
    }
}

pub async fn client_leaves_during_prefill(proxy: Proxy, protocol: Protocol) {
    let slow = json!({"kind": "delay", "ms": 1000});
    leaves(proxy, protocol, (Role::Prefill, &slow)).await;
}

pub async fn client_leaves_before_headers(proxy: Proxy, protocol: Protocol) {
    let slow = json!({"kind": "delay", "ms": 1000});
    leaves(proxy, protocol, (Role::Decode, &slow)).await;
}

pub async fn client_leaves_before_the_first_token(proxy: Proxy, protocol: Protocol) {
    let silent = json!({"kind": "silent"});
    leaves(proxy, protocol, (Role::Decode, &silent)).await;
}

pub async fn client_leaves_a_stream(proxy: Proxy, protocol: Protocol) {
    let slow = json!({"kind": "slow_drip", "ms": 50});
    let row = Row::with_all(proxy, protocol, Role::Decode, &slow).await;
    for mode in STREAMED {
        let mut client = row.client(&body(*mode, "a long story", 2000)).await;
        client.read_until("data:", 3).await;
    }
    row.fixture.comes_to_rest().await;
    assert_eq!(row.tried_again().await, [0.0; 3]);
    row.ejects_no_worker().await;
    row.ends().await;
}
