//! Owns what the harness and the end-to-end tests share. It is small and quick to build: the tests depend on it, and not on the
//! harness.
#![forbid(unsafe_code)]

pub mod connection;
pub mod loopback;
pub mod page;
pub mod prometheus;
pub mod sse;
pub mod supervised;
pub mod usage;
