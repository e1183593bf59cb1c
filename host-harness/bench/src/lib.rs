//! What the benchmarks measure: the situations, and our router put in them. The wasm guest links this very crate, so that
//! the same code runs natively and inside wasm.
#![forbid(unsafe_code)]

pub mod ours;
pub mod sharing;
pub mod situation;
