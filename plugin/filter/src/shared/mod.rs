//! Owns what threads share: the board that all write on, the published fleet, the lease of the one who polls, and unique
//! names.

mod lease;

pub use lease::Lease;

use std::cell::Cell;

use routing::fleet::Fleet;

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

/// Where it is said which fleet is the last one: few bytes, for those who look often.
fn version_key(pool: &str) -> String {
    format!("pd_router.fleet_version.{pool}")
}

/// Publishes a fleet for all VMs.
pub fn publish_fleet(pool: &str, fleet: &Fleet) {
    let version = fleet.version();
    let published = host::set_shared(&fleet_key(pool), &fleet.encode(), None)
        .and_then(|_| host::set_shared(&version_key(pool), &version.to_le_bytes(), None));
    if let Err(error) = published {
        log::error!("fleet {version} of pool {pool} could not be published: {error}");
    }
}

/// The published fleet, unless `seen` is its version already.
pub fn read_fleet(pool: &str, seen: &Cell<u32>) -> Option<Fleet> {
    let (_, version) = host::shared(&version_key(pool))?;
    if seen.replace(version) == version {
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
