//! Owns what threads share: the published fleet, the lease of the one who polls, and unique names.

use std::cell::Cell;

use routing::fleet::Fleet;

use crate::host::{self, Written};

/// Ticks for which a leader's counter may stand still before another VM takes over.
const PATIENCE_TICKS: u32 = 10;

/// Attempts at a number of one's own while other threads take theirs.
const TAKE_ATTEMPTS: u32 = 64;

const NEXT_NUMBER: &str = "pd_router.next_number";
const LEASE: &str = "pd_router.lease";

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

/// Publishes a fleet for all VMs.
pub fn publish_fleet(pool: &str, fleet: &Fleet) {
    if let Err(error) = host::set_shared(&fleet_key(pool), &fleet.encode(), None) {
        log::error!(
            "fleet {} of pool {pool} could not be published: {error}",
            fleet.version()
        );
    }
}

/// The published fleet, unless `seen` is its version already.
pub fn read_fleet(pool: &str, seen: &Cell<u32>) -> Option<Fleet> {
    let (bytes, version) = host::shared(&fleet_key(pool))?;
    if seen.replace(version) == version {
        return None;
    }
    match Fleet::decode(&bytes) {
        Ok(fleet) => Some(fleet),
        Err(error) => {
            log::error!("pool {pool}: {error}");
            None
        }
    }
}

/// This VM's part in deciding who polls. One that has served a request gives way to one that has not: the main thread's
/// VM serves nobody, so that is where the lease comes to rest. A holder is dead when its counter stands still: the host
/// has only a wall clock, which may jump.
pub struct Lease {
    me: Option<u64>,
    seen: Option<Holder>,
    still: u32,
}

/// Who holds the lease, as it is written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Holder {
    id: u64,
    counter: u64,
    serves: bool,
}

impl Holder {
    fn encode(self) -> [u8; 17] {
        let mut bytes = [0; 17];
        let (id, rest) = bytes.split_at_mut(8);
        id.copy_from_slice(&self.id.to_le_bytes());
        let (counter, serves) = rest.split_at_mut(8);
        counter.copy_from_slice(&self.counter.to_le_bytes());
        serves.fill(u8::from(self.serves));
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            id: read_u64(bytes, 0)?,
            counter: read_u64(bytes, 8)?,
            serves: *bytes.get(16)? != 0,
        })
    }
}

impl Lease {
    /// No part taken yet: nothing is written before the first tick.
    pub fn new() -> Self {
        Self {
            me: None,
            seen: None,
            still: 0,
        }
    }

    /// Whether this VM leads for this tick.
    pub fn tick(&mut self, serves: bool) -> bool {
        let me = *self.me.get_or_insert_with(unique_number);
        let Some((bytes, version)) = host::shared(LEASE) else {
            return write(
                Holder {
                    id: me,
                    counter: 1,
                    serves,
                },
                None,
            );
        };
        let Some(holder) = Holder::decode(&bytes) else {
            return write(
                Holder {
                    id: me,
                    counter: 1,
                    serves,
                },
                Some(version),
            );
        };
        if holder.id == me || self.may_take(holder, serves) {
            let counter = holder.counter.wrapping_add(1);
            return write(
                Holder {
                    id: me,
                    counter,
                    serves,
                },
                Some(version),
            );
        }
        false
    }

    fn may_take(&mut self, holder: Holder, serves: bool) -> bool {
        if self.seen == Some(holder) {
            self.still = self.still.saturating_add(1);
        } else {
            self.seen = Some(holder);
            self.still = 0;
        }
        (holder.serves && !serves) || self.still >= PATIENCE_TICKS
    }
}

fn write(holder: Holder, version: Option<u32>) -> bool {
    host::set_shared(LEASE, &holder.encode(), version) == Ok(Written::Yes)
}
