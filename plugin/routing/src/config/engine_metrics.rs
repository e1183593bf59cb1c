//! Owns the configuration of the polls of the workers' own `/metrics`.

use serde::Deserialize;

use super::check::{require, value};
use super::{ConfigError, ProtocolName};

/// Polls of the workers' own `/metrics`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct EngineMetrics {
    /// Path at which an engine reports its figures.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = "^/")))]
    pub path: String,
    /// Milliseconds between two polls of one worker.
    #[cfg_attr(feature = "schema", schemars(range(min = 100)))]
    pub interval_ms: u64,
    /// Timeout of one poll, in milliseconds; a poll without an answer by then has failed.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub timeout_ms: u64,
    /// Milliseconds after which a worker's figures are stale, at least `interval_ms`; then the greater of the last figures and
    /// the median of the worker's peers counts, and after `booking_expiry_ms` the median alone. With many workers, each of
    /// which is polled seldom, figures last for two rounds of polls.
    pub stale_after_ms: u64,
    /// Maximum polls a second, for all the pool's workers together. With more workers than `interval_ms` allows, each worker is
    /// polled less often (1,000 workers: every four seconds).
    #[cfg_attr(feature = "schema", schemars(range(min = 1), extend("x-unit" = "polls")))]
    pub most_per_second: u32,
}

impl Default for EngineMetrics {
    /// One poll a second, the highest usual frequency of Prometheus. The figures last until four polls have failed.
    fn default() -> Self {
        Self {
            path: "/metrics".to_owned(),
            interval_ms: 1_000,
            timeout_ms: 1_000,
            stale_after_ms: 5_000,
            most_per_second: 250,
        }
    }
}

impl EngineMetrics {
    pub(super) fn check(&self, protocol: ProtocolName, at: &str) -> Result<(), ConfigError> {
        require(
            protocol.rules().reaches_workers,
            at,
            "direct mode reaches Dynamo's frontends, not the workers; leave it out",
        )?;
        if !self.path.starts_with('/') {
            return Err(value(&format!("{at}.path"), "must begin with a slash"));
        }
        if self.interval_ms < 100 {
            return Err(value(&format!("{at}.interval_ms"), "must be at least 100"));
        }
        if self.timeout_ms == 0 {
            return Err(value(&format!("{at}.timeout_ms"), "must be at least 1"));
        }
        require(
            self.stale_after_ms >= self.interval_ms,
            format_args!("{at}.stale_after_ms"),
            "must be at least interval_ms: figures would be stale before there are new ones",
        )?;
        require(
            self.most_per_second != 0,
            format_args!("{at}.most_per_second"),
            "must be at least 1; leave engine_metrics out to poll nobody",
        )
    }
}
