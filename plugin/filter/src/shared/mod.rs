//! Owns state shared by all threads: the published fleet, the health of its source, engine reports, the leader's lease, and
//! unique numbers.

mod lease;

pub use lease::Lease;

use std::time::Duration;

use routing::fleet::Fleet;
use routing::route::Report;
use routing::sharing;
use serde::{Deserialize, Serialize};

use crate::host::{self, WriteOutcome};

/// Attempts at taking a unique number while other threads take theirs.
const TAKE_ATTEMPTS: u32 = 64;

const NEXT_NUMBER: &str = "pd_router.next_number";

/// A number that no other VM of this proxy has. Not for `on_configure`: taking a number leaves a trace.
pub fn unique_number() -> u64 {
    for _ in 0..TAKE_ATTEMPTS {
        let (bytes, version) = match host::shared(NEXT_NUMBER) {
            Some((bytes, version)) => (bytes, Some(version)),
            None => (Vec::new(), None),
        };
        let number = read_u64(&bytes, 0).unwrap_or(0);
        let written = host::set_shared(NEXT_NUMBER, &number.wrapping_add(1).to_le_bytes(), version);
        if written == Ok(WriteOutcome::Yes) {
            // Creating a key is not protected: two VMs may both get 0. The time makes their numbers differ.
            return number ^ host::now_ns().rotate_left(16);
        }
    }
    host::now_ns().rotate_left(16)
}

fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    let raw = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(raw.try_into().ok()?))
}

fn fleet_key(pool: &str) -> String {
    format!("pd_router.fleet.{pool}")
}

/// Key of the last fleet's source: few bytes, rewritten with each fleet, for frequent reads.
fn version_key(pool: &str) -> String {
    format!("pd_router.fleet_version.{pool}")
}

/// Publishes a fleet to all VMs.
pub fn publish_fleet(pool: &str, source: &str, fleet: &Fleet) {
    let version = fleet.version();
    let published = host::set_shared(&fleet_key(pool), &fleet.encode(), None)
        .and_then(|_| host::set_shared(&version_key(pool), source.as_bytes(), None));
    if let Err(error) = published {
        log::error!("fleet {version} of pool {pool} could not be published: {error}");
    }
}

/// The published fleet; `None` if `seen` is its version already, or if its source is another one, that of an older configuration.
pub fn read_fleet(pool: &str, source: &str, seen: &mut u32) -> Option<Fleet> {
    let (of, version) = host::shared(&version_key(pool))?;
    if of != source.as_bytes() || std::mem::replace(seen, version) == version {
        return None;
    }
    let (bytes, _) = host::shared(&fleet_key(pool))?;
    match Fleet::decode(&bytes) {
        Ok(fleet) => Some(fleet),
        Err(error) => {
            log::error!("pool {pool}: {error}");
            None
        }
    }
}

/// Health of a pool's source of workers, as published by the leading VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceHealth {
    /// Whether the last poll got no good answer: the fleet may be out of date.
    pub stale: bool,
    /// Whether the source was silent for so long that its workers have expired.
    pub given_up: bool,
    /// If stale: time of the last good answer, in milliseconds since 1970; 0: none has come.
    pub since_ms: u64,
    /// The problem, in words.
    pub problem: Option<String>,
}

fn source_key(pool: &str) -> String {
    format!("pd_router.source.{pool}")
}

/// Publishes the health of a pool's source to all VMs.
pub fn publish_source(pool: &str, health: &SourceHealth) {
    let bytes = serde_json::to_vec(health).unwrap_or_default();
    if let Err(error) = host::set_shared(&source_key(pool), &bytes, None) {
        log::error!("pool {pool}: {error}");
    }
}

/// Health of a pool's source; `None` if it was never published.
pub fn read_source(pool: &str) -> Option<SourceHealth> {
    let (bytes, _) = host::shared(&source_key(pool))?;
    serde_json::from_slice(&bytes).ok()
}

fn reports_key(pool: &str) -> String {
    format!("pd_router.reports.{pool}")
}

/// Publishes the reports of a pool's engines to all VMs, as of `now` by this VM's clock.
pub fn publish_reports<'r>(pool: &str, now: Duration, reports: impl Iterator<Item = &'r Report>) {
    let bytes = sharing::encode_reports(now, reports);
    if let Err(error) = host::set_shared(&reports_key(pool), &bytes, None) {
        log::error!("pool {pool}: {error}");
    }
}

/// The reports of a pool's engines, and when they were written by the writer's clock; `None` if `seen` is their version already.
pub fn read_reports(pool: &str, seen: &mut u32) -> Option<(Duration, Vec<Report>)> {
    let (bytes, version) = host::shared(&reports_key(pool))?;
    let is_new = std::mem::replace(seen, version) != version;
    is_new.then(|| sharing::decode_reports(&bytes))?
}
