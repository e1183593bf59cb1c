//! Owns `pd-harness bench`: contenders side by side under the same loads, and the report.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use tokio::task::LocalSet;

mod bench_run;
mod contender;
mod fleet;
mod loads;
mod machine;
mod memory;
mod peers;
mod plain;
mod quality;
mod report;
mod results;
mod rounds;
mod router;
mod running_contender;
mod trace;

use bench_run::{BenchPlan, BenchRun};
use results::Results;
use rounds::Rounds;
use running_contender::ContenderFiles;

use crate::cli::{progress_bar, within};
use crate::engine::EngineError;
use crate::logging;
use crate::run::RunError;
use crate::run::stop;

/// Meaning of the figures, for `--help`.
const EXPLAINED: &str = "\
Engines, client and requests are the same for all contenders, which take turns under each load: A B C A B C …, in each round all \
loads. Figures are medians over the rounds, with the smallest and the largest. The engines answer at once (as pd-harness engine \
--instant does) and live in this process, as does the client; each contender has processes of its own.

Figures: rps is good answers a second; p50_ms, p90_ms, p99_ms the times to the end of an answer, ttft_p50_ms to its first piece; with \
an open loop they count from when a request was due. cpu_us_per_request is the user and system time of all processes of the \
contender, Envoy and what is behind it together, over the requests that ended; rss_mb is their resident memory at the end of a round. success_rate \
is the part of requests answered with 200 and a whole answer.

memory: each contender alone, 16 connections, prompts of 16 KB of which no two are alike. trace: a recorded conversation \
trace, in a part of its time, onto engines that keep prefixes and take their time to compute the rest; its times are the trace's own.

What cannot be measured, as a peer that is not installed, is named in the report's `absent`, and the rest goes on.";

/// Arguments of `pd-harness bench`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXPLAINED)]
pub struct Args {
    /// Measurements of each contender under each load [default: 5; 1 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 2.0, value_parser = |text: &str| within(text, 0.1..=3600.0, "seconds, from 0.1 to 3600"))]
    seconds: f64,
    /// One round of a few rows, fewer prompts for memory, and no trace.
    #[arg(long)]
    quick: bool,
    /// Only contenders whose name contains one of these words.
    #[arg(long, value_name = "WORD,…", value_delimiter = ',')]
    only: Vec<String>,
    /// Leave other routers out.
    #[arg(long)]
    no_peers: bool,
    /// Prompts sent for memory, and half as many again to pd-router; 0: not measured [default: 100000; 5000 with --quick].
    #[arg(long, value_name = "N")]
    memory_prompts: Option<u64>,
    /// The trace that is played to measure how well contenders route.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "../shared/traces/mooncake_conversation_trace.jsonl"
    )]
    trace: PathBuf,
    /// Requests sent from the start of the trace; 0: not played [default: 2000; 0 with --quick].
    #[arg(long, value_name = "N")]
    trace_requests: Option<usize>,
    /// Speed-up of the trace and of its engines.
    #[arg(long, value_name = "F", default_value_t = 10.0, value_parser = |text: &str| within(text, 0.1..=1000.0, "a number from 0.1 to 1000"))]
    speedup: f64,
    /// Folder for report.json and report.html.
    #[arg(long, value_name = "FOLDER", default_value = "target/bench")]
    out: PathBuf,
    #[command(flatten)]
    parts: ContenderFiles,
    /// Print the results in one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Prompts that are sent for memory: as many as the report's mark; with --quick, enough to see that all is in order.
const MEMORY_PROMPTS: u64 = 100_000;
const QUICK_MEMORY_PROMPTS: u64 = 5000;
const ROUNDS: u16 = 5;
/// Ten minutes of the trace, in which caches fill.
const TRACE_REQUESTS: usize = 2000;

impl Args {
    fn plan(&self) -> BenchPlan {
        let (rounds, prompts, requests) = match self.quick {
            true => (1, QUICK_MEMORY_PROMPTS, 0),
            false => (ROUNDS, MEMORY_PROMPTS, TRACE_REQUESTS),
        };
        let mut plan = BenchPlan {
            stages: match self.quick {
                true => loads::quick(),
                false => loads::all(),
            },
            rounds: Rounds {
                number: self.rounds.unwrap_or(rounds).into(),
                lasts: Duration::from_secs_f64(self.seconds),
            },
            memory: memory::contenders(),
            memory_prompts: self.memory_prompts.unwrap_or(prompts),
            trace_contenders: quality::TraceContender::all(),
            trace: self.trace.clone(),
            trace_requests: self.trace_requests.unwrap_or(requests),
            speedup: self.speedup,
        };
        if self.no_peers {
            plan.leave_peers_out();
        }
        if !self.only.is_empty() {
            plan.keep(|name| self.only.iter().any(|word| name.contains(word.as_str())));
        }
        plan
    }
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A prerequisite is missing.
    #[error(transparent)]
    Run(#[from] RunError),
    /// An engine did not start.
    #[error("an engine: {0}")]
    Engine(#[from] EngineError),
    /// The system refused a runtime or a signal handler.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The report cannot be written.
    #[error("the report: {0}")]
    Report(#[from] report::ReportError),
    /// The results cannot be written as JSON.
    #[error("the results: {0}")]
    Json(#[from] serde_json::Error),
    /// No contender is left to measure.
    #[error("nobody has such a name; names are those in the report")]
    Nobody,
    /// Interrupted by a signal.
    #[error("interrupted: nothing was written")]
    Interrupted,
}

/// Measures, writes the report, and prints where it is.
///
/// # Errors
/// When a prerequisite is missing, or the report cannot be written.
pub fn run(args: &Args) -> Result<(), BenchError> {
    // The report names failed contenders; RUST_LOG asks for more.
    logging::begin("error");
    args.parts.files.check_plugin()?;
    let plan = args.plan();
    if plan.is_empty() {
        return Err(BenchError::Nobody);
    }
    // One thread for the client, as for each engine.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let results = LocalSet::new().block_on(&runtime, measured(args, plan))?;
    report::write(&results, &args.out)?;
    let text = match args.json {
        true => serde_json::to_string(&results)? + "\n",
        false => for_people(&results, args),
    };
    // The reader of standard output may have gone.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// Measures, with a progress bar that only a terminal shows. An interrupt ends all started processes.
async fn measured(args: &Args, plan: BenchPlan) -> Result<Results, BenchError> {
    let enough = stop::requested(false)?;
    let bar = progress_bar(0, 44);
    let run = BenchRun::new(plan, &args.parts, bar.clone());
    let results = tokio::select! {
        results = run.run() => results,
        () = enough => Err(BenchError::Interrupted),
    };
    bar.finish_and_clear();
    results
}

fn for_people(results: &Results, args: &Args) -> String {
    let mut text = String::new();
    for why in &results.absent {
        text += &format!("not measured: {why}\n");
    }
    text + &format!(
        "\nAll figures are in {}\n",
        args.out.join("report.html").display()
    )
}
