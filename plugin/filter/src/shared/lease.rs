//! Owns the election of the leading VM, which polls for all VMs and logs what all of them see.

use super::{read_u64, unique_number};
use crate::host::{self, WriteOutcome};

/// Rounds for which a leader's counter may stand still before another VM takes over: a second.
const PATIENCE_ROUNDS: u32 = 10;

const LEASE: &str = "pd_router.lease";

/// This VM's part in the election of a leader. A VM that has served a request gives way to one that has not: the main thread's VM
/// serves no request, so the lease comes to rest there. A holder is dead when its counter stands still: the host has only a wall
/// clock, which may jump.
pub struct Lease {
    me: Option<u64>,
    seen: Option<Holder>,
    still: u32,
}

/// The holder of the lease, as stored in shared data.
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
    /// A VM that has not taken part yet: nothing is written before the first round.
    pub fn new() -> Self {
        Self {
            me: None,
            seen: None,
            still: 0,
        }
    }

    /// Takes part in the election; whether this VM leads in this round.
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
        (holder.serves && !serves) || self.still >= PATIENCE_ROUNDS
    }
}

fn write(holder: Holder, version: Option<u32>) -> bool {
    host::set_shared(LEASE, &holder.encode(), version) == Ok(WriteOutcome::Yes)
}
