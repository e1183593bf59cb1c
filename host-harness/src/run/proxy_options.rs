//! Owns the command line's options for the proxy's routes and clusters.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use super::fleet::ClusterMember;
use crate::host::clusters::ClusterKind;
use crate::host::names::Name;

/// Routes and clusters beyond those that follow from the plugin's configuration.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ProxyOptions {
    /// Requests to this authority, with any port, take a route that names this pool; all others take the first pool's. An empty
    /// POOL: a route without a pool name, to the first pool's cluster.
    #[arg(long = "route", value_name = "AUTHORITY=POOL", requires = "config")]
    pub routes: Vec<PoolRoute>,
    /// Source of a cluster's hosts: `eds:FILE` (a DiscoveryResponse with a ClusterLoadAssignment, read again when another file
    /// takes its place), `dns:HOST:PORT` (resolved every 500 ms), `original_dst` (any one address that a request names). Without
    /// it: the workers that the configuration lists, and --member.
    #[arg(long = "cluster", value_name = "NAME=SOURCE", requires = "config")]
    pub clusters: Vec<NamedCluster>,
    /// Further member of one of the proxy's clusters, for workers that are discovered only later.
    #[arg(long = "member", value_name = "CLUSTER=IP:PORT", requires = "config")]
    pub members: Vec<ClusterMember>,
    /// Cluster through which the filter calls the proxy itself for /clusters. Envoy's admin page is on a unix socket then, with
    /// only these pages: /clusters, /ready, /stats, and /listeners for this program, which forwards --admin to it.
    #[arg(long, value_name = "NAME", requires = "config")]
    pub admin_cluster: Option<String>,
    /// DNS server for `dns:` clusters, over UDP; else the system's resolver.
    #[arg(long, value_name = "IP:PORT")]
    pub dns_server: Option<SocketAddr>,
}

/// A separate route for an authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRoute {
    /// The authority, without a port.
    pub authority: String,
    /// The pool that the route names; empty: none.
    pub pool: String,
}

impl FromStr for PoolRoute {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            Some((authority, pool)) if !authority.is_empty() => Ok(Self {
                authority: authority.to_owned(),
                pool: pool.to_owned(),
            }),
            _ => Err("an authority and a pool with = between them, as b.test=second"),
        }
    }
}

/// A cluster with another source than a static list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedCluster {
    /// Name of the cluster.
    pub name: String,
    source: Source,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    Eds(PathBuf),
    Dns { host: String, port: u16 },
    OriginalDst,
}

impl NamedCluster {
    /// The cluster's kind for the proxy; names are resolved by `server`, if given.
    ///
    /// # Errors
    /// When the working directory is unknown, and a file's path depends on it.
    pub fn kind(&self, server: Option<SocketAddr>) -> std::io::Result<ClusterKind> {
        Ok(match &self.source {
            Source::Eds(path) => ClusterKind::Eds(std::path::absolute(path)?),
            Source::Dns { host, port } => ClusterKind::Dns(Name {
                host: host.clone(),
                port: *port,
                server,
            }),
            Source::OriginalDst => ClusterKind::OriginalDst,
        })
    }
}

impl FromStr for NamedCluster {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (name, source) = text.split_once('=')?;
            Some(Self {
                name: name.to_owned(),
                source: Source::parse(source)?,
            })
        };
        parse().ok_or(
            "a cluster and its source with = between them, as decode=eds:FILE, decode=dns:HOST:PORT or decode=original_dst",
        )
    }
}

impl Source {
    fn parse(text: &str) -> Option<Self> {
        if text == "original_dst" {
            return Some(Self::OriginalDst);
        }
        match text.split_once(':')? {
            ("eds", path) if !path.is_empty() => Some(Self::Eds(path.into())),
            ("dns", name) => {
                let (host, port) = name.rsplit_once(':')?;
                Some(Self::Dns {
                    host: host.to_owned(),
                    port: port.parse().ok()?,
                })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_and_clusters_are_read() {
        let route: PoolRoute = "b.test=two".parse().unwrap();
        assert_eq!(
            (route.authority.as_str(), route.pool.as_str()),
            ("b.test", "two")
        );
        let kind = |text: &str| text.parse::<NamedCluster>().unwrap().kind(None).unwrap();
        assert_eq!(kind("d=eds:/a/b"), ClusterKind::Eds("/a/b".into()));
        assert_eq!(kind("d=original_dst"), ClusterKind::OriginalDst);
        let name = Name {
            host: "w.test".to_owned(),
            port: 80,
            server: None,
        };
        assert_eq!(kind("d=dns:w.test:80"), ClusterKind::Dns(name));
        for wrong in ["d", "d=eds:", "d=dns:x", "d=other", "=b"] {
            assert!(wrong.parse::<NamedCluster>().is_err(), "{wrong}");
        }
        assert!("=b".parse::<PoolRoute>().is_err());
    }
}
