//! Owns one running contender: its processes and its address.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use pd_harness_common::loopback::ANYWHERE;
use pd_harness_common::usage::{self, Usage};
use serde::Deserialize;
use serde_json::Value;
use tempfile::NamedTempFile;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::contender::{Contender, OwnSetup};
use super::fleet::Engines;
use super::peers::{EngineAddresses, Peer};
use super::plain::{self, FilterReplacement};
use super::router::{Router, RouterError};
use crate::host::clusters::ClusterKind;
use crate::host::steps::Counting;
use crate::run::fleet::Members;
use crate::run::gateway::{Files, Gateway, GatewayConfig};
use crate::run::{EnvoyLog, Proxy, RunError};
use routing::config::{Config, ConfigError};

/// Programs and files of the contenders.
#[derive(Clone, Debug, clap::Args)]
pub struct ContenderFiles {
    #[command(flatten)]
    pub files: Files,
    /// The benchmark's filters, which do less than pd-router.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/pd_router_bench_filters.wasm"
    )]
    pub lesser: PathBuf,
    /// Folder of the other routers' virtual environments.
    #[arg(long, value_name = "FOLDER", default_value = "target/peers")]
    pub peers: PathBuf,
}

/// A running contender.
pub struct RunningContender {
    /// Address for clients.
    pub address: SocketAddr,
    processes: Vec<Process>,
}

/// One of a contender's processes.
enum Process {
    /// Envoy.
    Envoy(Gateway),
    /// The wasmtime host.
    Host(Child),
    /// Another router.
    Router(Router),
}

/// Why a contender does not run.
#[derive(Debug, thiserror::Error)]
pub enum ContenderError {
    /// Failure of Envoy or the host.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Failure of another router.
    #[error(transparent)]
    Peer(#[from] RouterError),
    /// The plugin's configuration is wrong.
    #[error("the plugin's configuration: {0}")]
    Config(#[from] ConfigError),
    /// Files or processes could not be created.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The host ended before it was ready.
    #[error("the wasmtime host did not get ready")]
    NotReady,
}

/// Bytes of the largest body, as in the shipped bootstrap.
pub const BUFFER_LIMIT: usize = 32 << 20;

/// The host takes a second or two to compile the filter; much longer on a loaded machine.
const START_LIMIT: Duration = Duration::from_secs(60);
/// The host ends at once when asked.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// The line with which `pd-harness run --json` announces that it serves.
#[derive(Deserialize)]
struct ReadyLine {
    listen: SocketAddr,
}

impl RunningContender {
    /// Starts a contender in front of the engines, with this many worker threads if it is a proxy, and waits until it serves.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn start(
        contender: Contender,
        engines: &Engines,
        threads: u16,
        parts: &ContenderFiles,
    ) -> Result<Self, ContenderError> {
        match contender {
            Contender::Envoy => {
                let hosts = engines.vllm.addresses().decode;
                let envoy = plain::start(FilterReplacement::Nothing, hosts, threads, parts).await?;
                Ok(Self::envoy(envoy))
            }
            Contender::Lesser(lesser) => {
                let replacement = FilterReplacement::Filter(lesser);
                let envoy = plain::start(replacement, engines.aggregated(), threads, parts).await?;
                Ok(Self::envoy(envoy))
            }
            Contender::Ours(ours) => {
                Self::routed(ours.configuration(engines), threads, parts).await
            }
            Contender::Wasmtime => {
                Self::wasmtime(OwnSetup::Nixl.configuration(engines), threads, parts).await
            }
            Contender::Peer(peer) => Self::router(peer, &engines.of(peer.dialect()), parts).await,
            Contender::Behind(peer) => {
                let mut running = Self::router(peer, &engines.of(peer.dialect()), parts).await?;
                let hosts = vec![running.address];
                let envoy = plain::start(FilterReplacement::Nothing, hosts, threads, parts).await?;
                running.address = envoy.addresses().listen;
                running.processes.push(Process::Envoy(envoy));
                Ok(running)
            }
        }
    }

    fn of(process: Process, address: SocketAddr) -> Self {
        Self {
            address,
            processes: vec![process],
        }
    }

    fn envoy(envoy: Gateway) -> Self {
        let address = envoy.addresses().listen;
        Self::of(Process::Envoy(envoy), address)
    }

    /// Envoy with pd-router and this configuration.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn routed(
        config: Value,
        threads: u16,
        parts: &ContenderFiles,
    ) -> Result<Self, ContenderError> {
        let document = config.to_string().into_bytes();
        let members = Members::of(&Config::parse(&document)?);
        let gateway = GatewayConfig {
            proxy: Proxy::Envoy,
            listen: ANYWHERE,
            admin: ANYWHERE,
            concurrency: threads,
            buffer_limit: BUFFER_LIMIT,
            counting: Counting::Off,
            files: parts.files.clone(),
            log: EnvoyLog::Errors,
        };
        let envoy = Gateway::start(&gateway, document, &members).await?;
        Ok(Self::envoy(envoy))
    }

    /// Another router, alone.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn router(
        peer: Peer,
        fleet: &EngineAddresses,
        parts: &ContenderFiles,
    ) -> Result<Self, ContenderError> {
        let router = Router::start(peer, &parts.peers, fleet).await?;
        let address = router.address;
        Ok(Self::of(Process::Router(router), address))
    }

    /// The wasmtime host in a separate process, so that its cost is distinct from this one's.
    async fn wasmtime(
        config: Value,
        threads: u16,
        parts: &ContenderFiles,
    ) -> Result<Self, ContenderError> {
        // The host reads the file once, at its start.
        let configuration = NamedTempFile::new()?;
        std::fs::write(configuration.path(), config.to_string())?;
        let mut host = Command::new(std::env::current_exe()?)
            .args(["run", "--json", "--until-stdin-closes"])
            .args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
            .args(["--concurrency", &threads.to_string()])
            .args([OsStr::new("--config"), configuration.path().as_os_str()])
            .args([OsStr::new("--plugin"), parts.files.plugin().as_os_str()])
            .env("RUST_LOG", "error")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let out = host.stdout.take().ok_or(ContenderError::NotReady)?;
        let mut lines = BufReader::new(out).lines();
        let line = timeout(START_LIMIT, lines.next_line()).await;
        let line = line.map_err(|_| ContenderError::NotReady)??;
        let ready: ReadyLine = line
            .and_then(|line| serde_json::from_str(&line).ok())
            .ok_or(ContenderError::NotReady)?;
        Ok(Self::of(Process::Host(host), ready.listen))
    }

    /// Resources used so far by its processes.
    pub fn usage(&self) -> Usage {
        let roots = self.processes.iter().filter_map(Process::id);
        usage::of(&roots.collect::<Vec<u32>>())
    }

    /// Ends its processes.
    pub async fn stop(self) {
        // The processes in front first.
        for process in self.processes.into_iter().rev() {
            process.stop().await;
        }
    }
}

impl Process {
    fn id(&self) -> Option<u32> {
        match self {
            Self::Envoy(envoy) => envoy.process(),
            Self::Host(host) => host.id(),
            Self::Router(router) => router.process(),
        }
    }

    async fn stop(self) {
        match self {
            Self::Envoy(envoy) => envoy.stop().await,
            Self::Router(router) => router.stop().await,
            Self::Host(mut host) => {
                drop(host.stdin.take());
                // Dropping the child kills it.
                let _ = timeout(STOP_LIMIT, host.wait()).await;
            }
        }
    }
}

/// The clusters of a proxy that balances between these hosts by itself.
pub fn balanced(hosts: Vec<SocketAddr>) -> BTreeMap<String, ClusterKind> {
    BTreeMap::from([("decode".to_owned(), ClusterKind::Static(hosts))])
}
