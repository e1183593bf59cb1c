//! Owns `pd-harness chaos`: engines that fail while clients send requests, and a verdict on the clients' outcomes.

use std::io::Write;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use indicatif::ProgressBar;
use pd_harness_common::loopback::ANYWHERE;

use crate::cli::progress_bar;
use crate::engine::Dialect;
use crate::host::steps::Counting;
use crate::logging;
use crate::run::gateway::{Files, GatewayConfig};
use crate::run::{EnvoyLog, Proxy, RunError};

mod asks;
mod catalogue;
mod churn;
mod client;
mod fleet;
mod health;
mod judge;
mod memory;
mod metrics;
mod output;
mod play;
mod pool;
mod reply;
mod scenario;

use catalogue::ScenarioChoice;
use churn::Source;
use output::ScenarioResult;
use play::{PlayError, PlaySettings, ticks};
use scenario::{PoolSettings, Scenario};

/// Meaning of the figures, for `--help`.
const EXPLAINED: &str = "\
Each scenario starts simulated engines, a gateway, and 48 clients, half of which ask for streams. They ask for --seconds, \
during which the script makes engines fail and mends them (every six seconds again, where there is time); then all end their requests, and things come to rest.

ScenarioFigures: sent is the sum of the next five. answered: whole answers, every token right, streams to their [DONE]. engine_status: an \
engine's own error, passed on as it was. reset: an answer that died after decode's headers, seen as an error by its client. refused: over \
their bodies, which were too long (413), too slow (408), or for which there was no room just then (503). failed: everything else. failed_with_healthy_pair: those of them that failed though from the request to its end there was always a prefill \
and a decode engine without a fault. ejected_after_ms: from the fault to the first ejection in the role at fault; null where nothing is to be \
ejected, or nothing was. kv_leaked: hand-offs that engines issued and nobody fetched, engines that were killed included; \
kv_leaked_counted: those that the filter knows to be lost; kv_unknown: those of which it does not know. bookings_left: charges that are still booked. \
wrongly_ejected: ejections in roles whose workers are all well, or no worse than full. poison: requests that no engine can serve, among those that failed in any way. left: requests whose clients left on \
purpose, not among sent. churn: joined, returned, drained, removed, died count workers; removed_worker_requests: requests that \
reached a worker later than one interval of its source and 500 ms after it was removed; draining_worker_requests: the same after it was said to drain.

Rules, whose breach is exit status 1: failed_with_healthy_pair is 0; no answer that lacks anything looks whole to its client, or \
ends with [DONE]; an engine's error is passed on unchanged; bookings_left and wrongly_ejected are 0; where the scenario \
says so, an engine's own error or a reset does not do either while a pair is well, or whoever is not answered is told when to come again (429 or 503 with Retry-After), \
or each client that sends its request at once and reads on is answered; at shipped limits Envoy holds no more at its peak than docs/memory.md allows; \
kv_leaked_counted is at most kv_leaked, and kv_unknown makes up for what it lacks, and for no more where no \
decode ends before its first byte; something is answered; in churn, removed_worker_requests is 0, and no stream and no request is left.";

/// Arguments of `pd-harness chaos`.
#[derive(Debug, clap::Args)]
#[command(after_help = catalogue::in_words(), after_long_help = format!("{}\n\n{EXPLAINED}", catalogue::in_words()))]
pub struct Args {
    /// Scenario: a name, or all of them.
    #[arg(long, value_name = "NAME|all", default_value = "all")]
    scenario: ScenarioChoice,
    /// Host that runs the filter.
    #[arg(long, value_enum, default_value_t = ProxyChoice::Wasmtime)]
    proxy: ProxyChoice,
    /// Engine dialect, and with it the hand-off protocol.
    #[arg(long, value_enum, default_value_t)]
    dialect: Dialect,
    /// Seconds for which clients send requests, in each scenario.
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// churn: source from which the gateway learns of its workers; without it, each source in turn.
    #[arg(long, value_enum, value_delimiter = ',')]
    source: Vec<Source>,
    /// churn: seed of the events; without it, random.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Scenarios played at once, each with its own fleet and gateway; timings suffer.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    at_once: u16,
    /// Worker threads of the proxy, each with its own VM.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    concurrency: u16,
    #[command(flatten)]
    files: Files,
    /// Print the figures in one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Hosts in which to play.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ProxyChoice {
    /// This program's own host.
    Wasmtime,
    /// Real Envoy.
    Envoy,
    /// Wasmtime, then Envoy.
    Both,
}

/// One play in one host.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// A scripted scenario.
    Scripted(&'static Scenario),
    /// Churn with this seed, announced by this source.
    Churn(Source, u64),
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Scripted(scenario) => scenario.name,
            Self::Churn(source, _) => source.scenario(),
        }
    }
}

/// Why chaos fails.
#[derive(Debug, thiserror::Error)]
pub enum ChaosError {
    /// A prerequisite is missing.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The system refused a runtime.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A scenario could not be played.
    #[error("{name} in {host}: {source}")]
    Play {
        /// Name of the scenario.
        name: &'static str,
        /// The host.
        host: &'static str,
        /// Cause.
        source: Box<PlayError>,
    },
    /// Rules are broken.
    #[error("{}", output::broken_rules(.0))]
    Broken(Vec<ScenarioResult>),
}

/// Plays the scenarios, prints the results, and judges.
///
/// # Errors
/// When a scenario cannot be played, or breaks a rule.
pub fn run(args: Args) -> Result<(), ChaosError> {
    // Output of the plugin and the host goes to standard error; RUST_LOG asks for more. Failing workers are expected here.
    logging::begin("error");
    args.files.check_plugin()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let rows = runtime.block_on(play_all(&args))?;
    let text = match args.json {
        true => output::for_machines(&rows),
        false => output::for_people(&rows),
    };
    // The reader of standard output may have gone.
    let _ = std::io::stdout().write_all(text.as_bytes());
    let broken: Vec<_> = rows
        .into_iter()
        .filter(ScenarioResult::breaks_a_rule)
        .collect();
    match broken.is_empty() {
        true => Ok(()),
        false => Err(ChaosError::Broken(broken)),
    }
}

impl ProxyChoice {
    fn proxies(self) -> &'static [Proxy] {
        match self {
            Self::Wasmtime => &[Proxy::Wasmtime],
            Self::Envoy => &[Proxy::Envoy],
            Self::Both => &[Proxy::Wasmtime, Proxy::Envoy],
        }
    }
}

impl Args {
    fn parts(&self) -> Vec<Part> {
        let ScenarioChoice::Churn = self.scenario else {
            let scenarios = self.scenario.scenarios().into_iter();
            return scenarios.map(Part::Scripted).collect();
        };
        let sources = match self.source.is_empty() {
            true => Source::ALL.to_vec(),
            false => self.source.clone(),
        };
        let seed = self.seed.unwrap_or_else(rand::random);
        eprintln!("churn: --seed {seed}");
        let parts = sources.into_iter().map(|source| Part::Churn(source, seed));
        parts.collect()
    }

    fn settings(&self, proxy: Proxy) -> PlaySettings {
        PlaySettings {
            dialect: self.dialect,
            lasts: Duration::from_secs(self.seconds),
            gateway: GatewayConfig {
                proxy,
                listen: ANYWHERE,
                admin: ANYWHERE,
                concurrency: self.concurrency,
                buffer_limit: pool::buffer_limit(PoolSettings::Plain),
                counting: Counting::Off,
                files: self.files.clone(),
                log: gateways_log(),
            },
        }
    }
}

/// Failing workers are expected here: quiet, unless `RUST_LOG=info` asks for more.
fn gateways_log() -> EnvoyLog {
    match tracing::enabled!(tracing::Level::INFO) {
        true => EnvoyLog::Everything,
        false => EnvoyLog::Errors,
    }
}

/// Plays them, with a progress bar that only a terminal shows.
async fn play_all(args: &Args) -> Result<Vec<ScenarioResult>, ChaosError> {
    let proxies = args.proxy.proxies().iter();
    let parts = args.parts();
    let plays: Vec<_> = proxies
        .flat_map(|proxy| parts.iter().map(|part| (*part, *proxy)))
        .collect();
    let ticks = plays.len() as u64 * ticks(Duration::from_secs(args.seconds));
    let bar = progress_bar(ticks, 38);
    let rows = stream::iter(plays)
        .map(|(part, proxy)| play_one(part, args.settings(proxy), &bar))
        .buffered(args.at_once.into())
        .try_collect()
        .await;
    bar.finish_and_clear();
    rows
}

async fn play_one(
    part: Part,
    settings: PlaySettings,
    bar: &ProgressBar,
) -> Result<ScenarioResult, ChaosError> {
    let (name, host) = (part.name(), settings.gateway.proxy.name());
    bar.set_message(format!("{name} ({host})"));
    let verdict = match part {
        Part::Scripted(scenario) => play::play(scenario, &settings, bar).await,
        Part::Churn(source, seed) => churn::play(source, &settings, seed, bar).await,
    };
    let verdict = verdict.map_err(|source| ChaosError::Play {
        name,
        host,
        source: Box::new(source),
    })?;
    Ok(ScenarioResult {
        name,
        host,
        verdict,
    })
}
