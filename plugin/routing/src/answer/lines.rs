//! Owns where the lines of a stream end: with LF, CR, or both.

use memchr::memchr2;

/// Where the first line end is; none where there is none.
pub(super) fn line_end(bytes: &[u8]) -> Option<usize> {
    memchr2(b'\n', b'\r', bytes)
}
