//! Owns the course of a generation request: parse, check, prefill or pull, send tokens.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Request, Response, StatusCode};
use tokio::time::{Instant, sleep_until};

use super::aborts::Abortable;
use super::answer::{self, Answer, Finish, Output};
use super::body::{self, Body, BrokenOff, Events, FedBody};
use super::dialect::{Dialect, Handoff, Leg, llmd, sglang, vllm};
use super::fault::{DrawnFaults, FaultContext, HandoffFate};
use super::kv::Blocks;
use super::lease::HandoffPrompt;
use super::marker::{Marker, SLOW, TOKENS_BEFORE_DEATH, WORDY};
use super::node::EngineContext;
use super::pace::Pace;
use super::refusal::Refusal;
use super::request::{Endpoint, Generation};
use super::tally::InFlight;
use super::wire::Caller;
use super::{LONGEST_WAIT, Role};

mod context;
mod in_room;
mod spoil;
mod transfer;

/// The longest accepted request body, in bytes.
pub const LONGEST_BODY: usize = 64 * 1024 * 1024;

/// A valid request in progress.
struct Job {
    node: Rc<EngineContext>,
    flight: InFlight,
    generation: Generation,
    answer: Answer,
    id: String,
    headers: HeaderMap,
    prefixes: Vec<Vec<u64>>,
    blocks: u32,
    abortable: Abortable,
    faults: DrawnFaults,
}

/// A valid request as received.
struct Arrival {
    generation: Generation,
    id: String,
    headers: HeaderMap,
    leg: Leg,
    /// Sequence hashes of each prompt's blocks; empty without a prefix cache.
    prefixes: Vec<Vec<u64>>,
}

/// A prompt whose KV is available.
struct Ready {
    blocks: Blocks,
    first_token: Instant,
}

/// Serves one request to a generation path. Dropping the future, as when the client leaves, aborts the request.
///
/// # Errors
/// When the connection is to break without an answer.
pub async fn serve(
    node: Rc<EngineContext>,
    endpoint: Endpoint,
    caller: Caller,
    request: Request<Incoming>,
) -> Result<Response<Body>, BrokenOff> {
    let dialect = node.config.dialect;
    let mut flight = node.tally.arrive();
    let outcome = match admit(&node, endpoint, request).await {
        Ok(arrival) => {
            flight.wait();
            let job = Job::new(node, flight, arrival, caller);
            let aborted = job.abortable.aborted();
            tokio::select! {
                biased;
                outcome = job.run(caller.local) => outcome,
                // The job is dropped, and so counted as aborted.
                () = aborted => return Ok(Refusal::Aborted.response(dialect)),
            }
        }
        Err(refusal) => Err((flight, refusal)),
    };
    let (flight, refusal) = match outcome {
        Ok(response) => return Ok(response),
        Err(refused) => refused,
    };
    tracing::debug!(%refusal, "refused");
    flight.refused(&refusal);
    match refusal {
        Refusal::DiedAsMarked | Refusal::ResetByFault => Err(BrokenOff),
        _ => Ok(refusal.response(dialect)),
    }
}

/// Parses the request and checks what does not depend on the role.
async fn admit(
    node: &EngineContext,
    endpoint: Endpoint,
    request: Request<Incoming>,
) -> Result<Arrival, Refusal> {
    let (head, body) = request.into_parts();
    let body = read(body).await?;
    node.recorder.record(&head, &body);
    let body = match (node.config.dialect, node.config.role) {
        (Dialect::Llmd, Role::Decode) => llmd::run_prefill(&node.puller, &head, body).await?,
        _ => body,
    };
    let mut generation = Generation::parse(endpoint, &body)?;
    let dialect = node.config.dialect;
    let model = generation
        .model
        .get_or_insert_with(|| node.config.model.clone());
    if *model != node.config.model {
        return Err(Refusal::UnknownModel(model.clone()));
    }
    if dialect.is_vllm() {
        vllm::check_params(&generation)?;
    }
    node.check_fits(&generation)?;
    node.keep_within_context(&mut generation)?;
    let id = match dialect {
        Dialect::Vllm | Dialect::Llmd | Dialect::Mooncake | Dialect::Trtllm => {
            id(endpoint, &head.headers)
        }
        Dialect::Sglang => sglang::rid(&generation.bootstrap, &head.headers)?,
    };
    let prefixes = node.prefixes.blocks_of(endpoint, &body)?;
    let leg = dialect.leg(node.config.role, &generation);
    node.tally.leg(leg);
    Ok(Arrival {
        generation,
        id,
        headers: head.headers,
        leg,
        prefixes,
    })
}

async fn read(body: Incoming) -> Result<Bytes, Refusal> {
    match Limited::new(body, LONGEST_BODY).collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Refusal::TooLarge(LONGEST_BODY)),
        Err(error) => Err(Refusal::BadRequest(format!("Body not read: {error}"))),
    }
}

/// The request's id in a vLLM engine, in vLLM's form.
fn id(endpoint: Endpoint, headers: &HeaderMap) -> String {
    let kind = match endpoint {
        Endpoint::Chat => "chatcmpl-",
        Endpoint::Completions => "cmpl-",
        Endpoint::Responses => "resp_",
        Endpoint::Generate => "gen-",
    };
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    match given {
        Some(given) => format!("{kind}{given}"),
        None => format!("{kind}{:032x}", rand::random::<u128>()),
    }
}

/// The id in the answer.
fn answer_id(id: &str, generation: &Generation) -> String {
    match generation.markers.has(Marker::Wordy) {
        true => id.to_owned() + &"x".repeat(WORDY),
        false => id.to_owned(),
    }
}

type Outcome = Result<Response<Body>, (InFlight, Refusal)>;

impl Job {
    fn new(node: Rc<EngineContext>, flight: InFlight, arrival: Arrival, caller: Caller) -> Self {
        let Arrival {
            generation,
            id,
            headers,
            leg,
            prefixes,
        } = arrival;
        let prompt_tokens = generation.prompt_tokens();
        let (cached, logprobs) = match node.config.role {
            Role::Prefill | Role::Aggregated => (0, generation.logprobs.clone()),
            // Only the engine that computed the prompt has its probabilities.
            Role::Decode => (
                node.config.dialect.tokens_taken_over(prompt_tokens),
                generation.logprobs.as_ref().map(|_| Vec::new()),
            ),
        };
        let blocks = node.blocks_of(&generation);
        let output = output(node.config.role, &generation);
        let context = FaultContext {
            leg,
            others: node.tally.in_flight().saturating_sub(1),
            connection: caller.connection,
        };
        Self {
            answer: Answer::new(
                node.config.dialect,
                answer_id(&id, &generation),
                &generation,
                output,
                cached,
                logprobs,
            ),
            // Checked to fit the pool, whose size is a u32.
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            abortable: node.aborts.enter(&id),
            faults: node.faults.draw(context),
            node,
            flight,
            generation,
            id,
            headers,
            prefixes,
        }
    }

    async fn run(self, local: SocketAddr) -> Outcome {
        if let Err(refusal) = self.faults.before_work().await {
            return Err((self.flight, refusal));
        }
        match (self.node.config.role, self.node.config.dialect) {
            (Role::Prefill, Dialect::Vllm | Dialect::Llmd) => self.prefill_leg(local).await,
            (Role::Prefill, Dialect::Sglang) => self.prefill_in_room(local).await,
            (Role::Prefill, Dialect::Mooncake) => self.prefill_transfer().await,
            (Role::Prefill, Dialect::Trtllm) => self.prefill_context(local).await,
            (Role::Decode, Dialect::Llmd) if self.generation.kv_transfer_params.is_none() => {
                self.alone().await
            }
            (Role::Decode, Dialect::Vllm | Dialect::Llmd | Dialect::Mooncake | Dialect::Trtllm) => {
                self.decode_leg().await
            }
            (Role::Decode, Dialect::Sglang) => self.decode_in_room().await,
            (Role::Aggregated, _) => self.alone().await,
        }
    }

    /// Computes the prompt and hands its KV off, unless generation stopped or a marker prevents the hand-off.
    async fn prefill_leg(mut self, local: SocketAddr) -> Outcome {
        if let Err(refusal) = vllm::check_prefill_leg(&self.generation) {
            return Err((self.flight, refusal));
        }
        let ready = self.compute_prompt().await;
        if let Some(refusal) = self.poison_to_prefill() {
            return Err((self.flight, refusal));
        }
        if let Some(spoil) = self.faults.spoil() {
            return self.spoil(spoil, ready);
        }
        let fate = self.fate();
        let handoff = (fate != HandoffFate::Dropped).then(|| {
            let (request_id, blocks) = ready.blocks.hand_off(&self.id, self.kv_of());
            if fate == HandoffFate::Lost {
                self.node.kv.lose(&request_id);
            }
            Handoff {
                prompt_tokens: self.generation.prompt_tokens(),
                cached_tokens: self.answer.cached_tokens(),
                ..Handoff::new(&self.node.engine_id, request_id, blocks, local)
            }
        });
        let content = self.answer.whole(Dialect::Vllm.write(handoff));
        self.flight.answered();
        Ok(body::json(StatusCode::OK, content))
    }

    /// Pulls the hand-off, then generates. vLLM's NixlConnector pulls after the headers of a stream, the others before.
    async fn decode_leg(mut self) -> Outcome {
        let pulled = match self.node.config.dialect {
            Dialect::Mooncake => self.take_transfer().await,
            Dialect::Trtllm => self.take_context().await,
            _ => {
                let handoff = match vllm::read(&self.generation) {
                    Ok(handoff) => handoff,
                    Err(refusal) => return Err((self.flight, refusal)),
                };
                if self.streams_at_once() {
                    return Ok(self.streamed(
                        async move |mut job: Self, events: &Events| match job.pull(handoff).await {
                            Ok(ready) => {
                                job.flight.run();
                                job.send_tokens(ready, events).await;
                            }
                            Err(refusal) => job.fail_stream(&refusal, events),
                        },
                    ));
                }
                self.pull(handoff).await
            }
        };
        let ready = match pulled {
            Ok(ready) => ready,
            Err(refusal) => return Err((self.flight, refusal)),
        };
        self.flight.run();
        if self.streams_at_once() {
            return Ok(self.streamed(async move |job: Self, events: &Events| {
                job.send_tokens(ready, events).await;
            }));
        }
        self.whole(ready).await
    }

    /// Computes the prompt and generates; a stream's headers wait for neither.
    async fn alone(mut self) -> Outcome {
        if self.streams_at_once() {
            return Ok(self.streamed(async move |mut job: Self, events: &Events| {
                let ready = job.compute_prompt().await;
                job.send_tokens(ready, events).await;
            }));
        }
        let ready = self.compute_prompt().await;
        self.whole(ready).await
    }

    /// Computes the uncached part of the prompts, when their turn has come and their blocks are free. The first token is part of
    /// this.
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
        let found = node.prefixes.find(&self.prefixes, &self.generation.prompts);
        let cached = found.iter().sum::<u64>();
        let tokens = self.generation.prompt_tokens() - cached;
        turn.compute(node.config.pace().prefill(tokens)).await;
        node.prefixes.keep(&self.prefixes);
        node.tally.computed(tokens);
        node.tally.cached(cached);
        if cached > 0 {
            self.answer.found(found);
        }
        if node.config.role == Role::Decode {
            node.tally.recomputed(tokens);
        }
        Ready {
            blocks,
            first_token: Instant::now(),
        }
    }

    /// Takes the hand-off over; the last prompt token is computed here, with the first output token.
    async fn pull(&mut self, handoff: Handoff) -> Result<Ready, Refusal> {
        let node = Rc::clone(&self.node);
        let blocks = node.kv.reserve(self.blocks).await;
        let of = node.puller.pull(handoff).await?;
        self.check_prompt(of)?;
        // In vLLM each sequence pulls separately, and only the first finds the blocks.
        if self.generation.sequences() > 1 {
            return Err(Refusal::UsedHandoff);
        }
        node.tally.computed(1);
        Ok(Ready {
            blocks,
            first_token: Instant::now() + self.pace().tokens(1),
        })
    }

    /// Identity of this request's KV.
    fn kv_of(&self) -> HandoffPrompt {
        self.generation.kv()
    }

    /// Checks that KV belongs to this request's prompt.
    fn check_prompt(&self, of: HandoffPrompt) -> Result<(), Refusal> {
        if of == self.generation.kv() {
            return Ok(());
        }
        Err(Refusal::WrongHandoff("the KV is of another prompt".into()))
    }

    /// Fate of the KV: in vLLM, a generation that stopped leaves none.
    fn fate(&self) -> HandoffFate {
        let markers = &self.generation.markers;
        match markers.has(Marker::End) || markers.has(Marker::Lose) {
            true => HandoffFate::Dropped,
            false => self.faults.fate(),
        }
    }

    /// Failure after the prompt's computation, if a marker asks for one.
    fn poison_to_prefill(&self) -> Option<Refusal> {
        let markers = &self.generation.markers;
        let dies = markers.has(Marker::BreakPrefill);
        dies.then_some(Refusal::DiedAsMarked).or_else(|| {
            markers
                .has(Marker::FailPrefill)
                .then_some(Refusal::AsMarked)
        })
    }

    /// Failure after the arrival of the KV, if a marker asks for one.
    fn poison_to_decode(&self) -> Option<Refusal> {
        let markers = &self.generation.markers;
        let dies = markers.has(Marker::BreakDecode);
        dies.then_some(Refusal::DiedAsMarked)
            .or_else(|| markers.has(Marker::FailDecode).then_some(Refusal::AsMarked))
    }

    fn pace(&self) -> Pace {
        let mut pace = self.node.config.pace();
        if self.generation.markers.has(Marker::SlowDecode) {
            pace.token_ms *= SLOW;
        }
        pace
    }

    /// Tokens after which the connection is to break, if at all.
    fn lifetime(&self) -> Option<u64> {
        let dies = self.generation.markers.has(Marker::DieMidStream);
        let marked = dies.then_some(TOKENS_BEFORE_DEATH);
        marked.or_else(|| self.faults.lifetime())
    }

    /// The refusal that breaks the connection then.
    fn death(&self) -> Refusal {
        match self.generation.markers.has(Marker::DieMidStream) {
            true => Refusal::DiedAsMarked,
            false => Refusal::ResetByFault,
        }
    }

    /// Time from the first token to the token number `number`.
    fn until_token(&self, number: u64) -> Duration {
        let Some(drip) = self.faults.drip() else {
            return self.pace().tokens(number);
        };
        drip.saturating_mul(u32::try_from(number).unwrap_or(u32::MAX))
            .min(LONGEST_WAIT)
    }

    async fn whole(self, ready: Ready) -> Outcome {
        if let Some(refusal) = self.poison_to_decode() {
            return Err((self.flight, refusal));
        }
        if let Some(spoil) = self.faults.spoil() {
            return self.spoil(spoil, ready);
        }
        let tokens = self.answer.output_tokens();
        let lifetime = self.lifetime();
        let later = lifetime.map_or(tokens - 1, |lifetime| lifetime.min(tokens));
        sleep_until(ready.first_token + self.until_token(later)).await;
        if lifetime.is_some() {
            let death = self.death();
            return Err((self.flight, death));
        }
        let content = self.answer.whole(self.node.config.dialect.write(None));
        self.flight.answered();
        Ok(body::json(StatusCode::OK, content))
    }

    /// Ends a stream without its KV as vLLM does: with an error among the events, or, if the API has none, without an end.
    fn fail_stream(self, refusal: &Refusal, events: &Events) {
        tracing::debug!(%refusal, "failed in its stream");
        self.flight.refused(refusal);
        events.send(self.answer.opening());
        match self.generation.endpoint {
            Endpoint::Responses => events.break_off(),
            _ => events.send(answer::failed(&refusal.vllm_error(" "))),
        }
    }

    /// Sends the events of a stream, each at its own time even if the previous one was late.
    async fn send_tokens(self, ready: Ready, events: &Events) {
        if let Some(spoil) = self.faults.spoil() {
            return self.spoil_events(spoil, events).await;
        }
        let lifetime = self.lifetime();
        for number in 0..self.answer.output_tokens() {
            sleep_until(ready.first_token + self.until_token(number)).await;
            if lifetime == Some(number) {
                break;
            }
            if number == 0 {
                events.send(self.answer.opening());
            }
            events.send(self.answer.token(number));
        }
        if lifetime.is_some() {
            let death = self.death();
            self.flight.refused(&death);
            events.break_off();
            return;
        }
        events.send(self.answer.closing());
        self.flight.answered();
    }

    /// A stream whose events `generate` sends from a separate task; aborting it breaks the stream.
    fn streamed(self, generate: impl AsyncFnOnce(Self, &Events) + 'static) -> Response<Body> {
        body::events(self.fed(generate))
    }

    fn fed(self, generate: impl AsyncFnOnce(Self, &Events) + 'static) -> FedBody {
        FedBody::by(async move |events| {
            let aborted = self.abortable.aborted();
            tokio::select! {
                biased;
                () = generate(self, &events) => {}
                () = aborted => events.break_off(),
            }
        })
    }
}

/// Output of the request: a prefill engine stops after one token, for any limit.
fn output(role: Role, generation: &Generation) -> Output {
    let ends = generation.markers.has(Marker::End);
    let tokens = match role {
        Role::Prefill => 1,
        Role::Decode | Role::Aggregated if ends => 1,
        Role::Decode | Role::Aggregated => generation.output_tokens,
    };
    let finish = match ends {
        true => Finish::Stop,
        false => Finish::Length,
    };
    Output { tokens, finish }
}
