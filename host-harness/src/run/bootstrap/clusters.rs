//! Owns Envoy's cluster configuration: clusters of the shipped bootstrap, with this run's sources of hosts.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};

use super::{BootstrapError, Settings, list};
use crate::host::DESTINATION;
use crate::host::clusters::{ClusterKind, NAME_INTERVAL};
use crate::host::names::Name;

/// Writes one cluster for each in the settings: the template's of that name, else one like its first. So breakers, protocol
/// options and removed headers are the same for all, whatever the source of their hosts.
pub fn set(
    bootstrap: &mut Value,
    settings: &Settings,
    admin_pipe: Option<&Path>,
) -> Result<(), BootstrapError> {
    let clusters = list(bootstrap, "/static_resources/clusters", "clusters")?;
    let patterns = std::mem::take(clusters);
    let first = patterns.first().ok_or(BootstrapError::Lacks("clusters"))?;
    for (name, kind) in settings.clusters {
        let named = patterns
            .iter()
            .find(|pattern| pattern["name"] == name.as_str());
        let pattern = named.unwrap_or(first).clone();
        clusters.push(cluster(pattern, name, kind, admin_pipe)?);
    }
    let watches = |kind: &ClusterKind| matches!(kind, ClusterKind::Eds(_));
    if settings.clusters.values().any(watches) && bootstrap["node"].is_null() {
        // Envoy accepts endpoints from a file only with a node id and cluster.
        bootstrap["node"] = json!({"id": "pd-router", "cluster": "pd-router"});
    }
    Ok(())
}

fn cluster(
    mut pattern: Value,
    name: &str,
    kind: &ClusterKind,
    admin_pipe: Option<&Path>,
) -> Result<Value, BootstrapError> {
    if *kind == ClusterKind::Admin {
        let pipe = admin_pipe.ok_or(BootstrapError::Lacks("unix socket for the admin page"))?;
        return Ok(admin(name, pipe));
    }
    let cluster = pattern
        .as_object_mut()
        .ok_or(BootstrapError::Lacks("clusters"))?;
    for hosts in [
        "type",
        "cluster_type",
        "load_assignment",
        "eds_cluster_config",
    ] {
        cluster.remove(hosts);
    }
    cluster.insert("name".to_owned(), json!(name));
    let more = match kind {
        ClusterKind::Static(hosts) => json!({
            "type": "STATIC",
            "load_assignment": load_assignment(name, hosts),
        }),
        ClusterKind::Eds(path) => json!({
            "type": "EDS",
            "eds_cluster_config": {"eds_config": {
                "path_config_source": {"path": path},
                "resource_api_version": "V3",
            }},
        }),
        ClusterKind::Dns(wanted) => resolved(name, wanted),
        ClusterKind::OriginalDst | ClusterKind::Admin => {
            cluster.remove("load_balancing_policy");
            json!({
                "type": "ORIGINAL_DST",
                "lb_policy": "CLUSTER_PROVIDED",
                "original_dst_lb_config": {
                    "use_http_header": true,
                    "http_header_name": String::from_utf8_lossy(DESTINATION),
                },
            })
        }
    };
    cluster.extend(more.as_object().cloned().unwrap_or_default());
    Ok(pattern)
}

/// All addresses of a name, each a host: equivalent to `STRICT_DNS` before Envoy deprecated its options.
fn resolved(name: &str, wanted: &Name) -> Value {
    let mut dns = json!({
        "@type": "type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster",
        "dns_refresh_rate": format!("{}s", NAME_INTERVAL.as_secs_f64()),
        "dns_failure_refresh_rate": {"base_interval": format!("{}s", NAME_INTERVAL.as_secs_f64())},
        "dns_lookup_family": "V4_PREFERRED",
    });
    if let Some(server) = wanted.server {
        dns["typed_dns_resolver_config"] = json!({
            "name": "envoy.network.dns_resolver.cares",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
                "resolvers": [address(server)],
                "dns_resolver_options": {"no_default_search_domain": true},
            },
        });
    }
    let named = json!({"socket_address": {"address": wanted.host, "port_value": wanted.port}});
    json!({
        "cluster_type": {"name": "envoy.clusters.dns", "typed_config": dns},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": named}}]}],
        },
    })
}

/// The proxy's own admin page: one host, which a request need not name.
fn admin(name: &str, pipe: &Path) -> Value {
    let endpoint = json!({"endpoint": {"address": {"pipe": {"path": pipe}}}});
    json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    })
}

/// Envoy's `load_assignment` of a static cluster.
pub fn load_assignment(name: &str, hosts: &[SocketAddr]) -> Value {
    let endpoints: Vec<_> = hosts
        .iter()
        .map(|host| json!({"endpoint": {"address": address(*host)}}))
        .collect();
    json!({"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]})
}

/// An address in Envoy's format.
pub fn address(address: SocketAddr) -> Value {
    json!({"socket_address": {"address": address.ip(), "port_value": address.port()}})
}
