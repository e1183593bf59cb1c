//! Owns the duties that a pool takes over from an endpoint picker: the names of its models for clients, the priorities of
//! objectives, and the handling of requests while there is no worker.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::check::require;
use super::{ConfigError, Destinations, Pool};
use crate::handoff::LegOrder;
use crate::request::rename::ModelRewrite;

/// Priorities by the names of objectives. A higher priority is served sooner; a request with a priority below 0 is shed where
/// it would have to wait.
pub type Objectives = BTreeMap<String, i32>;

/// Handling of a request while the pool has no worker at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
#[serde(rename_all = "snake_case")]
pub enum OnEmpty {
    /// The request is refused with 503 (fail closed).
    #[default]
    Refuse,
    /// The request is forwarded without a destination, so that the cluster's own fallback picks a host (fail open). For pools
    /// of aggregated workers: protocol `aggregated`, destinations `members`.
    Pass,
}

/// Checks these duties of a pool.
pub(super) fn check(pool: &Pool, at: &str) -> Result<(), ConfigError> {
    for (index, rewrite) in pool.model_rewrites.iter().enumerate() {
        rewrite.check(&format!("{at}.model_rewrites[{index}]"))?;
    }
    let is_whole = pool.rules().order == LegOrder::NoHandoff;
    let may_open = is_whole && pool.destinations == Destinations::Members;
    require(
        may_open || pool.on_empty == OnEmpty::Refuse,
        format_args!("{at}.on_empty"),
        "\"pass\" is for the protocol \"aggregated\" with destinations \"members\": elsewhere a request would reach a worker that cannot serve it whole; use \"refuse\"",
    )
}

impl ModelRewrite {
    fn check(&self, at: &str) -> Result<(), ConfigError> {
        require(
            self.model.as_deref() != Some(""),
            format_args!("{at}.model"),
            "must not be empty; leave it out for any model",
        )?;
        require(
            !self.targets.is_empty(),
            format_args!("{at}.targets"),
            "must name at least one model",
        )?;
        for (index, target) in self.targets.iter().enumerate() {
            require(
                !target.model.is_empty(),
                format_args!("{at}.targets[{index}].model"),
                "must not be empty",
            )?;
            require(
                target.weight != 0,
                format_args!("{at}.targets[{index}].weight"),
                "must be at least 1; leave the target out for none",
            )?;
        }
        Ok(())
    }
}
