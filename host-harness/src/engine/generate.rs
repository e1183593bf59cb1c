//! The story of a generation request: read, checked, its prompt computed or its hand-off pulled, its tokens sent.

use std::net::SocketAddr;
use std::rc::Rc;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Request, Response, StatusCode};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::Role;
use super::answer::Answer;
use super::body::{self, Body, Fed};
use super::dialect::Handoff;
use super::kv::Blocks;
use super::lease::KvOf;
use super::node::Node;
use super::refusal::Refusal;
use super::request::{Endpoint, Generation};
use super::tally::InFlight;

/// The longest request body taken, in bytes.
pub const LONGEST_BODY: usize = 64 * 1024 * 1024;

/// A valid request on its way through the engine.
struct Job {
    node: Rc<Node>,
    flight: InFlight,
    generation: Generation,
    answer: Answer,
    id: String,
    blocks: u32,
}

/// A prompt whose KV is here.
struct Ready {
    blocks: Blocks,
    first_token: Instant,
}

/// Serves one request to a generation path; `local` is the address under which the client reached the engine.
/// Dropped, as when the client leaves, the request is aborted.
pub async fn serve(
    node: Rc<Node>,
    endpoint: Endpoint,
    local: SocketAddr,
    request: Request<Incoming>,
) -> Response<Body> {
    let mut flight = node.tally.arrive();
    let outcome = match admit(&node, endpoint, request).await {
        Ok((generation, id)) => {
            flight.wait();
            Job::new(node, flight, generation, id).run(local).await
        }
        Err(refusal) => Err((flight, refusal)),
    };
    match outcome {
        Ok(response) => response,
        Err((flight, refusal)) => {
            tracing::debug!(%refusal, "refused");
            flight.refused(&refusal);
            refusal.response()
        }
    }
}

/// Reads the request and checks what does not depend on the role; returns it and its id.
async fn admit(
    node: &Node,
    endpoint: Endpoint,
    request: Request<Incoming>,
) -> Result<(Generation, String), Refusal> {
    let (head, body) = request.into_parts();
    let body = read(body).await?;
    node.recorder.record(&head, &body);
    let generation = Generation::parse(endpoint, &body)?;
    if generation.model != node.config.model {
        return Err(Refusal::UnknownModel(generation.model));
    }
    node.check_fits(&generation)?;
    Ok((generation, id(endpoint, &head.headers)))
}

async fn read(body: Incoming) -> Result<Bytes, Refusal> {
    match Limited::new(body, LONGEST_BODY).collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Refusal::TooLarge(LONGEST_BODY)),
        Err(error) => Err(Refusal::BadRequest(format!("Body not read: {error}"))),
    }
}

/// The request's id in the engine, made as vLLM makes it.
fn id(endpoint: Endpoint, headers: &HeaderMap) -> String {
    let kind = match endpoint {
        Endpoint::Chat => "chatcmpl",
        Endpoint::Completions => "cmpl",
        Endpoint::Responses => "resp",
    };
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    match given {
        Some(given) => format!("{kind}-{given}"),
        None => format!("{kind}-{:032x}", rand::random::<u128>()),
    }
}

type Outcome = Result<Response<Body>, (InFlight, Refusal)>;

impl Job {
    fn new(node: Rc<Node>, flight: InFlight, generation: Generation, id: String) -> Self {
        let cached = match node.config.role {
            Role::Decode => generation.prompt_tokens().saturating_sub(1),
            Role::Prefill | Role::Aggregated => 0,
        };
        let blocks = generation.prompt_blocks(node.config.block_tokens);
        Self {
            answer: Answer::new(id.clone(), &generation, cached),
            // Checked to fit the pool, which is counted in u32.
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            node,
            flight,
            generation,
            id,
        }
    }

    async fn run(self, local: SocketAddr) -> Outcome {
        match self.node.config.role {
            Role::Prefill => self.prefill_leg(local).await,
            Role::Decode => self.decode_leg().await,
            Role::Aggregated => Ok(self.alone().await),
        }
    }

    /// Computes the prompt and hands its KV off.
    async fn prefill_leg(mut self, local: SocketAddr) -> Outcome {
        let dialect = self.node.config.dialect;
        if let Err(refusal) = dialect.check_prefill_leg(&self.generation) {
            return Err((self.flight, refusal));
        }
        let ready = self.compute_prompt().await;
        let of = KvOf {
            prompt_tokens: self.generation.prompt_tokens(),
            prompt_fingerprint: self.generation.fingerprint,
        };
        let (request_id, blocks) = ready.blocks.hand_off(&self.id, of);
        let handoff = Handoff::new(&self.node.engine_id, request_id, blocks, local);
        let content = self.answer.whole(Some(dialect.write(handoff)));
        self.flight.answered();
        Ok(body::json(StatusCode::OK, content))
    }

    /// Pulls the hand-off, then generates. A bad one is a status, so the pull comes before the headers of a stream.
    async fn decode_leg(mut self) -> Outcome {
        let ready = match self.pull().await {
            Ok(ready) => ready,
            Err(refusal) => return Err((self.flight, refusal)),
        };
        self.flight.run();
        if self.generation.stream {
            return Ok(streamed(async move |events| {
                self.send_tokens(ready, &events).await
            }));
        }
        Ok(self.whole(ready).await)
    }

    /// Computes the prompt and generates; a stream's headers wait for neither.
    async fn alone(mut self) -> Response<Body> {
        if self.generation.stream {
            return streamed(async move |events| {
                let ready = self.compute_prompt().await;
                self.send_tokens(ready, &events).await;
            });
        }
        let ready = self.compute_prompt().await;
        self.whole(ready).await
    }

    /// Computes the prompt when its turn has come and its blocks are free. The first token comes with it.
    async fn compute_prompt(&mut self) -> Ready {
        let node = Rc::clone(&self.node);
        let mut turn = node.prefill.turn().await;
        let blocks = match node.kv.try_reserve(self.blocks) {
            Some(blocks) => blocks,
            None => {
                let blocks = node.kv.reserve(self.blocks).await;
                turn.start_now();
                blocks
            }
        };
        self.flight.run();
        let tokens = self.generation.prompt_tokens();
        turn.compute(node.config.pace().prefill(tokens)).await;
        node.tally.computed(tokens);
        Ready {
            blocks,
            first_token: Instant::now(),
        }
    }

    /// Takes the hand-off over; its last prompt token is computed here, with the first output token.
    async fn pull(&mut self) -> Result<Ready, Refusal> {
        let node = Rc::clone(&self.node);
        let handoff = node.config.dialect.read(&self.generation)?;
        let blocks = node.kv.reserve(self.blocks).await;
        let of = node.puller.pull(handoff).await?;
        if of.prompt_fingerprint != self.generation.fingerprint {
            return Err(Refusal::WrongHandoff("the KV is of another prompt".into()));
        }
        // Each sequence pulls for itself in vLLM, and only the first finds the blocks.
        if self.generation.sequences() > 1 {
            return Err(Refusal::UsedHandoff);
        }
        node.tally.computed(1);
        Ok(Ready {
            blocks,
            first_token: Instant::now() + node.config.pace().tokens(1),
        })
    }

    async fn whole(self, ready: Ready) -> Response<Body> {
        let later = self.generation.output_tokens - 1;
        sleep_until(ready.first_token + self.node.config.pace().tokens(later)).await;
        let content = self.answer.whole(None);
        self.flight.answered();
        body::json(StatusCode::OK, content)
    }

    /// Sends the events of a stream, each at its time however late the one before was sent.
    async fn send_tokens(self, ready: Ready, events: &mpsc::UnboundedSender<Bytes>) {
        let pace = self.node.config.pace();
        let send_all = |pieces: Vec<Bytes>| {
            for piece in pieces {
                // Nobody listens only when this task is about to be ended.
                let _ = events.send(piece);
            }
        };
        for number in 0..self.generation.output_tokens {
            sleep_until(ready.first_token + pace.tokens(number)).await;
            if number == 0 {
                send_all(self.answer.opening());
            }
            send_all(self.answer.token(number));
        }
        send_all(self.answer.closing());
        self.flight.answered();
    }
}

/// A stream whose events `generate` sends from a task of its own, as fast as it generates however slowly the client reads.
fn streamed(generate: impl AsyncFnOnce(mpsc::UnboundedSender<Bytes>) + 'static) -> Response<Body> {
    let (events, pieces) = mpsc::unbounded_channel();
    let feeder = tokio::task::spawn_local(async move { generate(events).await });
    body::events(Fed::new(pieces, feeder.abort_handle()))
}
