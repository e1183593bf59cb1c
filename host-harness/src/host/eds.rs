//! Owns the parser of a file of endpoints: Envoy's `DiscoveryResponse` with `ClusterLoadAssignment`s, as JSON or YAML.

use std::net::SocketAddr;

use serde::Deserialize;

use super::clusters::{HEALTHY, ListedHost};

/// Why a file is no valid file of endpoints.
#[derive(Debug, thiserror::Error)]
pub enum EdsError {
    /// Neither JSON nor YAML, or not of this shape.
    #[error("the file of endpoints is not one: {0}")]
    Shape(#[from] serde_yaml_ng::Error),
    /// No entry for the cluster.
    #[error("the file of endpoints does not speak of the cluster")]
    OtherClusters,
}

#[derive(Deserialize)]
struct Response {
    #[serde(default)]
    resources: Vec<Assignment>,
}

#[derive(Deserialize)]
struct Assignment {
    cluster_name: String,
    #[serde(default)]
    endpoints: Vec<Locality>,
}

#[derive(Deserialize)]
struct Locality {
    #[serde(default)]
    lb_endpoints: Vec<LbEndpoint>,
}

#[derive(Deserialize)]
struct LbEndpoint {
    endpoint: Endpoint,
    #[serde(default)]
    health_status: Health,
}

#[derive(Deserialize)]
struct Endpoint {
    address: Address,
}

#[derive(Deserialize)]
struct Address {
    socket_address: Socket,
}

#[derive(Deserialize)]
struct Socket {
    address: std::net::IpAddr,
    port_value: u16,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum Health {
    #[default]
    Unknown,
    Healthy,
    Unhealthy,
    Draining,
    Timeout,
    Degraded,
}

impl Health {
    /// The name in `/clusters`, as seen in Envoy 1.40.
    fn status(self) -> &'static str {
        match self {
            Self::Unknown | Self::Healthy => HEALTHY,
            Self::Unhealthy | Self::Timeout => "UNHEALTHY",
            Self::Draining => "DRAINING",
            Self::Degraded => "DEGRADED",
        }
    }
}

/// The hosts of this cluster.
///
/// # Errors
/// When the text is no such file, or has no entry for the cluster.
pub fn hosts(text: &[u8], cluster: &str) -> Result<Vec<ListedHost>, EdsError> {
    let response: Response = serde_yaml_ng::from_slice(text)?;
    let mut assignments = response.resources.into_iter();
    let assignment = assignments.find(|assignment| assignment.cluster_name == cluster);
    let localities = assignment.ok_or(EdsError::OtherClusters)?.endpoints;
    let endpoints = localities
        .into_iter()
        .flat_map(|locality| locality.lb_endpoints);
    let listed = endpoints.map(|endpoint| {
        let Socket {
            address,
            port_value,
        } = endpoint.endpoint.address.socket_address;
        ListedHost {
            health: endpoint.health_status.status(),
            ..ListedHost::healthy(SocketAddr::new(address, port_value))
        }
    });
    Ok(listed.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_yaml_are_read_and_health_is_told_as_envoy_tells_it() {
        let json = r#"{"version_info": "1", "resources": [
            {"@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment", "cluster_name": "other"},
            {"@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment", "cluster_name": "decode",
             "endpoints": [{"lb_endpoints": [
                {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 1}}}},
                {"endpoint": {"address": {"socket_address": {"address": "::1", "port_value": 2}}}, "health_status": "DRAINING"},
                {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 3}}}, "health_status": "TIMEOUT"}
            ]}]}]}"#;
        let hosts = hosts(json.as_bytes(), "decode").unwrap();
        let read: Vec<_> = hosts
            .iter()
            .map(|host| (host.address.to_string(), host.health))
            .collect();
        let expected = [
            ("127.0.0.1:1".to_owned(), "HEALTHY"),
            ("[::1]:2".to_owned(), "DRAINING"),
            ("127.0.0.1:3".to_owned(), "UNHEALTHY"),
        ];
        assert_eq!(read, expected);
        let yaml = "resources:\n- cluster_name: decode\n  endpoints:\n  - lb_endpoints:\n    - endpoint: \
                    {address: {socket_address: {address: 127.0.0.1, port_value: 9}}}\n";
        let hosts = super::hosts(yaml.as_bytes(), "decode").unwrap();
        assert_eq!(hosts[0].address.port(), 9);
    }

    #[test]
    fn what_is_no_such_file_is_refused() {
        for text in ["", "[", "{}", r#"{"resources": [{"cluster_name": "x"}]}"#] {
            assert!(hosts(text.as_bytes(), "decode").is_err(), "{text}");
        }
    }
}
