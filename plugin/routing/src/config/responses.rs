//! Owns the handling of `/v1/responses`, where the hand-off depends on the engine's release.

use serde::Deserialize;

use super::ConfigError;
use super::check::value;
use crate::handoff::ProtocolRules;
use crate::request::Generation;

/// Handling of a request to `/v1/responses` in a pool of SGLang workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema, serde::Serialize))]
#[serde(rename_all = "snake_case")]
pub enum Responses {
    /// A worker that can runs the request aggregated; where no worker can, the request gets 501.
    #[default]
    Whole,
    /// The request is split into prefill and decode. Only for releases that accept the hand-off's fields there: other releases
    /// drop the fields, and decode waits for a prefill that never comes.
    Split,
}

impl Responses {
    pub(super) fn check(self, rules: &ProtocolRules, at: &str) -> Result<(), ConfigError> {
        let splits = rules.split_if_configured;
        match self {
            Self::Whole => Ok(()),
            Self::Split if splits.contains(&Generation::Responses) => Ok(()),
            Self::Split => Err(value(
                &format!("{at}.responses"),
                "\"split\" is for the protocol \"sglang\": with others the protocol alone says whether they are split; leave it out",
            )),
        }
    }
}
