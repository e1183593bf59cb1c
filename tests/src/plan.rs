//! How a gateway is to be started, where the configuration alone does not say: threads, routes, clusters.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::Value;

use crate::Proxy;
use crate::gateway::Gateway;
use crate::process::StartFailure;

/// A gateway that is not started yet. Two worker threads, and the routes and clusters that follow from its configuration,
/// where nothing else is said.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    proxy: Proxy,
    config: &'a Value,
    threads: u16,
    arguments: Vec<String>,
}

impl<'a> Plan<'a> {
    /// A gateway with this configuration.
    pub fn new(proxy: Proxy, config: &'a Value) -> Plan<'a> {
        Plan {
            proxy,
            config,
            threads: 2,
            arguments: Vec::new(),
        }
    }

    /// So many worker threads.
    pub fn threads(mut self, threads: u16) -> Plan<'a> {
        self.threads = threads;
        self
    }

    /// Requests to this authority take a route that names this pool; an empty one: a route that names none.
    pub fn route(self, authority: &str, pool: &str) -> Plan<'a> {
        self.with("--route", format!("{authority}={pool}"))
    }

    /// The cluster has its hosts from a file: see [`crate::endpoints::Endpoints`].
    pub fn eds(self, cluster: &str, file: &Path) -> Plan<'a> {
        self.with("--cluster", format!("{cluster}=eds:{}", file.display()))
    }

    /// The cluster's hosts are the addresses of a name.
    pub fn dns(self, cluster: &str, host: &str, port: u16) -> Plan<'a> {
        self.with("--cluster", format!("{cluster}=dns:{host}:{port}"))
    }

    /// Names are asked of this server: see [`crate::names::Names`].
    pub fn dns_server(self, server: SocketAddr) -> Plan<'a> {
        self.with("--dns-server", server.to_string())
    }

    /// The cluster takes any one address.
    pub fn original_dst(self, cluster: &str) -> Plan<'a> {
        self.with("--cluster", format!("{cluster}=original_dst"))
    }

    /// A further member of a cluster.
    pub fn member(self, cluster: &str, address: SocketAddr) -> Plan<'a> {
        self.with("--member", format!("{cluster}={address}"))
    }

    /// By this cluster the filter asks the proxy itself.
    pub fn admin_cluster(self, cluster: &str) -> Plan<'a> {
        self.with("--admin-cluster", cluster.to_owned())
    }

    /// Starts it. Fails where it does not become ready.
    pub async fn start(self) -> Gateway {
        self.try_start()
            .await
            .unwrap_or_else(|failure| failure.fail("the gateway"))
    }

    /// Starts it.
    ///
    /// # Errors
    /// How it ended, and what it said.
    pub async fn try_start(self) -> Result<Gateway, StartFailure> {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        Gateway::start_with(self.proxy, self.threads, self.config, &arguments).await
    }

    fn with(mut self, option: &str, value: String) -> Plan<'a> {
        self.arguments.extend([option.to_owned(), value]);
        self
    }
}
