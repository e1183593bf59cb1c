//! Owns the line ends of a stream: LF, CR, or both.

use memchr::memchr2;

/// Position of the first line end; none where there is none.
pub(super) fn line_end(bytes: &[u8]) -> Option<usize> {
    memchr2(b'\n', b'\r', bytes)
}
