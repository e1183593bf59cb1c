//! Owns the shared store: a map of bytes that all VMs of a proxy read and write.

/// The shared store. The host's shared data is one.
pub trait SharedStore {
    /// The value of a key, and its version, which changes with each write.
    fn read(&self, key: &str) -> Option<(Vec<u8>, u32)>;

    /// Writes a value. With a `version`, only if the key still has that version; but an absent key takes any.
    fn write(&self, key: &str, value: &[u8], version: Option<u32>) -> WriteResult;
}

/// Result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteResult {
    /// The value is written.
    Done,
    /// Another VM has written since that version.
    Stale,
    /// The host refused the write.
    Failed,
}

/// Key of a VM's blob.
pub(super) fn blob_key(slot: u16) -> String {
    format!("pd_router.vm.{slot}")
}

/// Key of a VM's segment of that number.
pub(super) fn log_key(slot: u16, number: u64) -> String {
    format!("pd_router.log.{slot}.{}", number % super::SEGMENTS)
}
