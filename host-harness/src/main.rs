//! Owns the program `pd-harness`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    pd_harness::Cli::parse().run()
}
