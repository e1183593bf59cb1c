//! Owns what a board is: a map of bytes that all VMs of a proxy read and write.

/// The board. The host's shared data is one.
pub trait SharedStore {
    /// The value of a key, and its version, which is another after each write.
    fn read(&self, key: &str) -> Option<(Vec<u8>, u32)>;

    /// Writes a value. With a `version` only if the key has that one still; but a key that is not there takes any.
    fn write(&self, key: &str, value: &[u8], version: Option<u32>) -> Wrote;
}

/// What came of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrote {
    /// It is there.
    Done,
    /// Somebody else wrote since that version.
    Stale,
    /// The host would not.
    Failed,
}

/// Where a VM says what it has booked.
pub(super) fn blob_key(slot: u16) -> String {
    format!("pd_router.vm.{slot}")
}

/// Where a VM's segment of that number is.
pub(super) fn log_key(slot: u16, number: u64) -> String {
    format!("pd_router.log.{slot}.{}", number % super::SEGMENTS)
}
