//! Owns the simulated engines in virtual time: how long prompts wait, what they find in a cache, when tokens come.
//!
//! A router is told what a router would see: its own choices, the first token of each answer, how the answer grows, and, if
//! it wants to hear that, what the engines say of themselves from time to time.

mod agenda;
mod batched;
mod books;
mod fcfs;

#[cfg(test)]
pub use books::computed;
pub use books::{Outcome, Served};

use std::time::Duration;

use batched::Batched;
use books::{Books, Job};
use fcfs::Fcfs;

use super::chooser::{Chooser, Shape, Status};
use super::trace::Trace;

/// When the first request of every trace comes, since 1970: some time, always the same.
pub const START: Duration = Duration::from_secs(1_750_000_000);

/// An answer's growth is told the router this often, at equal steps; the last one is its end.
const REPORTS: u64 = 4;

/// How an engine works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Model {
    /// A worker computes one prompt after the other; each answer gets a token every --token-ms.
    Fcfs,
    /// A worker works in steps: parts of several prompts, and a token for each of its answers.
    Batched,
}

impl Model {
    /// Its name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fcfs => "fcfs",
            Self::Batched => "batched",
        }
    }
}

/// What the engines are.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// How they work.
    pub model: Model,
    /// How many there are.
    pub shape: Shape,
    /// Blocks that one worker's cache holds.
    pub kv_blocks: u32,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// Prompt tokens that a worker computes in a second.
    pub prefill_rate: f64,
    /// Milliseconds from one token of an answer to the next; `batched` has its own.
    pub token_ms: f64,
    /// How often each gateway hears what the engines say of themselves; none: never.
    pub metrics_interval: Option<Duration>,
}

impl Parameters {
    /// Tokens whose KV one worker holds.
    fn capacity(&self) -> u64 {
        u64::from(self.kv_blocks) * u64::from(self.block_tokens)
    }

    /// As an engine tells it.
    fn status(&self, occupancy: Occupancy) -> Status {
        let part = occupancy.tokens as f64 / self.capacity() as f64;
        Status {
            waiting: u32::try_from(occupancy.waiting).unwrap_or(u32::MAX),
            running: u32::try_from(occupancy.running).unwrap_or(u32::MAX),
            kv_use: part.min(1.0) as f32,
        }
    }

    /// How long a worker computes `tokens` of a prompt.
    fn prefill_time(&self, tokens: u64) -> Duration {
        seconds(tokens as f64 / self.prefill_rate)
    }
}

/// No single wait is longer than ten years; keeps absurd arguments within what a clock can add.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(0.0, 3.2e8)).unwrap_or_default()
}

/// The time after which an engine has something to do, and doing it.
trait Engine {
    /// A request comes in, which the books have placed.
    fn begin(&mut self, job: Job, now: Duration, books: &mut Books<'_>);

    /// When the next thing happens by itself.
    fn due(&self) -> Option<Duration>;

    /// That thing happens.
    fn advance(&mut self, books: &mut Books<'_>);

    /// What a worker has at that time.
    fn occupancy(&self, worker: usize, now: Duration, books: &Books<'_>) -> Occupancy;
}

/// What a worker has to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Occupancy {
    /// Requests not begun.
    waiting: usize,
    /// Requests begun.
    running: usize,
    /// Tokens whose KV those begun hold.
    tokens: u64,
}

/// Runs a trace through a router and engines. `arrived` is called at each request.
pub fn replay(
    trace: &Trace,
    parameters: &Parameters,
    chooser: &mut dyn Chooser,
    arrived: &mut dyn FnMut(),
) -> Outcome {
    let mut books = Books::new(trace, parameters, chooser);
    let mut engine: Box<dyn Engine> = match parameters.model {
        Model::Fcfs => Box::new(Fcfs::new(parameters)),
        Model::Batched => Box::new(Batched::new(parameters)),
    };
    drive(engine.as_mut(), &mut books, parameters, arrived);
    books.close()
}

fn drive(
    engine: &mut dyn Engine,
    books: &mut Books<'_>,
    parameters: &Parameters,
    arrived: &mut dyn FnMut(),
) {
    for number in 0..books.requests() {
        let now = START + books.request(number).arrival;
        catch_up(engine, books, parameters, now);
        if let Some(job) = books.arrive(number, now) {
            engine.begin(job, now, books);
        }
        arrived();
    }
    // What a router hears when nobody asks it any more changes nothing.
    while engine.due().is_some() {
        engine.advance(books);
    }
}

/// All that happens up to an arrival. What ends at the moment of an arrival has ended before it, and is not told of any more.
fn catch_up(
    engine: &mut dyn Engine,
    books: &mut Books<'_>,
    parameters: &Parameters,
    now: Duration,
) {
    loop {
        let told = books.listens().filter(|told| *told <= now);
        let until = told.unwrap_or(now);
        while engine.due().is_some_and(|due| due <= until) {
            engine.advance(books);
        }
        let Some(told) = told else {
            return;
        };
        let all = (0..parameters.shape.workers())
            .map(|worker| parameters.status(engine.occupancy(worker, told, books)));
        let all: Vec<Status> = all.collect();
        books.tell_of_engines(&all, told);
    }
}

#[cfg(test)]
mod tests;
