//! Owns the proxy that runs the filter, Envoy or the wasmtime host.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::bootstrap::Settings;
use super::envoy::{Envoy, EnvoyConfig, EnvoyLog};
use super::fleet::Members;
use super::{Proxy, RunError, must_exist};
use crate::host::steps::Counting;
use crate::host::{Host, HostConfig};

/// Files of a gateway.
#[derive(Clone, Debug, clap::Args)]
pub struct Files {
    /// The filter.
    #[arg(long, value_name = "FILE", default_value = "target/pd_router.wasm")]
    plugin: PathBuf,
    /// Envoy's binary.
    #[arg(long, value_name = "FILE", default_value = "target/envoy/envoy")]
    envoy: PathBuf,
    /// Envoy's bootstrap template: addresses, clusters and the plugin's configuration are written into it.
    #[arg(long, value_name = "FILE", default_value = "envoy/bootstrap.yaml")]
    bootstrap: PathBuf,
}

impl Files {
    /// Path of the filter.
    pub fn plugin(&self) -> &Path {
        &self.plugin
    }

    /// Path of Envoy.
    pub fn envoy(&self) -> &Path {
        &self.envoy
    }

    /// Checks that the filter was built.
    ///
    /// # Errors
    /// [`RunError::Missing`], with the command that builds it.
    pub fn check_plugin(&self) -> Result<(), RunError> {
        must_exist("the plugin", &self.plugin, "make plugin")
    }
}

/// Configuration of a gateway.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// The host that runs the filter.
    pub proxy: Proxy,
    /// Address for clients; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Address of readiness and metrics; port 0 takes a free one.
    pub admin: SocketAddr,
    /// Worker threads, each with its own VM.
    pub concurrency: u16,
    /// Bytes of the largest request body.
    pub buffer_limit: usize,
    /// Whether the plugin's steps are counted, in this program's own host.
    pub counting: Counting,
    /// Files of the gateway.
    pub files: Files,
    /// The part of Envoy's log that is passed on.
    pub log: EnvoyLog,
}

/// Configuration of an Envoy with an amended bootstrap.
#[derive(Clone, Copy, Debug)]
pub struct AmendedConfig {
    /// Worker threads.
    pub concurrency: u16,
    /// The part of its log that is passed on.
    pub log: EnvoyLog,
    /// The change.
    pub amend: fn(&mut Value),
}

/// Addresses of a running proxy.
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
    /// When the proxy does not become ready.
    pub async fn start(
        config: &GatewayConfig,
        plugin_config: Vec<u8>,
        members: &Members,
    ) -> Result<Self, RunError> {
        match config.proxy {
            Proxy::Wasmtime => Self::start_host(config, plugin_config, members).await,
            Proxy::Envoy => Self::start_envoy(config, &plugin_config, members).await,
        }
    }

    async fn start_host(
        config: &GatewayConfig,
        plugin_config: Vec<u8>,
        members: &Members,
    ) -> Result<Self, RunError> {
        let host = Host::start(HostConfig {
            listen: config.listen,
            admin: config.admin,
            concurrency: config.concurrency.into(),
            plugin: config.files.plugin.clone(),
            plugin_config,
            clusters: members.clusters.clone(),
            routes: members.routes.clone(),
            buffer_limit: config.buffer_limit,
            counting: config.counting,
        })
        .await?;
        Ok(Self::Wasmtime(host))
    }

    async fn start_envoy(
        config: &GatewayConfig,
        plugin_config: &[u8],
        members: &Members,
    ) -> Result<Self, RunError> {
        let settings = Settings {
            listen: config.listen,
            admin: config.admin,
            plugin: &std::path::absolute(&config.files.plugin)?,
            plugin_config: &String::from_utf8_lossy(plugin_config),
            clusters: &members.clusters,
            routes: &members.routes,
            buffer_limit: config.buffer_limit,
            callers: members.callers,
        };
        let amended = AmendedConfig {
            concurrency: config.concurrency,
            log: config.log,
            amend: |_| {},
        };
        Self::start_amended(&config.files, settings, amended).await
    }

    /// Starts Envoy with its bootstrap amended beyond the usual settings, and waits until it serves.
    ///
    /// # Errors
    /// When Envoy does not become ready.
    pub async fn start_amended(
        files: &Files,
        settings: Settings<'_>,
        amended: AmendedConfig,
    ) -> Result<Self, RunError> {
        must_exist("Envoy", &files.envoy, "scripts/envoy.sh")?;
        let template = crate::files::read(&files.bootstrap)?;
        let envoy = Envoy::start(EnvoyConfig {
            binary: &files.envoy,
            template: &String::from_utf8_lossy(&template),
            concurrency: amended.concurrency,
            log: amended.log,
            settings,
            amend: amended.amend,
        })
        .await?;
        Ok(Self::Envoy(Box::new(envoy)))
    }

    /// The process that, with its children, uses the proxy's resources; `None` for this process itself.
    pub fn process(&self) -> Option<u32> {
        match self {
            Self::Wasmtime(_) => None,
            Self::Envoy(envoy) => envoy.process(),
        }
    }

    /// The addresses actually bound.
    pub fn addresses(&self) -> Addresses {
        match self {
            Self::Wasmtime(host) => Addresses {
                listen: host.listen,
                admin: host.admin,
            },
            Self::Envoy(envoy) => envoy.addresses,
        }
    }

    /// Waits for an unexpected end of the proxy; the host in this process never ends.
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
