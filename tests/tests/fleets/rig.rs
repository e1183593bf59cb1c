//! Helpers of this suite: checks of all threads, and requests one after the other.

use std::collections::BTreeMap;
use std::time::Duration;

use pd_router_e2e::client::{Ask, Pair};
use pd_router_e2e::gateway::{Gateway, worker};
use pd_router_e2e::wait::{GENEROUS, eventually};
use pd_router_e2e::worker_document::INTERVAL_MS;
use serde_json::Value;

/// Poll interval of a source.
pub const INTERVAL: Duration = Duration::from_millis(INTERVAL_MS);

/// Allowance on top of an interval, on a machine that is busy with other tests.
pub const SLACK: Duration = Duration::from_secs(2);

/// Engines that compute prompts at once and generate tokens slowly.
pub const UNHURRIED: &[&str] = &["--prefill-rate", "1000000", "--token-ms", "50"];

/// Waits until the first pool's status has this property on all threads.
pub async fn until_all_say(gateway: &Gateway, what: &str, is_so: impl Fn(&Value) -> bool) {
    eventually(what, GENEROUS, || async {
        for _ in 0..gateway.enough_connections() {
            let page = gateway.try_send(Ask::get("/pd-router/status")).await;
            let page = page.map_err(|failure| failure.to_string())?;
            let pool = page.expect(200).json()["pools"][0].take();
            if !is_so(&pool) {
                return Err(pool.to_string());
            }
        }
        Ok(())
    })
    .await;
}

/// Waits until all threads list this worker, or until none does.
pub async fn until_listed(gateway: &Gateway, name: &str, listed: bool) {
    let what = format!("{name} is listed: {listed}");
    until_all_say(gateway, &what, |pool| {
        worker(pool, name).is_null() != listed
    })
    .await;
}

/// The fleet's version on one thread.
pub async fn version(gateway: &Gateway) -> u64 {
    let pool = gateway.status().await;
    let version = pool["fleet_version"].as_u64();
    version.unwrap_or_else(|| panic!("no version in {pool}"))
}

/// Waits until all threads have a later fleet than this one.
pub async fn until_later(gateway: &Gateway, version: u64) {
    until_all_say(gateway, "a later fleet", |pool| {
        pool["fleet_version"].as_u64() > Some(version)
    })
    .await;
}

/// The workers of this many short requests, each over its own connection.
pub async fn pairs(gateway: &Gateway, count: usize) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for _ in 0..count {
        pairs.push(gateway.send(Ask::chat("hello")).await.expect(200).pair());
    }
    pairs
}

/// Number of requests by worker.
pub fn tally(pairs: &[Pair]) -> BTreeMap<&str, usize> {
    let mut tally = BTreeMap::new();
    for pair in pairs {
        *tally.entry(pair.prefill.as_str()).or_default() += 1;
        *tally.entry(pair.decode.as_str()).or_default() += 1;
    }
    tally
}

/// Waits until requests get this status, on all threads.
pub async fn until_answered_with(gateway: &Gateway, status: u16) {
    eventually(&format!("answers are {status}"), GENEROUS, || async {
        for _ in 0..gateway.enough_connections() {
            let reply = gateway.try_send(Ask::chat("hello")).await;
            let reply = reply.map_err(|failure| failure.to_string())?;
            if reply.status != status {
                return Err(format!("{}: {}", reply.status, reply.text()));
            }
        }
        Ok(())
    })
    .await;
}
