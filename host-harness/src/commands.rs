//! Owns the command line: the commands, and the exit status of each.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{bench, chaos, check, engine, load, replay, run};

/// A proxy-wasm host for pd-router, simulated inference engines, and the tools that test them.
#[derive(Parser)]
#[command(name = "pd-harness", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a gateway with pd-router in it, in front of a simulated or a real fleet.
    Run(run::Args),
    /// Explain a plugin configuration, and warn of what an Envoy bootstrap does to it.
    Check(check::Args),
    /// Start one simulated inference server.
    Engine(engine::Args),
    /// Send requests to an address, and measure the answers.
    Load(load::Args),
    /// Make engines fail while clients send requests, and judge the clients' outcomes.
    Chaos(chaos::Args),
    /// Measure pd-router beside its peers, and write a report.
    Bench(bench::Args),
    /// Replay a recorded trace in virtual time, and compare policies.
    Replay(replay::Args),
}

impl Cli {
    /// Runs the command; an error is printed.
    pub fn run(self) -> ExitCode {
        let outcome = match self.command {
            Command::Run(args) => run::run(args).map_err(|error| error.to_string()),
            Command::Check(args) => {
                return check::run(&args).unwrap_or_else(|error| failure(&error.to_string()));
            }
            Command::Engine(args) => engine::run(args).map_err(|error| error.to_string()),
            Command::Load(args) => load::run(&args).map_err(|error| error.to_string()),
            Command::Chaos(args) => chaos::run(args).map_err(|error| error.to_string()),
            Command::Bench(args) => bench::run(&args).map_err(|error| error.to_string()),
            Command::Replay(args) => replay::run(args).map_err(|error| error.to_string()),
        };
        match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(message) => failure(&message),
        }
    }
}

fn failure(message: &str) -> ExitCode {
    eprintln!("pd-harness: {message}");
    ExitCode::FAILURE
}
