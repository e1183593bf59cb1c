//! Tests of sharing between VMs: the bytes, one slot at a time, and all of it in any order.

mod codec;
mod places;
mod simulation;
mod world;
