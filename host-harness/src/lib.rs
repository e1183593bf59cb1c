//! Owns `pd-harness`: a proxy-wasm host for pd-router, simulated engines, and the tools that test it.
#![forbid(unsafe_code)]

mod bench;
mod cache;
mod chaos;
mod check;
mod cli;
mod commands;
mod engine;
mod files;
mod host;
mod http;
mod load;
mod logging;
mod plot;
mod replay;
mod run;

pub use check::{schema, shape};
pub use commands::Cli;
