//! Owns `pd-harness load`: requests to an address, in a closed loop or at fixed times, and their results.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::task::LocalSet;

mod connection;
mod loops;
mod measured;
mod output;
mod request_spec;

use connection::AnswerForm;
use measured::Window;
pub use measured::{Measured, Percentiles};
pub use request_spec::{Prompts, RequestSpec};

use crate::cli::within;

/// Arguments of `pd-harness load`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address of the server.
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8080")]
    to: SocketAddr,
    /// Connections, each with one request at a time; with --rate their maximum.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    connections: u16,
    /// Send this many requests per second, independent of the answers: latencies count from a request's due time. Without it each
    /// connection sends its next request after the answer to the last.
    #[arg(long, value_name = "PER_SECOND", value_parser = |text: &str| within(text, 0.01..=1_000_000.0, "requests a second, from 0.01 to 1000000"))]
    rate: Option<f64>,
    /// Measured seconds.
    #[arg(long, default_value_t = 5.0, value_parser = |text: &str| within(text, 0.0..=86_400.0, "seconds, from 0 to 86400"))]
    seconds: f64,
    /// Seconds of warm-up before the measurement.
    #[arg(long, default_value_t = 0.5, value_parser = |text: &str| within(text, 0.0..=86_400.0, "seconds, from 0 to 86400"))]
    warm_up: f64,
    /// Bytes of a request's body.
    #[arg(long, value_name = "BYTES", default_value_t = 1024, value_parser = |text: &str| within(text, 256..=64_usize << 20, "bytes, from 256 (what all fields take) to 67108864"))]
    body_bytes: usize,
    /// Number of different prompts, sent in turn; 0: all prompts differ.
    #[arg(long, value_name = "N", default_value_t = 0)]
    prompts: u64,
    /// Request streams of events.
    #[arg(long)]
    stream: bool,
    /// Requested tokens (`max_tokens`).
    #[arg(long, default_value_t = 1)]
    tokens: u32,
    /// Requested model.
    #[arg(long, default_value = "sim")]
    model: String,
    /// Print the results in one line of JSON.
    #[arg(long)]
    json: bool,
}

/// How requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pacing {
    /// Each connection sends its next request after the answer to the last.
    Closed,
    /// At a fixed rate, evenly, independent of the answers.
    Open {
        /// Requests per second.
        rate: f64,
    },
}

/// Time for which an answer is awaited after the window's end.
const PATIENCE: Duration = Duration::from_secs(10);

/// A load.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// Address of the server.
    pub to: SocketAddr,
    /// How requests are sent.
    pub pacing: Pacing,
    /// Connections, or their maximum.
    pub connections: usize,
    /// Time before the measurement.
    pub warm_up: Duration,
    /// Length of the measurement.
    pub lasts: Duration,
    /// The requests.
    pub spec: RequestSpec,
}

impl Args {
    fn plan(&self) -> LoadPlan {
        LoadPlan {
            to: self.to,
            pacing: match self.rate {
                Some(rate) => Pacing::Open { rate },
                None => Pacing::Closed,
            },
            connections: self.connections.into(),
            warm_up: Duration::from_secs_f64(self.warm_up),
            lasts: Duration::from_secs_f64(self.seconds),
            spec: RequestSpec {
                model: self.model.clone(),
                body_bytes: self.body_bytes,
                streamed: self.stream,
                tokens: self.tokens,
                prompts: match self.prompts {
                    // From half of all numbers on, with room to count up.
                    0 => Prompts::AllDifferent {
                        from: rand::random::<u64>() / 2,
                    },
                    number => Prompts::InTurn(number),
                },
            },
        }
    }
}

impl LoadPlan {
    /// Expected form of the answers.
    fn expected(&self) -> AnswerForm {
        match self.spec.streamed {
            true => AnswerForm::Stream,
            false => AnswerForm::Unstreamed,
        }
    }
}

/// Runs the load; returns the results, and the values of `sample` at the start and the end of the measurement. To be called in a
/// `LocalSet`.
pub async fn drive<S>(plan: &LoadPlan, mut sample: impl FnMut() -> S) -> (Measured, [S; 2]) {
    let begins = tokio::time::Instant::now() + plan.warm_up;
    let window = Window {
        begins,
        ends: begins + plan.lasts,
    };
    let watched = async {
        tokio::time::sleep_until(window.begins).await;
        let first = sample();
        tokio::time::sleep_until(window.ends).await;
        [first, sample()]
    };
    let (samples, sampled) = tokio::join!(loops::send(plan, window, None), watched);
    (Measured::of(samples, window), sampled)
}

/// Outcome of a number of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Requests sent.
    pub sent: u64,
    /// Requests answered with 200 and a complete answer.
    pub good: u64,
}

/// Sends `number` requests in a closed loop, for no longer than the plan lasts. To be called in a `LocalSet`.
pub async fn send(plan: &LoadPlan, number: u64) -> Sent {
    let begins = tokio::time::Instant::now();
    let window = Window {
        begins,
        ends: begins + plan.lasts,
    };
    let samples = loops::send(plan, window, Some(number)).await;
    Sent {
        sent: samples.len() as u64,
        good: samples.iter().filter(|sample| sample.is_good()).count() as u64,
    }
}

/// Why a load could not be run.
#[derive(Debug, thiserror::Error)]
#[error("no load without a runtime: {0}")]
pub struct LoadError(#[from] std::io::Error);

/// Runs the load and prints the results.
///
/// # Errors
/// When the system refuses a runtime or the output.
pub fn run(args: &Args) -> Result<(), LoadError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let plan = args.plan();
    let (measured, _) = LocalSet::new().block_on(&runtime, drive(&plan, || ()));
    output::print(&plan, &measured, args.json)?;
    Ok(())
}

#[cfg(test)]
mod tests;
