//! Owns the warnings about the clusters that a configuration names.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use super::wanted::{ClusterRequirements, Picking, WantedClusters};
use super::{Code, DESTINATION, Warning, warning};
use crate::check::node::Node;

/// Envoy's circuit breakers, each with its default.
const BREAKERS: [(&str, u64); 4] = [
    ("max_connections", 1024),
    ("max_pending_requests", 1024),
    ("max_requests", 1024),
    ("max_retries", 3),
];

/// Checks every needed cluster.
pub fn check(root: &Node<'_>, wanted: &WantedClusters<'_>) -> Vec<Warning> {
    let list = root.at("static_resources.clusters");
    let clusters = list.items();
    let mut found = Vec::new();
    for (name, used) in &wanted.clusters {
        let named = clusters
            .iter()
            .find(|cluster| cluster.field("name").text() == Some(*name));
        match named {
            Some(cluster) => found.extend(check_cluster(cluster, used)),
            None => found.extend(missing(root, &list, name, used)),
        }
    }
    found
}

/// A control plane may add clusters later.
fn missing(
    root: &Node<'_>,
    list: &Node<'_>,
    name: &str,
    used: &ClusterRequirements,
) -> Option<Warning> {
    let may_come = root.at("dynamic_resources.cds_config").is_there();
    (!may_come).then(|| {
        warning(
            Code::MissingCluster,
            list,
            format!("there is no cluster `{name}`: {}", used.purposes.join(", ")),
            format!("a cluster named {name}, or its right name in the plugin's configuration"),
        )
    })
}

fn check_cluster(cluster: &Node<'_>, used: &ClusterRequirements) -> Vec<Warning> {
    let mut found = Vec::new();
    match used.picking {
        Picking::OnlyHost => {}
        Picking::AnyAddress => found.extend(original_dst(cluster)),
        Picking::Member => found.extend(override_host(cluster, used)),
    }
    if used.is_loaded {
        found.extend(breakers(cluster));
    }
    found.extend(members(cluster, used));
    found
}

fn original_dst(cluster: &Node<'_>) -> Option<Warning> {
    let settings = cluster.field("original_dst_lb_config");
    let named = settings.field("http_header_name").text();
    let is_right = cluster.field("type").text() == Some("ORIGINAL_DST")
        && settings.field("use_http_header").is_true()
        && named.is_none_or(|name| name.eq_ignore_ascii_case(DESTINATION))
        && named.is_some();
    (!is_right).then(|| {
        warning(
            Code::LoadBalancing,
            cluster,
            "it does not go where the filter says, for the pool's destinations are original_dst",
            format!("type: ORIGINAL_DST, lb_policy: CLUSTER_PROVIDED, original_dst_lb_config: {{ use_http_header: true, http_header_name: {DESTINATION} }}"),
        )
    })
}

fn override_host(cluster: &Node<'_>, used: &ClusterRequirements) -> Option<Warning> {
    let place = cluster.field("load_balancing_policy");
    let first = place.field("policies").items().into_iter().next();
    let policy = first.map(|policy| policy.at("typed_extension_config.typed_config"));
    let reads_header = |source: &Node<'_>| {
        let header = source.field("header").text();
        header.is_some_and(|header| header.eq_ignore_ascii_case(DESTINATION))
    };
    let policy = policy.filter(|policy| {
        let mut sources = policy.field("override_host_sources").items().into_iter();
        policy.is_a("OverrideHost") && sources.any(|source| reads_header(&source))
    });
    let Some(policy) = policy else {
        return Some(warning(
            Code::LoadBalancing,
            &place,
            "it picks a host by itself, whichever the filter has picked",
            format!(
                "envoy.load_balancing_policies.override_host with override_host_sources: [{{ header: {DESTINATION} }}], as in envoy/bootstrap.yaml"
            ),
        ));
    };
    match used.is_strict {
        true => fallback(&policy.field("fallback_policy")),
        false => None,
    }
}

/// Warns of a fallback policy that picks another host when a strict pool's worker is no member.
fn fallback(policy: &Node<'_>) -> Option<Warning> {
    let first = policy.field("policies").items().into_iter().next();
    let finds_nobody = first.is_some_and(|first| {
        let subset = first.at("typed_extension_config.typed_config");
        let fallback = subset.field("fallback_policy").text();
        subset.is_a("Subset") && fallback.is_none_or(|name| name == "NO_FALLBACK")
    });
    (!finds_nobody).then(|| {
        warning(
            Code::WideFallback,
            policy,
            "a request whose worker is no member goes to another one, which has not its KV cache",
            "envoy.load_balancing_policies.subset with NO_FALLBACK, as in envoy/bootstrap.yaml: then it gets 503",
        )
    })
}

fn breakers(cluster: &Node<'_>) -> Option<Warning> {
    let place = cluster.at("circuit_breakers.thresholds");
    let thresholds = place.items();
    let usual = thresholds.iter().find(|threshold| {
        let priority = threshold.field("priority").text();
        priority.is_none_or(|priority| priority == "DEFAULT")
    });
    let limit = |name: &str| usual.and_then(|usual| usual.field(name).number());
    let has_budget = usual.is_some_and(|usual| usual.field("retry_budget").is_there());
    let low: Vec<_> = BREAKERS
        .iter()
        .filter(|(name, _)| *name != "max_retries" || !has_budget)
        .map(|(name, default)| (name, limit(name).unwrap_or(*default), default))
        .filter(|(_, limit, default)| limit <= default)
        .map(|(name, limit, _)| format!("{name} {limit}"))
        .collect();
    (!low.is_empty()).then(|| {
        warning(
            Code::CircuitBreaker,
            usual.unwrap_or(&place),
            format!("{}: beyond that Envoy refuses requests with 503 by itself, above all when a worker has just died", low.join(", ")),
            "thresholds of 100000 each, for the filter counts load itself (admission)",
        )
    })
}

fn members(cluster: &Node<'_>, used: &ClusterRequirements) -> Option<Warning> {
    let known = hosts(cluster)?;
    let strangers: Vec<_> = used
        .members
        .iter()
        .filter(|member| !known.contains(member))
        .map(ToString::to_string)
        .collect();
    (!strangers.is_empty()).then(|| {
        warning(
            Code::NotAMember,
            &cluster.field("load_assignment"),
            format!(
                "the configuration sends requests to {}, which the cluster does not have",
                strangers.join(", ")
            ),
            "an endpoint for each, by the same ip:port",
        )
    })
}

/// The hosts of a cluster, if all are written as addresses.
fn hosts(cluster: &Node<'_>) -> Option<BTreeSet<SocketAddr>> {
    let is_listed = matches!(
        cluster.field("type").text(),
        None | Some("STATIC" | "STRICT_DNS")
    );
    if !is_listed || cluster.field("cluster_type").is_there() {
        return None;
    }
    let localities = cluster.at("load_assignment.endpoints").items();
    let endpoints = localities
        .iter()
        .flat_map(|locality| locality.field("lb_endpoints").items());
    endpoints.map(|endpoint| host(&endpoint)).collect()
}

fn host(endpoint: &Node<'_>) -> Option<SocketAddr> {
    let address = endpoint.at("endpoint.address.socket_address");
    let ip: IpAddr = address.field("address").text()?.parse().ok()?;
    let port = address.field("port_value").number()?;
    Some(SocketAddr::new(ip, u16::try_from(port).ok()?))
}
