//! Owns what a developer generates from the code: the files that `make reference` writes.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod reference;

/// Writes what is generated from the code.
#[derive(Parser)]
#[command(name = "xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write envoy/config.schema.json and the tables of envoy/config-reference.md anew; print what has changed.
    Reference,
}

fn main() -> ExitCode {
    let Command::Reference = Cli::parse().command;
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match reference::write(&workspace.join("envoy")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
