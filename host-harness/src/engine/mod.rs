//! Simulated inference engines: strict about the hand-off, honest about what they computed.

/// Arguments of `pd-harness engine`.
#[derive(clap::Args)]
pub struct Args {}

/// Runs one engine until it is told to stop.
///
/// # Errors
/// When the address cannot be bound.
pub fn run(_args: Args) -> Result<(), EngineError> {
    Ok(())
}

/// Why an engine could not run.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {}
