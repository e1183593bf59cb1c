//! Owns what the benchmarks measure: the situations, and our router in each. The wasm guest links this same crate, so that the
//! same code runs natively and inside wasm.
#![forbid(unsafe_code)]

pub mod ours;
pub mod sharing;
pub mod situation;
