//! Owns a cluster's file of endpoints, which the proxy reads again whenever another file replaces it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::paths;
use crate::process::unique_name;

/// Health of a host in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Healthy.
    Healthy,
    /// Unhealthy.
    Unhealthy,
    /// Gets no new requests.
    Draining,
}

/// The file of one cluster.
pub struct Endpoints {
    cluster: String,
    path: PathBuf,
}

impl Endpoints {
    /// A file for this cluster, without hosts.
    pub fn of(cluster: &str) -> Endpoints {
        let folder = paths::scratch().join(unique_name("endpoints"));
        std::fs::create_dir_all(&folder)
            .unwrap_or_else(|error| panic!("cannot make {}: {error}", folder.display()));
        let endpoints = Endpoints {
            cluster: cluster.to_owned(),
            path: folder.join("endpoints.json"),
        };
        endpoints.publish(&[]);
        endpoints
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the hosts; all are healthy.
    pub fn list(&self, addresses: &[SocketAddr]) {
        let hosts: Vec<_> = addresses
            .iter()
            .map(|address| (*address, Health::Healthy))
            .collect();
        self.publish(&hosts);
    }

    /// Replaces the hosts.
    pub fn publish(&self, hosts: &[(SocketAddr, Health)]) {
        let endpoints: Vec<_> = hosts
            .iter()
            .map(|(address, health)| {
                let place = json!({"address": address.ip(), "port_value": address.port()});
                json!({
                    "endpoint": {"address": {"socket_address": place}},
                    "health_status": match health {
                        Health::Healthy => "HEALTHY",
                        Health::Unhealthy => "UNHEALTHY",
                        Health::Draining => "DRAINING",
                    },
                })
            })
            .collect();
        let assignment = json!({
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": self.cluster,
            "endpoints": [{"lb_endpoints": endpoints}],
        });
        let next = self.path.with_extension("next");
        let text = json!({"resources": [assignment]}).to_string();
        std::fs::write(&next, text)
            // Envoy watches for files that are moved here.
            .and_then(|()| std::fs::rename(&next, &self.path))
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", self.path.display()));
    }
}
