//! Tests of what VMs tell each other: the bytes, one place at a time, and all of it in any order.

mod codec;
mod places;
mod simulation;
mod world;
