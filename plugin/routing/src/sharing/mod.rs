//! Owns what the VMs of one proxy tell each other: load and decisions, as bytes on a common board.
//!
//! Each VM has a place of its own on the board: one blob with what it has booked, which it replaces, and a ring of segments
//! with its decisions, which it goes on writing. All others read both. Nobody waits for anybody: a reader that is too late
//! skips, and what a VM that died had booked counts no more once its beat has stood still for a while. Everything is bounded:
//! places, segments and their sizes; and nothing that is read is trusted.

mod blob;
mod board;
mod bytes;
mod desk;
mod log;
mod place;
mod reports;

pub use crate::load::ThreadLoad;
pub use crate::prefix::Decision;
pub use blob::{PoolShares, Totals};
pub use board::{SharedStore, Wrote};
pub use desk::{ThreadSync, ThreadUpdate};
pub use reports::{decode_reports, encode_reports};

use xxhash_rust::xxh3::xxh3_64;

/// Places on the board: more VMs than that share nothing.
pub const SLOTS: u16 = 64;

/// Segments in a VM's ring.
pub const SEGMENTS: u64 = 16;

/// The size of a segment, in bytes.
pub const SEGMENT_BYTES: usize = 64 * 1024;

/// The size of a blob, in bytes.
pub const BLOB_BYTES: usize = 256 * 1024;

/// For so many ticks a beat may stand still before its VM is taken for dead: two seconds of 25 ms.
pub const DEAD_TICKS: u64 = 80;

/// The number by which a pool is known on the board.
pub fn pool_number(name: &str) -> u64 {
    xxh3_64(name.as_bytes())
}

#[cfg(test)]
mod tests;
