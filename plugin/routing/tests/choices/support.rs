//! Owns short ways to build a router and requests, and a measure of how evenly its picks are spread.

use std::time::Duration;

use routing::config::Config;
use routing::fleet::{Fleet, Worker, WorkerId};
use routing::prefix::Blocks;
use routing::request::Generation;
use routing::route::{
    AfterPrefill, Assignment, CallEnd, Client, Dispatch, Plan, PlanInput, PrefillPhase, Refusal,
    Router, SelectionRequest,
};
use routing::selection::eligibility::Subset;
use serde_json::{Value, json};

/// All policies that pick a worker.
pub const PICKING: [&str; 7] = [
    "kv",
    "round_robin",
    "random",
    "power_of_two",
    "least_loaded",
    "prefix_hash",
    "session",
];

/// Prefill rate of workers with a given rate, in tokens a second.
pub const RATE: f64 = 8000.0;

pub fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A worker; its port is its id.
pub fn worker(role: &str, id: u64) -> Value {
    json!({"role": role, "id": id, "address": format!("10.0.0.{}:{id}", id % 200), "model": "m"})
}

pub fn worker_with(role: &str, id: u64, fields: Value) -> Value {
    with(worker(role, id), fields)
}

pub fn with(mut value: Value, fields: Value) -> Value {
    let fields = fields.as_object().expect("an object").clone();
    value.as_object_mut().expect("an object").extend(fields);
    value
}

/// Prefill workers from 1 on, decode workers from 101 on.
pub fn pairs(prefills: u64, decodes: u64) -> Vec<Value> {
    let prefills = (1..=prefills).map(|id| worker("prefill", id));
    let decodes = (101..=100 + decodes).map(|id| worker("decode", id));
    prefills.chain(decodes).collect()
}

/// Aggregated workers from 201 on.
pub fn wholes(count: u64) -> Vec<Value> {
    (201..=200 + count)
        .map(|id| worker("aggregated", id))
        .collect()
}

/// The same policy for both roles.
pub fn policy(name: &str) -> Value {
    json!({"selection": {"prefill": name, "decode": name}})
}

/// A configuration with trusted callers, unless the fields say otherwise.
pub fn config(workers: &[Value], fields: Value) -> Config {
    let pool = json!({"name": "p", "protocol": "nixl", "trust_clients": true,
        "discovery": {"static": {"workers": workers}}});
    let document = json!({"pools": [with(pool, fields)]});
    Config::parse(document.to_string().as_bytes()).unwrap()
}

pub fn router(workers: &[Value], fields: Value, seed: u64) -> Router {
    Router::new(
        config(workers, fields).pools[0].clone(),
        seed,
        7,
        Duration::ZERO,
    )
}

/// Replaces all workers by these.
pub fn adopt(router: &mut Router, workers: &[Value]) {
    let other = self::router(workers, json!({}), 0);
    let workers = other.fleet().workers().map(|worker| Worker::clone(worker));
    let version = router.fleet().version() + 1;
    router.adopt(Fleet::new(version, workers.collect()));
}

pub fn load(router: &Router, id: u64) -> routing::load::Load {
    router.worker_load(router.fleet().get(WorkerId(id)).unwrap())
}

pub fn remembered(router: &Router, id: u64) -> usize {
    router.remembered_blocks(router.fleet().get(WorkerId(id)).unwrap())
}

/// A prompt with given blocks, for `reserve`.
#[derive(Clone)]
pub struct Prompt {
    pub tokens: u64,
    pub blocks: Blocks,
}

impl Prompt {
    /// Prompts of one name begin alike.
    pub fn new(name: u64, tokens: u64, block_tokens: u64) -> Self {
        Self::branching(0, name, tokens, block_tokens)
    }

    /// All prompts share the first `shared` tokens.
    pub fn branching(shared: u64, name: u64, tokens: u64, block_tokens: u64) -> Self {
        let own = shared / block_tokens;
        let block = |index: u64| mixed(if index < own { 0 } else { name + 1 }, index);
        Self {
            tokens,
            blocks: Blocks {
                scope: 1,
                sequence: (0..tokens / block_tokens).map(block).collect(),
                ..Blocks::default()
            },
        }
    }

    pub fn ask(&self) -> SelectionRequest<'_> {
        SelectionRequest {
            model: "m",
            prompt_tokens: self.tokens,
            blocks: &self.blocks,
            ..SelectionRequest::default()
        }
    }
}

fn mixed(name: u64, index: u64) -> u64 {
    let mut bits = name
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(index.wrapping_mul(0xbf58_476d_1ce4_e5b9));
    bits = (bits ^ (bits >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 29)
}

/// A request with a body, for `plan`: a prompt of token ids.
#[derive(Clone)]
pub struct Wish {
    pub model: String,
    pub prompt: Value,
    pub nvext: Value,
    pub max_tokens: Option<u64>,
    /// Further members of the body.
    pub more: Value,
    pub now: Duration,
    pub session: Option<Vec<u8>>,
    pub subset: Option<Subset>,
}

/// Prompts of one name begin alike.
pub fn wish(name: u64, tokens: u64) -> Wish {
    let ids: Vec<u64> = (0..tokens).map(|index| name * 100_000 + index).collect();
    Wish {
        model: "m".to_owned(),
        prompt: json!(ids),
        nvext: json!({}),
        max_tokens: None,
        more: json!({}),
        now: at(1_000),
        session: None,
        subset: None,
    }
}

impl Wish {
    pub fn at(mut self, ms: u64) -> Self {
        self.now = at(ms);
        self
    }

    pub fn saying(mut self, nvext: Value) -> Self {
        self.nvext = with(self.nvext, nvext);
        self
    }

    pub fn overriding(self, weights: Value) -> Self {
        self.saying(json!({"router_config_override": weights}))
    }

    pub fn within(mut self, subset: &str) -> Self {
        self.subset = Some(Subset::parse(subset));
        self
    }

    pub fn of_model(mut self, model: &str) -> Self {
        self.model = model.to_owned();
        self
    }

    /// Names a prefill worker.
    pub fn prefilled_by(self, id: u64) -> Self {
        self.saying(json!({"prefill_worker_id": id}))
    }

    /// Names a decode worker.
    pub fn decoded_by(self, id: u64) -> Self {
        self.saying(json!({"decode_worker_id": id}))
    }

    pub fn body(&self) -> Vec<u8> {
        let mut body = json!({"model": self.model, "prompt": self.prompt, "nvext": self.nvext});
        if let Some(max_tokens) = self.max_tokens {
            body["max_tokens"] = json!(max_tokens);
        }
        with(body, self.more.clone()).to_string().into_bytes()
    }

    pub fn plan(&self, router: &mut Router) -> Result<Plan, Refusal> {
        self.plan_body(router, &self.body())
    }

    fn plan_body(&self, router: &mut Router, body: &[u8]) -> Result<Plan, Refusal> {
        let input = PlanInput {
            now: self.now,
            session: self.session.as_deref(),
            subset: self.subset.as_ref(),
            ..PlanInput::default()
        };
        router.plan(Generation::Completions, body, input)
    }

    pub fn refused(&self, router: &mut Router) -> Refusal {
        match self.plan(router) {
            Ok(_) => panic!("not refused"),
            Err(refusal) => refusal,
        }
    }

    /// Plans the request; expects a prefill call.
    pub fn prefill(&self, router: &mut Router) -> (PrefillPhase, Assignment) {
        match self.plan(router) {
            Ok(Plan::Prefill(phase, assignment)) => (phase, assignment),
            Ok(_) => panic!("no prefill"),
            Err(refusal) => panic!("{refusal}"),
        }
    }

    /// Plans the request; expects one worker to run it whole.
    pub fn forward(&self, router: &mut Router) -> (Dispatch, Assignment) {
        match self.plan(router) {
            Ok(Plan::Forward(dispatch, assignment)) => (dispatch, assignment),
            Ok(_) => panic!("not forwarded"),
            Err(refusal) => panic!("{refusal}"),
        }
    }

    /// Runs the prefill call with a good answer, after the time it takes at [`RATE`]; then the client leaves.
    pub fn served(&self, router: &mut Router) -> u64 {
        let (phase, assignment) = self.prefill(router);
        let tokens = load(router, phase.worker().id.0).prefill_tokens;
        let id = phase.worker().id.0;
        router.advance(self.now + Duration::from_secs_f64(tokens as f64 / RATE));
        drop(phase.answered(GOOD, Client::Waits, router));
        drop(assignment);
        id
    }

    /// The body of a query for the workers that would be picked.
    fn query(&self) -> Vec<u8> {
        let query = json!({"annotations": ["query_instance_id:"]});
        self.clone().saying(query).body()
    }

    /// The workers that would be picked, ids with ranks: prefill, decode.
    pub fn targets(&self, router: &mut Router) -> ((u64, u64), (u64, u64)) {
        self.looked_up(router, &self.query())
    }

    fn looked_up(&self, router: &mut Router, query: &[u8]) -> ((u64, u64), (u64, u64)) {
        let answer = match self.plan_body(router, query) {
            Ok(Plan::Answer(answer)) => answer,
            Ok(_) => panic!("not answered here"),
            Err(refusal) => panic!("{refusal}"),
        };
        let answer: Value = serde_json::from_str(&answer.body).unwrap();
        let of = |name: &str| answer["nvext"]["worker_id"][name].as_u64().unwrap();
        (
            (of("prefill_worker_id"), of("prefill_dp_rank")),
            (of("decode_worker_id"), of("decode_dp_rank")),
        )
    }

    /// The prefill worker that would be picked; nothing is learned or booked.
    pub fn prefiller(&self, router: &mut Router) -> u64 {
        self.targets(router).0.0
    }

    /// The same for a decode worker, or one that runs the whole request.
    pub fn decoder(&self, router: &mut Router) -> u64 {
        self.targets(router).1.0
    }

    /// How often each of the first prefill workers would be picked.
    pub fn prefillers(&self, router: &mut Router, tries: usize, workers: u64) -> Vec<u64> {
        let query = self.query();
        let picked = (0..tries).map(|_| self.looked_up(router, &query).0.0);
        counts(picked, 1, workers)
    }
}

/// How often each of the numbers from `first` on occurs.
pub fn counts(picked: impl IntoIterator<Item = u64>, first: u64, size: u64) -> Vec<u64> {
    let mut counts = vec![0; size as usize];
    for id in picked {
        counts[usize::try_from(id - first).unwrap()] += 1;
    }
    counts
}

/// Pearson's chi-squared distance of counts from even. For eight cells 24.3 is exceeded once in a thousand times.
pub fn unevenness(counts: &[u64]) -> f64 {
    let mean = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
    let squares = counts.iter().map(|count| (*count as f64 - mean).powi(2));
    squares.sum::<f64>() / mean
}

pub fn prefill_id(assignment: &Assignment) -> u64 {
    assignment.prefill.as_ref().unwrap().id.0
}

pub fn decode_id(assignment: &Assignment) -> u64 {
    assignment.decode.as_ref().unwrap().id.0
}

/// A prefill answer that hands over two blocks.
pub const GOOD: CallEnd<'static> = CallEnd::Whole {
    status: 200,
    body: br#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[4,5]]}}"#,
};

/// The proxy's own answer where a worker accepted no connection.
pub const UNREACHED: CallEnd<'static> = CallEnd::Whole {
    status: 503,
    body: b"upstream connect error or disconnect/reset before headers. reset reason: remote connection failure, transport failure reason: delayed connect error: Connection refused",
};

/// A prefill answer of that status.
pub fn status(status: u16) -> CallEnd<'static> {
    CallEnd::Whole { status, body: b"" }
}

/// The phase of the other worker that is called.
pub fn again(after: AfterPrefill) -> PrefillPhase {
    match after {
        AfterPrefill::Again(phase) => phase,
        _ => panic!("nobody else is called"),
    }
}
