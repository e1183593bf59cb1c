//! What all requests to one engine share, and what the engine tells about itself.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::json;

use super::aborts::{Aborts, Which};
use super::dialect::Dialect;
use super::fault::Faults;
use super::health::Health;
use super::instant::Ready;
use super::kv::Kv;
use super::metrics::{self, Load};
use super::pace::PrefillServer;
use super::prefixes::Prefixes;
use super::pull::Puller;
use super::recorder::Recorder;
use super::refusal::Refusal;
use super::request::Generation;
use super::rooms::Rooms;
use super::tally::{Counts, Tally};
use super::{EngineConfig, Role};

/// SGLang tells this default also where no bootstrap server runs.
const UNUSED_BOOTSTRAP_PORT: u16 = 8998;

/// One engine.
pub struct Node {
    /// As it was started.
    pub config: EngineConfig,
    /// New with each start, so that a hand-off from before a restart is known as such.
    pub engine_id: String,
    /// When it started, in seconds since 1970.
    started: f64,
    /// KV blocks and leases.
    pub kv: Rc<Kv>,
    /// The place where prompts are computed.
    pub prefill: PrefillServer,
    /// What is kept of prompts computed.
    pub prefixes: Prefixes,
    /// The way to other engines' blocks.
    pub puller: Puller,
    /// Where an SGLang prefill engine's KV meets its decodes.
    pub rooms: Rc<Rooms>,
    /// An SGLang prefill engine's bootstrap server.
    pub bootstrap: Option<SocketAddr>,
    /// Requests that can be aborted.
    pub aborts: Rc<Aborts>,
    /// What health probes are told.
    pub health: Health,
    /// What is to go wrong.
    pub faults: Faults,
    /// What was done.
    pub tally: Rc<Tally>,
    /// What was asked.
    pub recorder: Recorder,
    /// Ready-made answers, where it only pretends.
    pub ready: Option<Ready>,
}

/// Seconds since 1970.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// The answer to `GET /__state`, and what a stopped engine leaves.
#[derive(Clone, Debug, Serialize)]
pub struct State {
    /// What the engine does.
    pub role: Role,
    /// New with each start.
    pub engine_id: String,
    /// What was done.
    #[serde(flatten)]
    pub counts: Counts,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Prompt tokens computed here.
    pub computed_tokens: u64,
    /// Hand-offs issued.
    pub issued: u64,
    /// Hand-offs pulled.
    pub pulled: u64,
    /// Hand-offs whose lease ended before a pull.
    pub expired: u64,
    /// Hand-offs issued and neither pulled, under lease nor dropped on request: expired or lost.
    pub leaked: u64,
    /// Requests refused because of their hand-off.
    pub refused: u64,
    /// The same.
    pub refused_handoffs: u64,
    /// Hand-offs issued.
    pub handoffs_issued: u64,
    /// Hand-offs pulled.
    pub handoffs_consumed: u64,
    /// Hand-offs whose lease ended before a pull.
    pub handoffs_expired: u64,
    /// Hand-offs dropped through `POST /abort_request`.
    pub handoffs_aborted: u64,
    /// Blocks of all hand-offs issued.
    pub blocks_issued: u64,
    /// Blocks of the hand-offs pulled.
    pub blocks_pulled: u64,
    /// Issued minus pulled.
    pub blocks_unpulled: u64,
    /// Blocks not free now.
    pub blocks_used: u32,
    /// Rooms that a leg has come to and that are not over.
    pub rooms_open: usize,
}

impl Node {
    /// An engine that has done nothing yet, with its bootstrap server where it has one.
    pub fn new(config: EngineConfig, bootstrap: Option<SocketAddr>) -> Rc<Self> {
        let lease = config.dialect.lease(&config);
        Rc::new(Self {
            engine_id: format!("{:032x}", rand::random::<u128>()),
            started: now(),
            kv: Kv::new(config.kv_blocks, lease),
            rooms: Rc::default(),
            bootstrap,
            aborts: Rc::default(),
            health: Health::default(),
            faults: Faults::default(),
            prefill: PrefillServer::new(),
            prefixes: Prefixes::new(&config),
            puller: Puller::new(),
            tally: Rc::default(),
            recorder: Recorder::default(),
            ready: config
                .instantly
                .map(|how| Ready::new(how, config.role, &config.model)),
            config,
        })
    }

    /// The blocks that a request's prompts take here.
    pub fn blocks_of(&self, generation: &Generation) -> u64 {
        let blocks = generation.prompt_blocks(self.config.block_tokens);
        match self.config.dialect.hands_over_sequences() {
            true => blocks * generation.choices,
            false => blocks,
        }
    }

    /// Whether the prompts fit into the engine at all, in vLLM's words.
    pub fn check_fits(&self, generation: &Generation) -> Result<(), Refusal> {
        if self.blocks_of(generation) <= u64::from(self.config.kv_blocks) {
            return Ok(());
        }
        Err(too_long(self.longest_prompt(), generation.prompt_tokens()))
    }

    /// Refuses what does not fit into the model's context, where it has a limit, and cuts the output at its end.
    ///
    /// # Errors
    /// [`Refusal::BadParameter`] that names what is too long.
    pub fn keep_within_context(&self, generation: &mut Generation) -> Result<(), Refusal> {
        let Some(context) = self.config.max_model_len else {
            return Ok(());
        };
        let longest = generation.prompts.iter().copied().max().unwrap_or_default();
        if longest > context {
            return Err(too_long(context, longest));
        }
        let asked = generation.output_tokens;
        let (name, left) = (generation.endpoint.limit(), context - longest);
        let problem = match (asked > context, left) {
            (true, _) => format!(
                "{name}={asked} cannot be greater than max_model_len={context}. Please request fewer output tokens."
            ),
            (false, 0) => "max_tokens must be at least 1, got 0.".to_owned(),
            (false, _) => {
                generation.output_tokens = asked.min(left);
                return Ok(());
            }
        };
        Err(Refusal::BadParameter { name, problem })
    }

    /// The counters as of now.
    pub fn state(&self) -> State {
        let (blocks_used, leases) = self.kv.counts();
        let counts = self.tally.counts();
        State {
            role: self.config.role,
            engine_id: self.engine_id.clone(),
            cached_tokens: counts.prompt_tokens_cached,
            computed_tokens: counts.prompt_tokens_computed,
            issued: leases.issued,
            pulled: leases.consumed,
            expired: leases.expired,
            leaked: leases.expired + leases.lost,
            refused: counts.refused_handoffs(),
            refused_handoffs: counts.refused_handoffs(),
            counts,
            handoffs_issued: leases.issued,
            handoffs_consumed: leases.consumed,
            handoffs_expired: leases.expired,
            handoffs_aborted: leases.revoked,
            blocks_issued: leases.blocks_issued,
            blocks_pulled: leases.blocks_pulled,
            blocks_unpulled: leases.blocks_issued - leases.blocks_pulled,
            blocks_used,
            rooms_open: self.rooms.count_open(&self.kv),
        }
    }

    /// Whether decode engines pull from it, as vLLM's do with its NixlConnector.
    pub fn pulled_from(&self) -> bool {
        matches!(self.config.dialect, Dialect::Vllm | Dialect::Llmd)
            && self.config.role == Role::Prefill
    }

    /// Tokens of the longest prompt that fits.
    pub fn longest_prompt(&self) -> u64 {
        u64::from(self.config.block_tokens) * u64::from(self.config.kv_blocks)
    }

    /// Tokens of the longest context, as it tells it.
    pub fn context(&self) -> u64 {
        self.config.max_model_len.unwrap_or(self.longest_prompt())
    }

    /// The OpenAI list of the one model.
    pub fn models(&self) -> String {
        let model = &self.config.model;
        let mut listed = json!({
            "id": model, "object": "model", "created": 0, "owned_by": "pd-harness", "root": model,
            "parent": null, "max_model_len": self.context(),
        });
        if self.config.dialect.is_vllm() {
            listed["permission"] = json!([{
                "id": "modelperm-0", "object": "model_permission", "created": 0,
                "allow_create_engine": false, "allow_sampling": true, "allow_logprobs": true,
                "allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false,
                "organization": "*", "group": null, "is_blocking": false,
            }]);
        }
        json!({"object": "list", "data": [listed]}).to_string()
    }

    /// What an SGLang server tells of its model.
    pub fn model_info(&self) -> String {
        let model = &self.config.model;
        json!({"model_path": model, "tokenizer_path": model, "is_generation": true,
            "preferred_sampling_params": null, "weight_version": "default",
            "has_image_understanding": false, "has_audio_understanding": false})
        .to_string()
    }

    /// What an SGLang server tells of its configuration.
    pub fn server_info(&self) -> String {
        let EngineConfig {
            role,
            model,
            block_tokens,
            dp_size,
            ..
        } = &self.config;
        let mode = match role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Aggregated => "null",
        };
        let port = self.bootstrap.map_or(UNUSED_BOOTSTRAP_PORT, |at| at.port());
        json!({"model_path": model, "served_model_name": model, "disaggregation_mode": mode,
            "disaggregation_bootstrap_port": port, "dp_size": dp_size, "tp_size": 1,
            "load_balance_method": "follow_bootstrap_room", "page_size": block_tokens,
            "max_total_num_tokens": self.longest_prompt()})
        .to_string()
    }

    /// Prometheus text with the names of the engine simulated.
    pub fn metrics(&self) -> String {
        let counts = self.tally.counts();
        let (blocks_used, _) = self.kv.counts();
        let load = Load {
            model: &self.config.model,
            running: counts.running,
            waiting: counts.waiting,
            blocks_used,
            blocks: self.config.kv_blocks,
            block_tokens: self.config.block_tokens,
            started: self.started,
            padded_to: self.config.metrics_padding,
        };
        metrics::write(self.config.dialect, &load)
    }

    /// Ends the requests meant, running or done with KV that waits for its decode.
    pub fn abort(&self, which: &Which) {
        let dropped = self.rooms.abort(which, &self.kv);
        let told = self.aborts.tell(which);
        let aborted: HashSet<String> = dropped.into_iter().chain(told).collect();
        self.tally.aborted_by_request(aborted.len());
    }
}

fn too_long(context: u64, tokens: u64) -> Refusal {
    Refusal::BadParameter {
        name: "input_tokens",
        problem: format!(
            "This model's maximum context length is {context} tokens. However, your prompt contains {tokens} input tokens. \
             Please reduce the length of the input prompt."
        ),
    }
}
