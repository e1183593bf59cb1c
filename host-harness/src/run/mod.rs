//! Owns `pd-harness run`: one command that starts a gateway and, without the configuration of a real fleet, a simulated one.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use routing::config::{Config, ConfigError};

use crate::engine::EngineError;
use crate::files::{self, FileError};
use crate::host::HostError;
use crate::host::steps::Counting;
use crate::logging;

mod bootstrap;
mod envoy;
pub mod fleet;
mod forwarder;
pub mod gateway;
mod proxy_options;
mod report;
pub mod stop;
pub mod supervised;

pub use bootstrap::{Callers, Settings};
pub use envoy::EnvoyLog;
use fleet::{Members, ProxyOptionsError, Simulation, SimulationSize};
use gateway::{Files, Gateway, GatewayConfig};
use proxy_options::ProxyOptions;

/// Arguments of `pd-harness run`.
#[derive(clap::Args)]
pub struct Args {
    /// Host that runs the filter.
    #[arg(long, value_enum, default_value_t = Proxy::Wasmtime)]
    proxy: Proxy,
    /// The plugin's configuration, for a fleet that runs already; its workers become the proxy's clusters.
    #[arg(long, value_name = "FILE", conflicts_with = "simulate")]
    config: Option<PathBuf>,
    #[command(flatten)]
    proxy_options: ProxyOptions,
    /// Simulated engines to start: prefill x decode.
    #[arg(long, value_name = "PxD", default_value_t = SimulationSize::default())]
    simulate: SimulationSize,
    /// Address for clients; port 0 takes a free one.
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Address of readiness and metrics; port 0 takes a free one.
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:9901")]
    admin: SocketAddr,
    /// Worker threads of the proxy, each with its own VM.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    concurrency: u16,
    #[command(flatten)]
    files: Files,
    /// Bytes of the largest request body; beyond it 413.
    #[arg(long, value_name = "BYTES", default_value_t = 32 * 1024 * 1024)]
    buffer_limit: usize,
    /// Count the instructions of the plugin per event: `/steps` of the admin listener has them by callback, since the start or
    /// the last `POST /steps/reset`. Not with Envoy.
    #[arg(long)]
    count_steps: bool,
    /// Factor that divides the simulated engines' computing times.
    #[arg(long, value_name = "F", default_value_t = 1.0)]
    speedup: f64,
    /// When ready, print one line of JSON.
    #[arg(long)]
    json: bool,
    /// End when standard input closes.
    #[arg(long)]
    until_stdin_closes: bool,
}

/// Host that runs the filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Proxy {
    /// This program's own host.
    Wasmtime,
    /// Real Envoy.
    Envoy,
}

impl Args {
    fn gateway(&self) -> GatewayConfig {
        GatewayConfig {
            proxy: self.proxy,
            listen: self.listen,
            admin: self.admin,
            concurrency: self.concurrency,
            buffer_limit: self.buffer_limit,
            counting: match self.count_steps {
                true => Counting::On,
                false => Counting::Off,
            },
            files: self.files.clone(),
            log: EnvoyLog::Everything,
        }
    }
}

impl Proxy {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wasmtime => "wasmtime",
            Self::Envoy => "envoy",
        }
    }
}

/// Why the gateway could not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A file of the gateway is missing.
    #[error("{what} is not at {}: `{remedy}` puts it there", path.display())]
    Missing {
        /// Description of the file.
        what: &'static str,
        /// Expected path.
        path: PathBuf,
        /// The command that creates it.
        remedy: &'static str,
    },
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
    /// The plugin's configuration is wrong.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Path in the configuration, and the error.
        source: ConfigError,
    },
    /// A simulated engine could not start.
    #[error("a simulated engine: {0}")]
    Engine(#[from] EngineError),
    /// The command line's routes or clusters are invalid.
    #[error(transparent)]
    ProxyOptions(#[from] ProxyOptionsError),
    /// The wasmtime host could not start.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Envoy could not start, or ended.
    #[error(transparent)]
    Envoy(#[from] envoy::EnvoyError),
    /// The machine refused a basic resource.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Starts the gateway and serves until stopped.
///
/// # Errors
/// When a part of the gateway cannot be started, or Envoy ends by itself.
pub fn run(args: Args) -> Result<(), RunError> {
    // Output of the plugin and the host goes to standard error; RUST_LOG asks for more.
    logging::begin("warn");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(serve(args));
    // A thread may still block in a read of standard input.
    runtime.shutdown_background();
    outcome
}

async fn serve(args: Args) -> Result<(), RunError> {
    let stop = stop::requested(args.until_stdin_closes)?;
    args.files.check_plugin()?;
    let (document, simulation) = match &args.config {
        Some(path) => (files::read(path)?, None),
        None => {
            let simulation = Simulation::start(args.simulate, args.speedup).await?;
            (simulation.plugin_config(), Some(simulation))
        }
    };
    let config = Config::parse(&document).map_err(|source| RunError::Config {
        path: args
            .config
            .clone()
            .unwrap_or_else(|| "the simulated fleet".into()),
        source,
    })?;
    let mut members = Members::of(&config);
    members.add_proxy_options(&args.proxy_options, &config)?;
    let mut gateway = Gateway::start(&args.gateway(), document, &members).await?;

    let report = report::Report::new(args.proxy, gateway.addresses(), &members);
    let text = if args.json {
        report.for_machines()
    } else {
        report.for_people()
    };
    // The gateway serves even if standard output has no reader.
    let _ = std::io::stdout().write_all(text.as_bytes());

    let outcome = tokio::select! {
        () = stop => Ok(()),
        error = gateway.ended() => Err(error),
    };
    gateway.stop().await;
    if let Some(simulation) = simulation {
        simulation.stop().await;
    }
    outcome
}

fn must_exist(what: &'static str, path: &Path, remedy: &'static str) -> Result<(), RunError> {
    if path.exists() {
        return Ok(());
    }
    Err(RunError::Missing {
        what,
        path: path.to_owned(),
        remedy,
    })
}
