//! Measures pd-router beside its peers.

#[allow(dead_code)]
mod peers;
#[allow(dead_code)]
mod results;
#[allow(dead_code)]
mod trace;
