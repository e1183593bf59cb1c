//! Owns the warnings about a bootstrap that Envoy accepts but that breaks or weakens the filter.

use routing::config::Config;

use super::bootstrap::FilterOccurrence;
use super::node::Node;

mod clusters;
mod filter;
mod routes;
mod wanted;

use wanted::WantedClusters;

/// The header that names a request's destination.
const DESTINATION: &str = "x-gateway-destination-endpoint";

/// A warning.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Warning {
    /// Its kind.
    pub code: Code,
    /// Path in the bootstrap.
    pub place: String,
    /// The fault and its consequence.
    pub wrong: String,
    /// The correction.
    pub right: String,
}

/// The kinds of warnings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// Without `allow_on_headers_stop_iteration` the filter never gets a request's body.
    NoStopIteration,
    /// The filter is not reloaded after a crash.
    NoReload,
    /// After a crash requests bypass the filter and reach workers that cannot serve them.
    FailOpen,
    /// Large prompts get 413.
    SmallBuffer,
    /// The route's timeout cuts answers off.
    RouteTimeout,
    /// Envoy retries by itself.
    RetryPolicy,
    /// A header set by the filter is removed before its use.
    HeaderRemoval,
    /// No route leads to the workers.
    NoRoute,
    /// The configuration names a cluster that does not exist.
    MissingCluster,
    /// The cluster does not use the filter's destination.
    LoadBalancing,
    /// If the filter's choice is no member, the cluster chooses another host.
    WideFallback,
    /// Envoy refuses requests by itself.
    CircuitBreaker,
    /// Some workers are not members of the cluster.
    NotAMember,
    /// The admin interface is open to all.
    ExposedAdmin,
}

/// All warnings about a bootstrap, for one occurrence of the filter with this configuration.
pub fn warnings(root: &Node<'_>, gateway: &FilterOccurrence<'_>, config: &Config) -> Vec<Warning> {
    let wanted = WantedClusters::of(config);
    let mut warnings = filter::check(&gateway.plugin, config);
    warnings.extend(routes::check(gateway, &wanted));
    warnings.extend(clusters::check(root, &wanted));
    warnings.extend(admin(root));
    warnings
}

fn admin(root: &Node<'_>) -> Option<Warning> {
    let address = root.at("admin.address.socket_address.address");
    let is_any = matches!(address.text(), Some("0.0.0.0" | "::"));
    is_any.then(|| {
        warning(
            Code::ExposedAdmin,
            &address,
            "whoever reaches this machine can end Envoy, and read its configuration with all secrets in it",
            "127.0.0.1, or a pipe and allow_paths as in envoy/bootstrap-clusters.yaml",
        )
    })
}

fn warning(
    code: Code,
    place: &Node<'_>,
    wrong: impl Into<String>,
    right: impl Into<String>,
) -> Warning {
    Warning {
        code,
        place: place.path().to_owned(),
        wrong: wrong.into(),
        right: right.into(),
    }
}
