//! Owns the start options of a gateway beyond its configuration: threads, routes, clusters.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::Value;

use crate::Proxy;
use crate::gateway::Gateway;
use crate::process::StartFailure;

/// A gateway that is not started yet. Defaults: two worker threads, and the routes and clusters that follow from its
/// configuration.
#[derive(Clone, Debug)]
pub struct GatewayBuilder<'a> {
    proxy: Proxy,
    config: &'a Value,
    threads: u16,
    arguments: Vec<String>,
}

impl<'a> GatewayBuilder<'a> {
    /// A gateway with this configuration.
    pub fn new(proxy: Proxy, config: &'a Value) -> GatewayBuilder<'a> {
        GatewayBuilder {
            proxy,
            config,
            threads: 2,
            arguments: Vec::new(),
        }
    }

    /// Sets the number of worker threads.
    pub fn threads(mut self, threads: u16) -> GatewayBuilder<'a> {
        self.threads = threads;
        self
    }

    /// Routes requests to this authority with this pool's name, or, if `pool` is empty, with none.
    pub fn route(self, authority: &str, pool: &str) -> GatewayBuilder<'a> {
        self.with("--route", format!("{authority}={pool}"))
    }

    /// Takes the cluster's hosts from a file: see [`crate::endpoints::Endpoints`].
    pub fn eds(self, cluster: &str, file: &Path) -> GatewayBuilder<'a> {
        self.with("--cluster", format!("{cluster}=eds:{}", file.display()))
    }

    /// Takes the cluster's hosts from the addresses of a name.
    pub fn dns(self, cluster: &str, host: &str, port: u16) -> GatewayBuilder<'a> {
        self.with("--cluster", format!("{cluster}=dns:{host}:{port}"))
    }

    /// Resolves names with this server: see [`crate::dns_server::DnsServer`].
    pub fn dns_server(self, server: SocketAddr) -> GatewayBuilder<'a> {
        self.with("--dns-server", server.to_string())
    }

    /// Lets the cluster forward to any address.
    pub fn original_dst(self, cluster: &str) -> GatewayBuilder<'a> {
        self.with("--cluster", format!("{cluster}=original_dst"))
    }

    /// Adds a member to a cluster.
    pub fn member(self, cluster: &str, address: SocketAddr) -> GatewayBuilder<'a> {
        self.with("--member", format!("{cluster}={address}"))
    }

    /// Adds the cluster through which the filter calls the proxy's own admin page.
    pub fn admin_cluster(self, cluster: &str) -> GatewayBuilder<'a> {
        self.with("--admin-cluster", cluster.to_owned())
    }

    /// Starts the gateway. Fails if it does not become ready.
    pub async fn start(self) -> Gateway {
        self.try_start()
            .await
            .unwrap_or_else(|failure| failure.fail("the gateway"))
    }

    /// Starts the gateway.
    ///
    /// # Errors
    /// With the exit status and the log.
    pub async fn try_start(self) -> Result<Gateway, StartFailure> {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        Gateway::start_with(self.proxy, self.threads, self.config, &arguments).await
    }

    fn with(mut self, option: &str, value: String) -> GatewayBuilder<'a> {
        self.arguments.extend([option.to_owned(), value]);
        self
    }
}
