//! Tests of the peak memory of reading hostile texts, counted in bytes by the allocator.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used
)]

mod answers;
mod formula;
mod peak;
mod requests;
