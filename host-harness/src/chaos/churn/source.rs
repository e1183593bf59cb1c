//! Owns the discovery sources of churn, and what each can express.

use routing::fleet::Role;
use serde_json::{Value, json};

use super::INTERVAL;
use crate::chaos::play::PlayError;
use crate::engine::Dialect;
use crate::run::fleet::MODEL;

/// How the gateway learns of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Source {
    /// A list in its configuration: workers die, and return at the same address.
    Static,
    /// A polled document; the clusters have a fixed set of addresses.
    Document,
    /// A polled document; the clusters accept any address.
    DocumentOriginalDst,
    /// Envoy's clusters, polled; their hosts come from files.
    EnvoyClusters,
    /// Workers register themselves; the clusters accept any address.
    Registration,
}

impl Source {
    /// All sources.
    pub const ALL: [Self; 5] = [
        Self::Static,
        Self::Document,
        Self::DocumentOriginalDst,
        Self::EnvoyClusters,
        Self::Registration,
    ];

    /// Name of the scenario with this source.
    pub fn scenario(self) -> &'static str {
        match self {
            Self::Static => "churn-static",
            Self::Document => "churn-document",
            Self::DocumentOriginalDst => "churn-document-original-dst",
            Self::EnvoyClusters => "churn-envoy-clusters",
            Self::Registration => "churn-registration",
        }
    }

    /// Checks that the source can express all that the gateway must know of these workers.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check(self, dialect: Dialect) -> Result<(), PlayError> {
        let each_has_its_port = dialect.has_bootstrap();
        let is_supported = match self {
            Self::EnvoyClusters => !each_has_its_port,
            // Bootstrap servers are called through a cluster of their own, which would have to churn as well.
            _ => dialect != Dialect::Mooncake,
        };
        match is_supported {
            true => Ok(()),
            false => Err(PlayError::UnsupportedSource {
                scenario: self.scenario(),
            }),
        }
    }

    /// The pool's `destinations`.
    pub fn destinations(self) -> Value {
        match self {
            Self::Static | Self::Document | Self::EnvoyClusters => json!("members"),
            Self::DocumentOriginalDst | Self::Registration => {
                json!({"original_dst": {"networks": ["127.0.0.0/8"]}})
            }
        }
    }

    /// Whether workers can join at new addresses, and not only at those that the clusters hold already.
    pub fn finds_addresses(self) -> bool {
        !matches!(self, Self::Static | Self::Document)
    }
}

/// `discovery` of type Envoy clusters.
pub fn envoy_clusters() -> Value {
    let members = |role: Role| json!({"role": role.name(), "model": MODEL});
    json!({"envoy_clusters": {
        "cluster": "envoy_admin",
        "members": {"prefill": members(Role::Prefill), "decode": members(Role::Decode)},
        "interval_ms": interval_ms(),
        "timeout_ms": 1000,
    }})
}

/// [`INTERVAL`] in milliseconds, as the configuration takes it.
pub fn interval_ms() -> u128 {
    INTERVAL.as_millis()
}
