//! Owns the warnings about the routes that lead to the workers.

use std::collections::BTreeSet;

use routing::handoff::llmd::PREFILLER;
use routing::request::overrides::{self, SUBSET};

use super::wanted::WantedClusters;
use super::{Code, DESTINATION, Warning, warning};
use crate::check::bootstrap::FilterOccurrence;
use crate::check::node::Node;

/// Bytes of a request that a listener buffers by default.
const DEFAULT_BUFFER: u64 = 1024 * 1024;
/// Bytes of a body that is to be expected: a prompt of 128k tokens is half a megabyte, and a picture in it several.
const LEAST_BUFFER: u64 = 8 * 1024 * 1024;
/// The headers by which the filter limits Envoy's retries.
const RETRIES: [&str; 2] = ["x-envoy-max-retries", "x-envoy-retry-on"];

/// Checks all routes of a connection manager that lead to a cluster of requests.
pub fn check(gateway: &FilterOccurrence<'_>, wanted: &WantedClusters<'_>) -> Vec<Warning> {
    let table = gateway.manager.field("route_config");
    if !table.is_there() {
        // The routes come from a control plane (RDS), and are not visible.
        return Vec::new();
    }
    let clusters = wanted.requests();
    let mut found = Vec::new();
    let mut reached = BTreeSet::new();
    for host in table.field("virtual_hosts").items() {
        let led: Vec<_> = host
            .field("routes")
            .items()
            .into_iter()
            .map(|route| (led_to(&route, &clusters), route))
            .filter(|(led, _)| !led.is_empty())
            .collect();
        if led.is_empty() {
            continue;
        }
        found.extend(retries(&host));
        found.extend(removal(&host));
        for (clusters, route) in led {
            reached.extend(clusters);
            found.extend(check_route(gateway, &host, &route));
        }
    }
    if !reached.is_empty() {
        found.extend(removal(&table));
    }
    let missed = clusters
        .iter()
        .filter(|cluster| !reached.contains(*cluster));
    found.extend(missed.map(|cluster| {
        warning(
            Code::NoRoute,
            &table.field("virtual_hosts"),
            format!(
                "no route leads to the cluster `{cluster}`, to which the filter sends requests"
            ),
            format!("a route with route: {{ cluster: {cluster}, timeout: 0s }}"),
        )
    }));
    found
}

fn check_route(gateway: &FilterOccurrence<'_>, host: &Node<'_>, route: &Node<'_>) -> Vec<Warning> {
    let action = route.field("route");
    let weighted = action.at("weighted_clusters.clusters").items();
    let mut found = Vec::new();
    found.extend(buffer(gateway, host, route));
    found.extend(timeout(&action));
    found.extend(retries(&action));
    found.extend(removal(route));
    found.extend(weighted.iter().filter_map(removal));
    found
}

/// The clusters among these to which a route leads. A route to a cluster named by a header may lead to any.
fn led_to<'c>(route: &Node<'_>, clusters: &BTreeSet<&'c str>) -> Vec<&'c str> {
    let action = route.field("route");
    if action.field("cluster_header").is_there() {
        return clusters.iter().copied().collect();
    }
    let weighted = action.at("weighted_clusters.clusters").items();
    let named: Vec<_> = weighted
        .iter()
        .map(|cluster| cluster.field("name"))
        .chain([action.field("cluster")])
        .filter_map(|name| name.text())
        .collect();
    let is_named = |cluster: &&&str| named.contains(*cluster);
    clusters.iter().filter(is_named).copied().collect()
}

/// The buffer limit of a request: from the route, else its virtual host, else the listener.
fn buffer(gateway: &FilterOccurrence<'_>, host: &Node<'_>, route: &Node<'_>) -> Option<Warning> {
    let names = [
        "request_body_buffer_limit",
        "per_request_buffer_limit_bytes",
    ];
    let mut places = names.map(|name| route.field(name)).to_vec();
    places.extend(names.map(|name| host.field(name)));
    places.push(gateway.listener.field("per_connection_buffer_limit_bytes"));
    let configured = places.into_iter().find(Node::is_there);
    let (place, limit, whose) = match &configured {
        Some(place) => (place.clone(), place.number()?, "this limit"),
        None => (
            route.field("request_body_buffer_limit"),
            DEFAULT_BUFFER,
            "the listener's default",
        ),
    };
    (limit < LEAST_BUFFER).then(|| {
        warning(
            Code::SmallBuffer,
            &place,
            format!("{whose} is {limit} bytes: a request with a larger body gets 413"),
            "request_body_buffer_limit on the route, as 33554432 (32 MiB)",
        )
    })
}

fn timeout(action: &Node<'_>) -> Option<Warning> {
    let timeout = action.field("timeout");
    let seconds = timeout.text().and_then(|text| {
        let number = text.strip_suffix('s')?;
        number.parse::<f64>().ok()
    });
    (seconds != Some(0.0)).then(|| {
        let is = timeout.text().unwrap_or("Envoy's default, 15s");
        warning(
            Code::RouteTimeout,
            &timeout,
            format!("{is}: an answer that takes longer is cut off"),
            "0s: the filter has limits of its own (prefill.timeout_ms, decode.first_token_timeout_ms, decode.silence_timeout_ms)",
        )
    })
}

fn retries(place: &Node<'_>) -> Option<Warning> {
    let policies = ["retry_policy", "retry_policy_typed_config"].map(|name| place.field(name));
    let policy = policies.iter().find(|policy| policy.is_there())?;
    Some(warning(
        Code::RetryPolicy,
        policy,
        "Envoy sends requests again whose hand-off serves once, and hides the worker's own answer",
        "no retry policy: the filter says for each request whether, and how often, it may be sent again",
    ))
}

fn removal(place: &Node<'_>) -> Option<Warning> {
    let names = place.field("request_headers_to_remove");
    let mut items = names.items().into_iter();
    let removed = items.find(|name| name.text().is_some_and(is_written_by_the_filter))?;
    let name = removed.text().unwrap_or_default();
    Some(warning(
        Code::HeaderRemoval,
        &removed,
        format!("{name} is written by the filter, and taken out here before it is used"),
        "leave it to early_header_mutation_extensions, which take the client's own out before the filter, and to the cluster's upstream http_filters: see envoy/bootstrap.yaml",
    ))
}

fn is_written_by_the_filter(name: &str) -> bool {
    let steers = overrides::header_names().filter(|name| *name != SUBSET);
    steers
        .chain([DESTINATION, PREFILLER])
        .chain(RETRIES)
        .any(|written| written.eq_ignore_ascii_case(name))
}
