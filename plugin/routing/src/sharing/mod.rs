//! Owns what the VMs of one proxy share: load and decisions, as bytes in a shared store.
//!
//! Each VM has a thread slot of its own in the shared store: one blob with its bookings, which it replaces, and a ring of
//! segments with its decisions, which it appends to. All others read both. No VM waits for another: a late reader skips
//! segments, and the bookings of a dead VM stop counting once its beat has stood still for a while. Slots, segments and
//! their sizes are bounded, and nothing that is read is trusted.

mod blob;
mod bytes;
mod log;
mod reports;
mod slot;
mod store;
mod sync;

pub use crate::load::ThreadLoad;
pub use crate::prefix::Decision;
pub use blob::{PoolShares, Totals};
pub use reports::{decode_reports, encode_reports};
pub use store::{SharedStore, WriteResult};
pub use sync::{ThreadSync, ThreadUpdate};

use xxhash_rust::xxh3::xxh3_64;

/// Thread slots in the shared store: VMs beyond that share nothing.
pub const SLOTS: u16 = 64;

/// Segments in a VM's ring.
pub const SEGMENTS: u64 = 16;

/// The size of a segment, in bytes.
pub const SEGMENT_BYTES: usize = 64 * 1024;

/// The size of a blob, in bytes.
pub const BLOB_BYTES: usize = 256 * 1024;

/// Ticks that a beat may stand still before its VM counts as dead: two seconds of 25 ms.
pub const DEAD_TICKS: u64 = 80;

/// Number of a pool in the shared store.
pub fn pool_number(name: &str) -> u64 {
    xxh3_64(name.as_bytes())
}

#[cfg(test)]
mod tests;
