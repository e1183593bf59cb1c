//! Owns the configuration of what the proxy's threads tell each other.

use serde::Deserialize;

use super::ConfigError;
use super::check::value;

/// What the proxy's threads tell each other. A thread that is told nothing knows only of its own requests.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Sharing {
    /// Whether each worker thread tells the others what it has booked, so that all of them choose by the load of all; `false`: each
    /// knows only its own requests.
    pub load: bool,
    /// Whether each worker thread tells the others which prompts it has sent where, so that a conversation sticks whatever thread its
    /// connection is on.
    pub decisions: bool,
    /// Milliseconds between two tellings; what a thread knows of the others is at most twice as old.
    #[cfg_attr(feature = "schema", schemars(range(min = 20, max = 100)))]
    pub interval_ms: u64,
}

impl Default for Sharing {
    /// Everything, every 25 ms: often enough that a burst on one thread is seen by the next.
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
        if !(20..=100).contains(&self.interval_ms) {
            return Err(value(
                &format!("{at}.interval_ms"),
                "must be from 20 to 100; to share nothing set load and decisions to false",
            ));
        }
        Ok(())
    }
}
