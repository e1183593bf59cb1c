//! Owns the configuration of thread sync: the data that the proxy's threads share with each other.

use serde::Deserialize;

use super::ConfigError;
use super::check::require;

/// Data that the proxy's threads share with each other. A thread without this data knows only its own requests.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Sharing {
    /// Whether each worker thread shares its bookings with the others, so that all threads choose by the load of all. `false`:
    /// each thread knows only its own requests.
    pub load: bool,
    /// Whether each worker thread shares with the others which workers its prompts went to, so that a conversation stays on its
    /// workers whatever thread its connection is on.
    pub decisions: bool,
    /// Milliseconds between two exchanges; the knowledge of a thread about the others is at most twice as old.
    #[cfg_attr(feature = "schema", schemars(range(min = 20, max = 100)))]
    pub interval_ms: u64,
}

impl Default for Sharing {
    /// All data, every 25 ms: often enough for the next thread to see a burst on one thread.
    fn default() -> Self {
        Self {
            load: true,
            decisions: true,
            interval_ms: 25,
        }
    }
}

impl Sharing {
    pub(super) fn check(&self, at: &str) -> Result<(), ConfigError> {
        require(
            (20..=100).contains(&self.interval_ms),
            format_args!("{at}.interval_ms"),
            "must be from 20 to 100; to share nothing set load and decisions to false",
        )
    }
}
