//! Tests of single requests, seen from outside: turns, pins, policies, topology, endings and rooms.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used
)]

mod admission;
mod blame;
mod condition;
mod conditional;
mod endings;
mod explain;
mod handed;
mod incarnations;
mod limits;
mod named;
mod pins;
mod policies;
mod protocols;
mod recovery;
mod rooms;
mod support;
mod surface;
mod topology;
mod turns;
