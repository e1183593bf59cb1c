//! Owns `pd-harness replay`: pd-router's routing code in virtual time, on a recorded trace, compared with models of other
//! routers.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

mod contender;
mod engine;
mod figures;
mod gateways;
mod output;
mod own_router;
mod peers;
mod report;
mod router_model;
mod row;
mod seeds;
mod trace;

use contender::PolicyChoice;
use engine::{Model, Parameters};
pub use figures::Spread;
use own_router::OwnRouterError;
use router_model::WorkerCounts;
use row::ReplayRow;
use seeds::Seeds;
pub use trace::{Request, Trace, TraceError};

use crate::cli::progress_bar;
use crate::files::{self, FileError};

/// Meaning of the figures, for `--help`.
const EXPLAINED: &str = "\
Trace: one JSON object a line: {\"timestamp\": milliseconds, \"input_length\": tokens, \"output_length\": tokens, \"hash_ids\": \
[one number for each block of the prompt, the last one may be partial; equal numbers are equal blocks]}, and \"session\" \
where conversations are known. Only full blocks are ever cached.

Engines: a prompt's cached prefix is what its worker holds when the router sends it there, and its blocks enter then; a full \
cache gives up the least recently used block that no other one builds on. At least 64 tokens of a prompt are computed. \
fcfs: a worker computes one prompt after the other at --prefill-rate; an answer gets a token every --token-ms and delays \
nobody. batched: a worker works in steps of 12 ms and more; up to 8192 prompt tokens of several requests share one, at \
--prefill-rate; each answer in a step adds 0.1 ms, and each 1000 tokens of KV that it reads 0.05 ms; answers for \
whose KV there is no room wait.

The router sees what it would see in a proxy: its own choices, the first token of each answer, and how answers grow.

Gateways: each request goes to one of --gateways by chance, whichever conversation it is of, as a load balancer before them \
deals connections. Each has its own load table and remembers its own choices; they share nothing. Every --metrics-interval-ms each of \
pd-router's hears of all engines how many requests wait and run there and what part of their KV cache these hold, one gateway after \
the other at equal steps; the models of other routers do not listen. The threads of one Envoy share load and choices, and count as \
one gateway.

PolicyFigures: ttft_ms is the end of prefill minus arrival; wait_ms the beginning of prefill minus arrival; itl_ms the time from one \
token of an answer to the next; prefix_hit_rate the part of all prompt tokens that was found in a cache; imbalance the tokens \
computed by the busiest prefill worker over the mean of all; decisions_per_second the requests over the time that the \
router's calls took on the wall's clock, all calls for a request together.";

/// Arguments of `pd-harness replay`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXPLAINED)]
pub struct Args {
    /// Trace file: one JSON object per line.
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Policy for both roles, or `all` to compare pd-router's policies with models of other routers.
    ///
    /// pd-router's own: kv, round_robin, random, power_of_two, least_loaded, prefix_hash, session. Models: sglang_threshold
    /// (SGLang's router with its defaults), least_requests.
    #[arg(long, value_name = "NAME|all", default_value = "all")]
    policy: PolicyChoice,
    /// Prefill workers.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    prefill: u16,
    /// Decode workers.
    #[arg(long, value_name = "M", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    decode: u16,
    /// KV blocks of each worker's cache.
    #[arg(long, value_name = "BLOCKS", default_value_t = 4000, value_parser = clap::value_parser!(u32).range(1..))]
    kv_blocks: u32,
    /// Tokens per KV block of the workers; divides the trace's blocks or is a multiple of them.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    block_tokens: u32,
    /// Tokens per block of the trace; default: --block-tokens if that fits all its lines, else 512.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    trace_block_tokens: Option<u32>,
    /// Prompt tokens that a worker computes per second.
    #[arg(long, value_name = "TOK_S", default_value_t = 8000.0, value_parser = above_zero)]
    prefill_rate: f64,
    /// Milliseconds per token of an answer; for `--model fcfs`.
    #[arg(long, value_name = "MS", default_value_t = 20.0, value_parser = above_zero)]
    token_ms: f64,
    /// Model of an engine's work.
    #[arg(long, value_enum, default_value_t = Model::Fcfs)]
    model: Model,
    /// Gateways in front of the workers, each with its own load table; several numbers, `1,2,4`, are compared.
    #[arg(long, value_name = "G,…", default_value = "1", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1000))]
    gateways: Vec<u16>,
    /// Milliseconds between two reports of the engines' metrics to each gateway; 0: never.
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    metrics_interval_ms: u32,
    /// Seed of random choices; of several, `1-10`, figures are the mean.
    #[arg(long, value_name = "S|A-B", default_value_t)]
    seed: Seeds,
    /// File for the report, a page of HTML with plots; default: target/replay.html, or none with --json.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print the figures in one line of JSON.
    #[arg(long)]
    json: bool,
}

fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("a number above zero is needed".to_owned()),
    }
}

/// Why a trace could not be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace cannot be used.
    #[error("{}: {source}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: TraceError,
    },
    /// The routing code refuses the parameters.
    #[error(transparent)]
    OwnRouter(#[from] OwnRouterError),
    /// The report cannot be drawn.
    #[error("the report: {0}")]
    Draw(#[from] crate::plot::DrawError),
    /// The report cannot be written.
    #[error(transparent)]
    Write(#[from] FileError),
}

/// All runs and their results.
#[derive(Debug)]
pub struct Comparison<'a> {
    trace_name: String,
    trace: &'a Trace,
    parameters: &'a Parameters,
    seeds: &'a Seeds,
    gateways: &'a [u16],
    rows: Vec<ReplayRow>,
}

impl Comparison<'_> {
    /// Description of the runs in a sentence.
    fn in_words(&self) -> String {
        let Parameters {
            workers,
            kv_blocks,
            block_tokens,
            prefill_rate,
            ..
        } = self.parameters;
        format!(
            "{}: {} requests in {}, on {} prefill and {} decode workers with {kv_blocks} blocks of {block_tokens} tokens each, \
             {prefill_rate} prompt tokens/s, engine model {}, {}, {} {}",
            self.trace_name,
            self.trace.requests.len(),
            minutes(self.trace.lasts()),
            workers.prefill,
            workers.decode,
            self.parameters.model.name(),
            self.gateways_in_words(),
            if self.seeds.count() == 1 {
                "seed"
            } else {
                "mean over seeds"
            },
            self.seeds,
        )
    }

    /// Number of gateways and their metrics interval, in words.
    fn gateways_in_words(&self) -> String {
        let counts: Vec<String> = self.gateways.iter().map(u16::to_string).collect();
        let gateways = match self.gateways {
            [1] => "1 gateway".to_owned(),
            _ => format!("{} gateways", counts.join(", ")),
        };
        match self.parameters.metrics_interval {
            None => format!("{gateways} without the engines' figures"),
            Some(interval) => format!(
                "{gateways} with the engines' figures every {} ms",
                interval.as_millis()
            ),
        }
    }
}

fn minutes(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds => format!("{:.0} min", seconds as f64 / 60.0),
    }
}

/// Replays the trace, prints the figures, and writes the report.
///
/// # Errors
/// When the trace cannot be used, or the report cannot be written.
pub fn run(args: Args) -> Result<(), ReplayError> {
    let trace = read(&args)?;
    let parameters = args.parameters();
    let comparison = Comparison {
        trace_name: name_of(&args.trace),
        trace: &trace,
        parameters: &parameters,
        seeds: &args.seed,
        gateways: &args.gateways,
        rows: rows(&args, &trace, &parameters)?,
    };
    let text = match args.json {
        true => output::for_machines(&comparison, &args.policy),
        false => output::for_people(&comparison),
    };
    // The reader of standard output may have gone.
    let _ = std::io::stdout().write_all(text.as_bytes());
    let Some(path) = args.report_path() else {
        return Ok(());
    };
    files::write(&path, &report::page(&comparison)?)?;
    if !args.json {
        let _ = writeln!(std::io::stdout(), "\nPlots are in {}", path.display());
    }
    Ok(())
}

impl Args {
    fn parameters(&self) -> Parameters {
        Parameters {
            model: self.model,
            workers: WorkerCounts {
                prefill: self.prefill.into(),
                decode: self.decode.into(),
            },
            kv_blocks: self.kv_blocks,
            block_tokens: self.block_tokens,
            prefill_rate: self.prefill_rate,
            token_ms: self.token_ms,
            metrics_interval: (self.metrics_interval_ms > 0)
                .then(|| Duration::from_millis(self.metrics_interval_ms.into())),
        }
    }

    fn report_path(&self) -> Option<PathBuf> {
        let default = (!self.json).then(|| PathBuf::from("target/replay.html"));
        self.report.clone().or(default)
    }
}

fn read(args: &Args) -> Result<Trace, ReplayError> {
    let failed = |source| ReplayError::Trace {
        path: args.trace.clone(),
        source,
    };
    let file = File::open(&args.trace).map_err(|error| failed(error.into()))?;
    Trace::read(
        BufReader::new(file),
        args.block_tokens,
        args.trace_block_tokens,
    )
    .map_err(failed)
}

/// Runs all contenders, with a progress bar that only a terminal shows.
fn rows(
    args: &Args,
    trace: &Trace,
    parameters: &Parameters,
) -> Result<Vec<ReplayRow>, OwnRouterError> {
    let contenders = args.policy.contenders();
    let both = contenders
        .iter()
        .flat_map(|contender| args.gateways.iter().map(|gateways| (*contender, *gateways)));
    let runs = args
        .seed
        .count()
        .saturating_mul(both.clone().count() as u64);
    let bar = progress_bar(runs.saturating_mul(trace.requests.len() as u64), 16);
    let rows = both.map(|(contender, gateways)| {
        bar.set_message(contender.name());
        let mut arrived = || bar.inc(1);
        ReplayRow::run(
            contender,
            gateways,
            trace,
            parameters,
            &args.seed,
            &mut arrived,
        )
    });
    let rows = rows.collect();
    bar.finish_and_clear();
    rows
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
