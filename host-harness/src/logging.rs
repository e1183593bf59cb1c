//! Owns where the log of this program, of its host and of the plugin in it goes: standard error.

use tracing_subscriber::EnvFilter;

/// Logs from now on what `RUST_LOG` asks for, and where it asks for nothing, from the level `otherwise` up.
pub fn begin(otherwise: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(otherwise));
    // Only the first one counts, where several parts of this program begin.
    let _ = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(filter)
        .try_init();
}
