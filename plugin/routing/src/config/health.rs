//! Owns the configuration of ejection: when a worker that keeps failing is left alone, and for how long.

use serde::Deserialize;

use super::ConfigError;
use super::check::value;

/// When a worker that keeps failing is left alone, and for how long.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Health {
    /// Failures in a row after which a worker is ejected, if others of its role work; 0: never.
    #[cfg_attr(feature = "schema", schemars(extend("x-unit" = "failures")))]
    pub eject_after: u32,
    /// Milliseconds that a worker is ejected for the first time; twice as long each time after.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub eject_ms: u64,
    /// Milliseconds that a worker is ejected at most; at least `eject_ms`. One that has worked for so long since its last
    /// ejection starts anew.
    pub most_eject_ms: u64,
    /// Milliseconds that a worker may take at least over a prefill, or until its first token, as long as it has neither answered anything
    /// nor passed a deadline: engines compile at their first requests, for 30 to 150 s. Each thread of the proxy has seen answers of
    /// its own. 0: the same as later.
    pub cold_timeout_ms: u32,
}

impl Default for Health {
    /// Three failures are no accident. Five seconds, as with a refused connection, to five minutes: an engine that loads its
    /// weights anew is back by then. Three minutes for a first answer: vLLM was seen to compile for two and a half.
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
        if self.eject_ms == 0 {
            return Err(value(
                &format!("{at}.eject_ms"),
                "must be at least 1; to eject nobody set eject_after to 0",
            ));
        }
        if self.most_eject_ms < self.eject_ms {
            return Err(value(
                &format!("{at}.most_eject_ms"),
                "must be at least eject_ms",
            ));
        }
        Ok(())
    }
}
