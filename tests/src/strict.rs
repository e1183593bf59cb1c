//! Strict engines: what they are told to do wrong, and what they count of hand-offs.

use std::net::SocketAddr;

use serde::Deserialize;
use serde_json::Value;

use crate::client::{self, Ask};

/// Hand-offs as an engine counts them, whatever its dialect; `recomputed` in prompt tokens.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct Kv {
    /// Hand-offs issued.
    pub issued: u64,
    /// Those that were pulled.
    pub pulled: u64,
    /// Those whose lease ran out first.
    pub expired: u64,
    /// Those neither pulled nor still under lease.
    pub leaked: u64,
    /// Requests refused for their hand-off.
    pub refused: u64,
    /// Prompt tokens that a decode engine computed beyond those its protocol demands.
    pub recomputed: u64,
}

impl Kv {
    /// The two added up.
    pub fn plus(&self, other: &Kv) -> Kv {
        Kv {
            issued: self.issued + other.issued,
            pulled: self.pulled + other.pulled,
            expired: self.expired + other.expired,
            leaked: self.leaked + other.leaked,
            refused: self.refused + other.refused,
            recomputed: self.recomputed + other.recomputed,
        }
    }
}

/// What the engine at this address counts.
pub async fn kv_of(engine: SocketAddr) -> Kv {
    let reply = client::send(engine, Ask::get("/__state")).await.expect(200);
    serde_json::from_slice(&reply.body)
        .unwrap_or_else(|error| panic!("not as agreed ({error}): {}", reply.text()))
}

/// From now on the engine at this address does this too.
pub async fn fault(engine: SocketAddr, fault: &Value) {
    let ask = Ask::post("/__fault", fault.to_string());
    client::send(engine, ask).await.expect(200);
}
