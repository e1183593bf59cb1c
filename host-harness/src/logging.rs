//! Owns the log of this program, its host and its plugin: to standard error.

use tracing_subscriber::EnvFilter;

/// Starts logging at the levels in `RUST_LOG`; without that variable, at the level `otherwise` and above.
pub fn begin(default: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    // Several parts of this program may call this; only the first call counts.
    let _ = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(filter)
        .try_init();
}
