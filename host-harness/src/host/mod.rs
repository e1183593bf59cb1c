//! Owns a proxy-wasm host on wasmtime and hyper, with Envoy's behaviour where it matters to a filter.
//!
//! One VM per worker thread and one on a main thread that serves no request; an acceptor hands connections to the workers in
//! turn. The plugin is called through the proxy-wasm ABI 0.2.1 only.

mod abi;
mod admin;
mod body;
mod call;
pub mod clusters;
mod eds;
mod maps;
mod metrics;
pub mod names;
pub mod routes;
mod shared;
mod state;
pub mod steps;
mod stream;
mod ticker;
mod upstream;
mod vm;
mod worker;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};

use self::clusters::{ClusterKind, Clusters};
pub use self::upstream::DESTINATION;

use self::metrics::Metrics;
use self::routes::Routes;
use self::shared::Shared;
use self::state::Process;
use self::steps::{Counting, Steps};
use self::vm::{CompiledPlugin, StartError};
use self::worker::{Acceptor, Thread};

/// Time limit for a thread to end. Only a plugin that never returns takes longer.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// Configuration of a host.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Address for clients; port 0 picks a free one.
    pub listen: SocketAddr,
    /// Address of `/ready` and `/stats/prometheus`; port 0 picks a free one.
    pub admin: SocketAddr,
    /// Worker threads, each with its own VM; at least one is started.
    pub concurrency: usize,
    /// The plugin's WebAssembly module.
    pub plugin: PathBuf,
    /// The plugin's configuration document.
    pub plugin_config: Vec<u8>,
    /// Clusters by name, with the source of each one's hosts.
    pub clusters: BTreeMap<String, ClusterKind>,
    /// Routes of the requests.
    pub routes: Routes,
    /// Bytes of a body that may be buffered; a request body of this size gets 413.
    pub buffer_limit: usize,
    /// Whether the plugin's steps are counted.
    pub counting: Counting,
}

/// Why a host did not start.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The plugin's file cannot be read.
    #[error("cannot read the plugin {path}: {cause}")]
    ReadPlugin {
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {cause}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The plugin did not start or refused its configuration.
    #[error(transparent)]
    Plugin(#[from] StartError),
    /// A thread could not be started, or ended at once.
    #[error("a thread of the host could not be started")]
    Thread,
}

/// A running host. Dropping it ends its threads as well, without waiting for them.
pub struct Host {
    /// Address for clients.
    pub listen: SocketAddr,
    /// The address of the admin listener.
    pub admin: SocketAddr,
    shutdown: watch::Sender<bool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Host {
    /// Compiles the plugin, starts every VM, then listens. The main thread's VM comes first: a configuration that the plugin
    /// refuses stops the host before any client can connect.
    pub async fn start(config: HostConfig) -> Result<Host, HostError> {
        let wasm = std::fs::read(&config.plugin).map_err(|cause| HostError::ReadPlugin {
            path: config.plugin.clone(),
            cause,
        })?;
        let (listener, listen) = bind(config.listen).await?;
        let (admin_listener, admin) = bind(config.admin).await?;
        let process = Arc::new(Process {
            shared: Shared::default(),
            metrics: Metrics::default(),
            clusters: Clusters::new(config.clusters, admin),
            routes: config.routes,
            plugin_config: config.plugin_config,
            buffer_limit: config.buffer_limit,
            connections: AtomicU64::new(0),
            steps: Steps::new(config.counting),
        });
        process.clusters.refresh().await;
        let compiling = Arc::clone(&process);
        let compiled =
            tokio::task::spawn_blocking(move || CompiledPlugin::compile(&wasm, compiling));
        let compiled = Arc::new(compiled.await.map_err(|_| HostError::Thread)??);

        let (shutdown, stopping) = watch::channel(false);
        let mut host = Host {
            listen,
            admin,
            shutdown,
            threads: Vec::new(),
        };
        host.begin(Thread::main(&compiled, &stopping)).await?;
        let mut workers = Vec::new();
        for number in 0..config.concurrency.max(1) {
            let (worker, connections) = Thread::worker(number, &compiled, &stopping);
            workers.push(connections);
            host.begin(worker).await?;
        }
        let acceptor = Acceptor {
            listener,
            admin: admin_listener,
            workers,
            process,
            stopping,
        };
        let accepting = acceptor.spawn().map_err(|_| HostError::Thread)?;
        host.threads.push(accepting);
        Ok(host)
    }

    /// Ends all threads and waits for them. Streams in flight are cut.
    pub async fn stop(mut self) {
        // An error means that no thread is left to receive it.
        let _ = self.shutdown.send(true);
        let deadline = Instant::now() + STOP_LIMIT;
        for thread in std::mem::take(&mut self.threads) {
            while !thread.is_finished() && Instant::now() < deadline {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            if !thread.is_finished() {
                let name = thread.thread().name().unwrap_or_default();
                tracing::error!(name, "a thread is stuck in the plugin and is left behind");
            } else if thread.join().is_err() {
                tracing::error!("a thread of the host panicked");
            }
        }
    }

    async fn begin(&mut self, thread: Thread) -> Result<(), HostError> {
        let (report, started) = oneshot::channel();
        let running = thread.spawn(report).map_err(|_| HostError::Thread)?;
        self.threads.push(running);
        started.await.map_err(|_| HostError::Thread)??;
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.shutdown.send(true);
    }
}

async fn bind(address: SocketAddr) -> Result<(std::net::TcpListener, SocketAddr), HostError> {
    let failed = |cause| HostError::Listen { address, cause };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener.into_std().map_err(failed)?, bound))
}
