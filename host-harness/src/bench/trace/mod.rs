//! Owns the replay of a recorded trace against a real proxy in real time: which requests were answered, how soon, and the
//! engines' work.

use std::collections::VecDeque;
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::StatusCode;
use hyper::header::CONTENT_TYPE;
use serde::Deserialize;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::results::TraceRow;
use crate::engine::Role;
use crate::http::{self, Client, HttpError, keeping_client};
use crate::replay::{Request, Spread, Trace};
use events::StreamReader;

mod events;
mod prompt;
#[cfg(test)]
mod tests;

/// Options of a replay.
#[derive(Clone, Debug)]
pub struct PlayOptions {
    /// Factor by which the trace is played faster than recorded. The engines' times are divided by the same.
    pub speedup: f64,
    /// Number of requests sent, from the first.
    pub requests: usize,
    /// The model asked for.
    pub model: String,
    /// Tokens of every answer: few, since decode is not measured.
    pub max_tokens: u64,
    /// Tokens per block of the trace.
    pub block_tokens: u32,
    /// Wall-clock limit of an answer; after it the request is abandoned.
    pub patience: Duration,
}

/// End of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestEnd {
    /// 200 and a complete answer.
    Complete,
    /// Another status.
    Refused(StatusCode),
    /// 200 and an error, or an incomplete answer.
    CutShort,
    /// No answer.
    Unanswered,
    /// Abandoned by the client after its limit.
    GivenUp,
}

/// Outcome of one request; wall-clock times since its due time.
#[derive(Clone, Copy, Debug)]
pub struct RequestOutcome {
    /// Its end.
    pub end: RequestEnd,
    /// Time to the first text, if any came.
    pub ttft: Option<Duration>,
    /// Lateness of sending.
    pub late: Duration,
}

/// A played trace.
#[derive(Clone, Debug)]
pub struct PlayedTrace {
    /// Factor by which the trace was played faster than recorded.
    pub speedup: f64,
    /// One outcome per request, unordered.
    pub outcomes: Vec<RequestOutcome>,
}

impl PlayedTrace {
    /// Lateness of sending, in milliseconds of the trace.
    pub fn late_ms(&self) -> Spread {
        let late = self.outcomes.iter().map(|one| one.late);
        Spread::of(late.map(|late| late.as_secs_f64() * 1000.0 * self.speedup))
    }
}

/// Work of one engine, from its `/__state`.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct EngineState {
    /// Role of the engine.
    pub role: Role,
    /// Prompt tokens found in the cache.
    pub cached_tokens: u64,
    /// Prompt tokens computed.
    pub computed_tokens: u64,
}

/// Sends the requests of a trace at their times, independent of earlier ones; calls `progress` with the number of ended requests.
pub async fn play(
    trace: &Trace,
    at: SocketAddr,
    options: &PlayOptions,
    progress: impl Fn(usize),
) -> PlayedTrace {
    let client = keeping_client();
    let count = trace.requests.len().min(options.requests);
    let requests = &trace.requests[..count];
    let mut bodies = Bodies::new(requests, options);
    let mut in_flight = JoinSet::new();
    let mut outcomes = Vec::new();
    let begun = Instant::now();
    for request in requests {
        let due = begun + request.arrival.div_f64(options.speedup);
        let body = bodies.next(due).await;
        sleep_until(due).await;
        in_flight.spawn(ask(client.clone(), at, body, due, options.patience));
        while let Some(ended) = in_flight.try_join_next() {
            outcomes.extend(ended);
        }
        progress(outcomes.len());
    }
    while let Some(ended) = in_flight.join_next().await {
        outcomes.extend(ended);
        progress(outcomes.len());
    }
    PlayedTrace {
        speedup: options.speedup,
        outcomes,
    }
}

/// Bodies made ahead of time: traces come in bursts, whose requests would wait for each other's bodies.
struct Bodies<'a> {
    requests: &'a [Request],
    options: &'a PlayOptions,
    made: VecDeque<Bytes>,
    /// Number of the next body to make.
    next: usize,
}

/// Maximum number of prepared bodies: more than a burst has.
const AHEAD: usize = 128;

impl<'a> Bodies<'a> {
    fn new(requests: &'a [Request], options: &'a PlayOptions) -> Self {
        Self {
            requests,
            options,
            made: VecDeque::new(),
            next: 0,
        }
    }

    /// The next request's body, which is not needed before `due`; makes others until then, and lets other tasks run first.
    async fn next(&mut self, due: Instant) -> Bytes {
        while self.made.len() < AHEAD && self.next < self.requests.len() && Instant::now() < due {
            let body = self.make();
            self.made.push_back(body);
            yield_now().await;
        }
        match self.made.pop_front() {
            Some(body) => body,
            None => self.make(),
        }
    }

    fn make(&mut self) -> Bytes {
        let number = self.next;
        self.next += 1;
        prompt::body(&self.requests[number], number, self.options)
    }
}

/// Sends one request that was due at `due`, and reads its answer to the end.
async fn ask(
    client: Client,
    at: SocketAddr,
    body: Bytes,
    due: Instant,
    patience: Duration,
) -> RequestOutcome {
    let late = due.elapsed();
    let mut ttft = None;
    let answer = answer(&client, at, body, || {
        ttft.get_or_insert(due.elapsed());
    });
    let end = match timeout_at(due + patience, answer).await {
        Ok(Ok(end)) => end,
        Ok(Err(error)) => {
            tracing::debug!(%error, "not answered");
            RequestEnd::Unanswered
        }
        Err(_) => RequestEnd::GivenUp,
    };
    RequestOutcome { end, ttft, late }
}

/// Reads an answer; calls `has_text` at its first text, and possibly again.
async fn answer(
    client: &Client,
    at: SocketAddr,
    body: Bytes,
    mut has_text: impl FnMut(),
) -> Result<RequestEnd, Box<dyn Error + Send + Sync>> {
    let request = hyper::Request::post(format!("http://{at}/v1/chat/completions"))
        .header(CONTENT_TYPE, "application/json")
        .body(Full::from(body))?;
    let mut response = client.request(request).await?;
    let mut reader = StreamReader::default();
    while let Some(frame) = response.frame().await {
        let Ok(frame) = frame else {
            return Ok(RequestEnd::CutShort);
        };
        let Ok(piece) = frame.into_data() else {
            continue;
        };
        reader.read(&piece);
        if reader.has_text() {
            has_text();
        }
    }
    Ok(match response.status() {
        StatusCode::OK if reader.is_whole() => RequestEnd::Complete,
        StatusCode::OK => RequestEnd::CutShort,
        status => RequestEnd::Refused(status),
    })
}

/// The engines' work so far.
///
/// # Errors
/// When a state report fails.
pub async fn states(engines: &[SocketAddr]) -> Result<Vec<EngineState>, HttpError> {
    let mut states = Vec::new();
    for engine in engines {
        states.push(http::get_json(*engine, "/__state").await?);
    }
    Ok(states)
}

/// Result of a trace, in the trace's time. First tokens count only of complete answers; only engines that compute prompts count.
pub fn row(contender: &str, played: &PlayedTrace, engines: &[EngineState]) -> TraceRow {
    let whole = || {
        played
            .outcomes
            .iter()
            .filter(|one| one.end == RequestEnd::Complete)
    };
    let ttft = whole().filter_map(|one| one.ttft);
    let ttft_ms = Spread::of(ttft.map(|ttft| ttft.as_secs_f64() * 1000.0 * played.speedup));
    let computing = || engines.iter().filter(|engine| engine.role != Role::Decode);
    let computed: u64 = computing().map(|engine| engine.computed_tokens).sum();
    let cached: u64 = computing().map(|engine| engine.cached_tokens).sum();
    let busiest = computing().map(|engine| engine.computed_tokens).max();
    let mean = share(computed, computing().count() as u64);
    TraceRow {
        contender: contender.to_owned(),
        requests: played.outcomes.len(),
        speedup: played.speedup,
        success_rate: share(whole().count() as u64, played.outcomes.len() as u64),
        hit_rate: share(cached, cached + computed),
        ttft_mean_ms: ttft_ms.mean,
        ttft_p50_ms: ttft_ms.p50,
        ttft_p90_ms: ttft_ms.p90,
        ttft_p99_ms: ttft_ms.p99,
        imbalance: match mean > 0.0 {
            true => busiest.unwrap_or_default() as f64 / mean,
            false => 0.0,
        },
    }
}

/// The share; 0 if `of` is 0.
fn share(part: u64, of: u64) -> f64 {
    match of {
        0 => 0.0,
        _ => part as f64 / of as f64,
    }
}
