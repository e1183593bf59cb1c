//! Owns the destinations that a pool's clusters can reach: their members, or any address within named networks.

use std::net::SocketAddr;

use serde::Deserialize;

use super::check::require;
use super::{ConfigError, ProtocolName};
use crate::network::Network;

/// Destinations that the pool's clusters can reach.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Destinations {
    /// Members of the clusters, which the proxy knows by itself.
    #[default]
    Members,
    /// Any address within these networks, through ORIGINAL_DST clusters. The networks keep a source from sending requests to
    /// arbitrary addresses. Refused with `direct`, whose frontends are members of the cluster.
    OriginalDst(OriginalDst),
}

/// Addresses that an ORIGINAL_DST cluster may connect to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct OriginalDst {
    /// Networks in one of which a worker's address must lie. A worker outside of them is left out, and the log names the
    /// worker. In `discovery.static` such a worker makes the configuration wrong; a registration of such a worker gets 400.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub networks: Vec<Network>,
}

impl Destinations {
    /// Whether requests and polls may be sent to a worker at this address.
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
        require(
            protocol.rules().reaches_workers,
            at,
            "direct mode sends requests to its frontends, which are members of the cluster: use \"members\"",
        )?;
        require(
            !original.networks.is_empty(),
            format_args!("{at}.original_dst.networks"),
            "must name at least one network, as [\"10.0.0.0/8\", \"fd00::/8\"]",
        )
    }
}
