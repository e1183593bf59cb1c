//! Measures pd-router beside its peers.

#[allow(dead_code)]
mod peers;
