//! Owns the simulated engines in virtual time: the wait of prompts, cache hits, the times of tokens.
//!
//! A router receives what a real one would see: its own choices, the first token of each answer, the answer's growth, and, if it
//! asks for them, the engines' metrics from time to time.

mod batched;
mod event_queue;
mod fcfs;
mod records;

#[cfg(test)]
pub use records::computed;
pub use records::{ReplayOutcome, ServedRequest};

use std::time::Duration;

use batched::Batched;
use fcfs::Fcfs;
use records::{AssignedRequest, RunRecords};

use super::router_model::{EngineMetrics, RouterModel, WorkerCounts};
use super::trace::Trace;

/// Arrival of the first request of every trace, since 1970: an arbitrary fixed time.
pub const START: Duration = Duration::from_secs(1_750_000_000);

/// Reports of an answer's growth to the router, at equal steps; the last one is its end.
const REPORTS: u64 = 4;

/// Model of an engine's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Model {
    /// A worker computes one prompt after the other; each answer gets a token every --token-ms.
    Fcfs,
    /// A worker works in steps: parts of several prompts, and a token for each of its answers.
    Batched,
}

impl Model {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Batched => "batched",
        }
    }
}

/// Parameters of the engines.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// Model of their work.
    pub model: Model,
    /// Their number.
    pub workers: WorkerCounts,
    /// Blocks of one worker's cache.
    pub kv_blocks: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Prompt tokens that a worker computes per second.
    pub prefill_rate: f64,
    /// Milliseconds between two tokens of an answer; `batched` has its own.
    pub token_ms: f64,
    /// Interval at which each gateway receives the engines' metrics; `None`: never.
    pub metrics_interval: Option<Duration>,
}

impl Parameters {
    /// KV capacity of one worker, in tokens.
    fn capacity(&self) -> u64 {
        u64::from(self.kv_blocks) * u64::from(self.block_tokens)
    }

    /// A worker's occupancy in the form of an engine's metrics.
    fn engine_metrics(&self, occupancy: Occupancy) -> EngineMetrics {
        let part = occupancy.tokens as f64 / self.capacity() as f64;
        EngineMetrics {
            waiting: u32::try_from(occupancy.waiting).unwrap_or(u32::MAX),
            running: u32::try_from(occupancy.running).unwrap_or(u32::MAX),
            kv_use: part.min(1.0) as f32,
        }
    }

    /// Time for a worker to compute `tokens` of a prompt.
    fn prefill_time(&self, tokens: u64) -> Duration {
        seconds(tokens as f64 / self.prefill_rate)
    }
}

/// A duration of at most ten years, so that absurd arguments stay within a clock's range.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(0.0, 3.2e8)).unwrap_or_default()
}

/// An engine model: the time of its next event, and the event.
trait Engine {
    /// Accepts a request whose workers are assigned.
    fn begin(&mut self, job: AssignedRequest, now: Duration, records: &mut RunRecords<'_>);

    /// Time of the next internal event.
    fn due(&self) -> Option<Duration>;

    /// Performs that event.
    fn advance(&mut self, records: &mut RunRecords<'_>);

    /// Occupancy of a worker at that time.
    fn occupancy(&self, worker: usize, now: Duration, records: &RunRecords<'_>) -> Occupancy;
}

/// Load of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Occupancy {
    /// Waiting requests.
    waiting: usize,
    /// Running requests.
    running: usize,
    /// Tokens of KV held by the running requests.
    tokens: u64,
}

/// Runs a trace through a router and engines. `arrived` is called at each request.
pub fn replay(
    trace: &Trace,
    parameters: &Parameters,
    router: &mut dyn RouterModel,
    arrived: &mut dyn FnMut(),
) -> ReplayOutcome {
    let mut records = RunRecords::new(trace, parameters, router);
    let mut engine: Box<dyn Engine> = match parameters.model {
        Model::Fcfs => Box::new(Fcfs::new(parameters)),
        Model::Batched => Box::new(Batched::new(parameters)),
    };
    drive(engine.as_mut(), &mut records, parameters, arrived);
    records.close()
}

fn drive(
    engine: &mut dyn Engine,
    records: &mut RunRecords<'_>,
    parameters: &Parameters,
    arrived: &mut dyn FnMut(),
) {
    for number in 0..records.requests() {
        let now = START + records.request(number).arrival;
        catch_up(engine, records, parameters, now);
        if let Some(job) = records.arrive(number, now) {
            engine.begin(job, now, records);
        }
        arrived();
    }
    // Reports after the last request change nothing.
    while engine.due().is_some() {
        engine.advance(records);
    }
}

/// Performs all events up to an arrival. A request that ends at the moment of an arrival has ended before it, and is no longer
/// reported.
fn catch_up(
    engine: &mut dyn Engine,
    records: &mut RunRecords<'_>,
    parameters: &Parameters,
    now: Duration,
) {
    loop {
        let report_at = records.next_report().filter(|report_at| *report_at <= now);
        let until = report_at.unwrap_or(now);
        while engine.due().is_some_and(|due| due <= until) {
            engine.advance(records);
        }
        let Some(report_at) = report_at else {
            return;
        };
        let all = (0..parameters.workers.total())
            .map(|worker| parameters.engine_metrics(engine.occupancy(worker, report_at, records)));
        let all: Vec<EngineMetrics> = all.collect();
        records.deliver_metrics(&all, report_at);
    }
}

#[cfg(test)]
mod tests;
