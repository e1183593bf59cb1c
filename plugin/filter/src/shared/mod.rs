//! Owns what threads share: the board that all write on, the published fleet, the lease of the one who polls, and unique
//! names.

mod lease;

pub use lease::Lease;

use std::cell::Cell;
use std::time::Duration;

use routing::fleet::Fleet;
use routing::route::Report;
use routing::sharing;
use serde::{Deserialize, Serialize};

use crate::host::{self, Written};

/// Attempts at a number of one's own while other threads take theirs.
const TAKE_ATTEMPTS: u32 = 64;

const NEXT_NUMBER: &str = "pd_router.next_number";

/// A number that no other VM of this proxy has got. Not for `on_configure`: it leaves a trace.
pub fn unique_number() -> u64 {
    for _ in 0..TAKE_ATTEMPTS {
        let (bytes, version) = match host::shared(NEXT_NUMBER) {
            Some((bytes, version)) => (bytes, Some(version)),
            None => (Vec::new(), None),
        };
        let number = read_u64(&bytes, 0).unwrap_or(0);
        let written = host::set_shared(NEXT_NUMBER, &number.wrapping_add(1).to_le_bytes(), version);
        if written == Ok(Written::Yes) {
            // The first creation of a key is not protected: two VMs may both get 0. The time tells them apart.
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

/// Where it is said of which source the last fleet is: few bytes, new with each fleet, for those who look often.
fn version_key(pool: &str) -> String {
    format!("pd_router.fleet_version.{pool}")
}

/// Publishes a fleet for all VMs.
pub fn publish_fleet(pool: &str, source: &str, fleet: &Fleet) {
    let version = fleet.version();
    let published = host::set_shared(&fleet_key(pool), &fleet.encode(), None)
        .and_then(|_| host::set_shared(&version_key(pool), source.as_bytes(), None));
    if let Err(error) = published {
        log::error!("fleet {version} of pool {pool} could not be published: {error}");
    }
}

/// The published fleet, unless `seen` is its version already, or it is of another source: of one that an older configuration
/// had.
pub fn read_fleet(pool: &str, source: &str, seen: &Cell<u32>) -> Option<Fleet> {
    let (of, version) = host::shared(&version_key(pool))?;
    if of != source.as_bytes() || seen.replace(version) == version {
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

/// How a pool's source of workers does, as the VM that leads tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceHealth {
    /// Whether its last answer was none: what is known may be true no more.
    pub stale: bool,
    /// Whether it was silent for so long that its workers were given up.
    pub given_up: bool,
    /// Where it is stale: when the last good answer came, in milliseconds since 1970; 0: none has come.
    pub since_ms: u64,
    /// What is wrong.
    pub problem: Option<String>,
}

fn source_key(pool: &str) -> String {
    format!("pd_router.source.{pool}")
}

/// Tells all VMs how a pool's source does.
pub fn publish_source(pool: &str, health: &SourceHealth) {
    let bytes = serde_json::to_vec(health).unwrap_or_default();
    if let Err(error) = host::set_shared(&source_key(pool), &bytes, None) {
        log::error!("pool {pool}: {error}");
    }
}

/// How a pool's source does; none where that was never told.
pub fn read_source(pool: &str) -> Option<SourceHealth> {
    let (bytes, _) = host::shared(&source_key(pool))?;
    serde_json::from_slice(&bytes).ok()
}

fn reports_key(pool: &str) -> String {
    format!("pd_router.reports.{pool}")
}

/// Tells all VMs what the engines of a pool have told, at this time of this VM's clock.
pub fn publish_reports<'r>(pool: &str, now: Duration, reports: impl Iterator<Item = &'r Report>) {
    let bytes = sharing::encode_reports(now, reports);
    if let Err(error) = host::set_shared(&reports_key(pool), &bytes, None) {
        log::error!("pool {pool}: {error}");
    }
}

/// What the engines of a pool have told, and when that was written by the clock of the VM that did, unless `seen` is the version
/// of it.
pub fn read_reports(pool: &str, seen: &Cell<u32>) -> Option<(Duration, Vec<Report>)> {
    let (bytes, version) = host::shared(&reports_key(pool))?;
    let is_new = seen.replace(version) != version;
    is_new.then(|| sharing::decode_reports(&bytes))?
}
