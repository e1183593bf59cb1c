//! Owns numbers as bytes: little-endian, of fixed width, never read beyond the end.

/// Bytes still to be read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Input<'a>(pub(super) &'a [u8]);

impl Input<'_> {
    pub(super) fn u32(&mut self) -> Option<u32> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*bytes))
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*bytes))
    }

    /// The number of items that follow, each of `size` bytes; none where fewer bytes are left.
    pub(super) fn count(&mut self, size: usize) -> Option<usize> {
        let count = usize::try_from(self.u32()?).ok()?;
        let room = self.0.len().checked_div(size)?;
        (count <= room).then_some(count)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

pub(super) fn put_u32(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

pub(super) fn put_u64(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_le_bytes());
}

/// Writes a count, at most the largest 32-bit number.
pub(super) fn put_count(out: &mut Vec<u8>, count: usize) {
    put_u32(out, u32::try_from(count).unwrap_or(u32::MAX));
}

/// Writes a number, at most the largest 32-bit number.
pub(super) fn put_most(out: &mut Vec<u8>, number: u64) {
    put_u32(out, u32::try_from(number).unwrap_or(u32::MAX));
}
