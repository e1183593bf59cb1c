//! Owns whom a pool's clusters can reach: their members, or any address within named networks.

use std::net::SocketAddr;

use serde::Deserialize;

use super::check::value;
use super::{ConfigError, ProtocolName};
use crate::network::Network;

/// Whom the pool's clusters can reach.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Destinations {
    /// Their members, which the proxy knows by itself.
    #[default]
    Members,
    /// Any address within these networks: they are ORIGINAL_DST clusters. The networks are what keeps a source from sending
    /// requests anywhere. Refused with `direct`, whose frontends are members of the cluster.
    OriginalDst(OriginalDst),
}

/// What an ORIGINAL_DST cluster may be told to connect to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct OriginalDst {
    /// A worker must lie within one of these. One that does not is left out by name and told of in the log; in
    /// `discovery.static` it is a wrong configuration, and one that registers gets 400.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub networks: Vec<Network>,
}

impl Destinations {
    /// Whether a worker at this address may be sent anything.
    pub fn allow(&self, address: SocketAddr) -> bool {
        match self {
            Self::Members => true,
            Self::OriginalDst(original) => {
                let mut networks = original.networks.iter();
                networks.any(|network| network.contains(address.ip()))
            }
        }
    }

    pub(super) fn check(&self, protocol: ProtocolName, at: &str) -> Result<(), ConfigError> {
        let Self::OriginalDst(original) = self else {
            return Ok(());
        };
        if !protocol.rules().reaches_workers {
            return Err(value(
                at,
                "direct mode sends requests to its frontends, which are members of the cluster: use \"members\"",
            ));
        }
        if original.networks.is_empty() {
            return Err(value(
                &format!("{at}.original_dst.networks"),
                "must name at least one network, as [\"10.0.0.0/8\", \"fd00::/8\"]",
            ));
        }
        Ok(())
    }
}
