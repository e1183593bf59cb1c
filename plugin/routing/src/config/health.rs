//! Owns the configuration of ejection: the failures that lead to it, and its length.

use serde::Deserialize;

use super::ConfigError;
use super::check::require;

/// Ejection of workers that keep failing: the failures that lead to it, and its length.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Health {
    /// Failures in a row after which a worker is ejected, if another worker of its role, model and namespace has answered since
    /// they began; 0: never.
    #[cfg_attr(feature = "schema", schemars(extend("x-unit" = "failures")))]
    pub eject_after: u32,
    /// Milliseconds of a worker's first ejection. Each further ejection lasts twice as long as the one before.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub eject_ms: u64,
    /// Maximum milliseconds of an ejection, at least `eject_ms`. After this much time of work since its last ejection, a worker
    /// begins with `eject_ms` again.
    pub most_eject_ms: u64,
    /// Minimum milliseconds granted to a worker for a prefill, or until its first token, while the worker has given no good
    /// answer and passed no deadline; 0: the same time as later. Engines compile at their first requests, for 30 to 150 s. Each
    /// thread of the proxy counts only answers of its own.
    pub cold_timeout_ms: u32,
}

impl Default for Health {
    /// Three failures are no accident. Ejections last from five seconds, as after a refused connection, to five minutes: an
    /// engine that loads its weights anew is back by then. Three minutes for a first answer: vLLM has been seen to compile for
    /// two and a half.
    fn default() -> Self {
        Self {
            eject_after: 3,
            eject_ms: 5_000,
            most_eject_ms: 300_000,
            cold_timeout_ms: 180_000,
        }
    }
}

impl Health {
    pub(super) fn check(&self, at: &str) -> Result<(), ConfigError> {
        require(
            self.eject_ms != 0,
            format_args!("{at}.eject_ms"),
            "must be at least 1; to eject nobody set eject_after to 0",
        )?;
        require(
            self.most_eject_ms >= self.eject_ms,
            format_args!("{at}.most_eject_ms"),
            "must be at least eject_ms",
        )
    }
}
