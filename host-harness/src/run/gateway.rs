//! Owns the proxy that carries the filter, whichever it is.

use std::net::SocketAddr;

use super::bootstrap::Settings;
use super::envoy::{Envoy, EnvoyConfig};
use super::fleet::Members;
use super::{Args, Proxy, RunError, must_exist};
use crate::host::{Host, HostConfig};

/// Where a running proxy is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// For clients.
    pub listen: SocketAddr,
    /// For readiness and metrics.
    pub admin: SocketAddr,
}

/// A running proxy with the filter in it.
pub enum Gateway {
    /// This program's own host.
    Wasmtime(Host),
    /// A child process.
    Envoy(Box<Envoy>),
}

impl Gateway {
    /// Starts the proxy and waits until it serves.
    ///
    /// # Errors
    /// When it does not come to that.
    pub async fn start(
        args: &Args,
        plugin_config: Vec<u8>,
        members: &Members,
    ) -> Result<Self, RunError> {
        match args.proxy {
            Proxy::Wasmtime => Self::start_host(args, plugin_config, members).await,
            Proxy::Envoy => Self::start_envoy(args, &plugin_config, members).await,
        }
    }

    async fn start_host(
        args: &Args,
        plugin_config: Vec<u8>,
        members: &Members,
    ) -> Result<Self, RunError> {
        let host = Host::start(HostConfig {
            listen: args.listen,
            admin: args.admin,
            concurrency: args.concurrency.into(),
            plugin: args.plugin.clone(),
            plugin_config,
            clusters: members.clusters.clone(),
            route_cluster: members.route_cluster.clone(),
            buffer_limit: args.buffer_limit,
        })
        .await?;
        Ok(Self::Wasmtime(host))
    }

    async fn start_envoy(
        args: &Args,
        plugin_config: &[u8],
        members: &Members,
    ) -> Result<Self, RunError> {
        must_exist("Envoy", &args.envoy, "scripts/envoy.sh")?;
        let template = super::read(&args.bootstrap)?;
        let envoy = Envoy::start(EnvoyConfig {
            binary: &args.envoy,
            template: &String::from_utf8_lossy(&template),
            concurrency: args.concurrency,
            settings: Settings {
                listen: args.listen,
                admin: args.admin,
                plugin: &std::path::absolute(&args.plugin)?,
                plugin_config: &String::from_utf8_lossy(plugin_config),
                clusters: &members.clusters,
                route_cluster: &members.route_cluster,
                buffer_limit: args.buffer_limit,
                callers: members.callers,
            },
        })
        .await?;
        Ok(Self::Envoy(Box::new(envoy)))
    }

    /// The addresses really bound.
    pub fn addresses(&self) -> Addresses {
        match self {
            Self::Wasmtime(host) => Addresses {
                listen: host.listen,
                admin: host.admin,
            },
            Self::Envoy(envoy) => envoy.addresses,
        }
    }

    /// Waits for the proxy to end by itself, which it should not; the host of this process never does.
    pub async fn ended(&mut self) -> RunError {
        match self {
            Self::Wasmtime(_) => std::future::pending().await,
            Self::Envoy(envoy) => envoy.ended().await.into(),
        }
    }

    /// Ends the proxy.
    pub async fn stop(self) {
        match self {
            Self::Wasmtime(host) => host.stop().await,
            Self::Envoy(envoy) => envoy.stop().await,
        }
    }
}
