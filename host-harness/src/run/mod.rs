//! `pd-harness run`: one command that starts a gateway and, unless told of a real one, a simulated fleet.

/// Arguments of `pd-harness run`.
#[derive(clap::Args)]
pub struct Args {}

/// Starts the gateway and serves until it is told to stop.
///
/// # Errors
/// When a part of the gateway cannot be started.
pub fn run(_args: Args) -> Result<(), RunError> {
    Ok(())
}

/// Why the gateway could not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {}
