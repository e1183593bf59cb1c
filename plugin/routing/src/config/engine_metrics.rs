//! Owns the configuration of what the workers' own `/metrics` are asked.

use serde::Deserialize;

use super::check::value;
use super::{ConfigError, ProtocolName};

/// How the workers' own `/metrics` are polled.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct EngineMetrics {
    /// The path at which an engine tells its figures.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = "^/")))]
    pub path: String,
    /// Milliseconds between two polls of one worker.
    #[cfg_attr(feature = "schema", schemars(range(min = 100)))]
    pub interval_ms: u64,
    /// Milliseconds after which a poll has failed.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub timeout_ms: u64,
    /// Milliseconds after which a worker's figures are not known any more: then the greater of the last ones and the median of
    /// its peers count; at least `interval_ms`. Where there are so many workers that each has its turn seldom, they last for two turns.
    pub stale_after_ms: u64,
    /// Polls a second, of all the pool's workers together. With more workers than `interval_ms` allows each is polled
    /// less often (1,000 workers every four seconds).
    #[cfg_attr(feature = "schema", schemars(range(min = 1), extend("x-unit" = "polls")))]
    pub most_per_second: u32,
}

impl Default for EngineMetrics {
    /// Once a second, as often as Prometheus would at most; believed for as long as four polls may fail.
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
        if !protocol.rules().reaches_workers {
            return Err(value(
                at,
                "direct mode reaches Dynamo's frontends, not the workers; leave it out",
            ));
        }
        if !self.path.starts_with('/') {
            return Err(value(&format!("{at}.path"), "must begin with a slash"));
        }
        if self.interval_ms < 100 {
            return Err(value(&format!("{at}.interval_ms"), "must be at least 100"));
        }
        if self.timeout_ms == 0 {
            return Err(value(&format!("{at}.timeout_ms"), "must be at least 1"));
        }
        if self.stale_after_ms < self.interval_ms {
            return Err(value(
                &format!("{at}.stale_after_ms"),
                "must be at least interval_ms: figures would be stale before there are new ones",
            ));
        }
        if self.most_per_second == 0 {
            return Err(value(
                &format!("{at}.most_per_second"),
                "must be at least 1; leave engine_metrics out to poll nobody",
            ));
        }
        Ok(())
    }
}
