//! Owns the state shared by all requests to one engine, and the engine's reports about itself.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::aborts::{AbortSelection, Aborts};
use super::dialect::Dialect;
use super::fault::Faults;
use super::health::HealthSwitch;
use super::instant::PreparedAnswers;
use super::kv::Kv;
use super::metrics::{self, EngineLoad};
use super::pace::PrefillServer;
use super::prefixes::Prefixes;
use super::pull::Puller;
use super::recorder::Recorder;
use super::refusal::Refusal;
use super::request::Generation;
use super::rooms::Rooms;
use super::tally::{EngineCounters, Tally};
use super::{EngineConfig, Role};

/// SGLang reports this default also if no bootstrap server runs.
const UNUSED_BOOTSTRAP_PORT: u16 = 8998;

/// One engine.
pub struct EngineContext {
    /// The engine's configuration.
    pub config: EngineConfig,
    /// New at each start, so that a hand-off from before a restart is recognised.
    pub engine_id: String,
    /// Start time, in seconds since 1970.
    started: f64,
    /// KV blocks and leases.
    pub kv: Rc<Kv>,
    /// The queue for computing prompts.
    pub prefill: PrefillServer,
    /// Prefix cache.
    pub prefixes: Prefixes,
    /// Client for other engines' blocks.
    pub puller: Puller,
    /// Rooms in which a prefill engine's KV meets its decodes.
    pub rooms: Rc<Rooms>,
    /// Address of a prefill engine's bootstrap server.
    pub bootstrap: Option<SocketAddr>,
    /// Requests that can be aborted.
    pub aborts: Rc<Aborts>,
    /// Answer to health probes.
    pub health: HealthSwitch,
    /// Injected faults.
    pub faults: Faults,
    /// Counters.
    pub tally: Rc<Tally>,
    /// Recorded requests.
    pub recorder: Recorder,
    /// Prepared answers, in instant mode.
    pub ready: Option<PreparedAnswers>,
}

/// Seconds since 1970.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// The answer to `GET /__state`, and the last state of a stopped engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// Role of the engine.
    pub role: Role,
    /// New at each start.
    pub engine_id: String,
    /// Counters.
    #[serde(flatten)]
    pub counts: EngineCounters,
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
    /// Requests refused because of their hand-off.
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
    /// Rooms that some leg has entered and that are still open.
    pub rooms_open: usize,
}

impl EngineContext {
    /// A new engine, with its bootstrap server's address if it has one.
    pub fn new(config: EngineConfig, bootstrap: Option<SocketAddr>) -> Rc<Self> {
        let lease = config.dialect.lease(&config);
        Rc::new(Self {
            engine_id: format!("{:032x}", rand::random::<u128>()),
            started: now(),
            kv: Kv::new(config.kv_blocks, lease),
            rooms: Rc::default(),
            bootstrap,
            aborts: Rc::default(),
            health: HealthSwitch::default(),
            faults: Faults::default(),
            prefill: PrefillServer::new(),
            prefixes: Prefixes::new(&config),
            puller: Puller::new(),
            tally: Rc::default(),
            recorder: Recorder::default(),
            ready: config
                .instantly
                .map(|how| PreparedAnswers::new(how, config.role, &config.model)),
            config,
        })
    }

    /// The blocks that a request's prompts need here.
    pub fn blocks_of(&self, generation: &Generation) -> u64 {
        let blocks = generation.prompt_blocks(self.config.block_tokens);
        match self.config.dialect.hands_over_sequences() {
            true => blocks * generation.choices,
            false => blocks,
        }
    }

    /// Checks that the prompts fit into the engine at all; the error is worded like vLLM's.
    pub fn check_fits(&self, generation: &Generation) -> Result<(), Refusal> {
        if self.blocks_of(generation) <= u64::from(self.config.kv_blocks) {
            return Ok(());
        }
        Err(too_long(self.longest_prompt(), generation.prompt_tokens()))
    }

    /// Refuses requests beyond the model's context, if limited, and cuts the output at its end.
    ///
    /// # Errors
    /// [`Refusal::BadParameter`] that names the excess.
    pub fn keep_within_context(&self, generation: &mut Generation) -> Result<(), Refusal> {
        let Some(context) = self.config.max_model_len else {
            return Ok(());
        };
        let longest = generation.prompts.iter().copied().max().unwrap_or_default();
        if longest > context {
            return Err(too_long(context, longest));
        }
        let requested = generation.output_tokens;
        let (name, left) = (generation.endpoint.limit(), context - longest);
        let problem = match (requested > context, left) {
            (true, _) => format!(
                "{name}={requested} cannot be greater than max_model_len={context}. Please request fewer output tokens."
            ),
            (false, 0) => "max_tokens must be at least 1, got 0.".to_owned(),
            (false, _) => {
                generation.output_tokens = requested.min(left);
                return Ok(());
            }
        };
        Err(Refusal::BadParameter { name, problem })
    }

    /// The current counters.
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

    /// Whether decode engines pull from it, as from vLLM with its NixlConnector.
    pub fn pulled_from(&self) -> bool {
        matches!(self.config.dialect, Dialect::Vllm | Dialect::Llmd)
            && self.config.role == Role::Prefill
    }

    /// Tokens of the longest prompt that fits.
    pub fn longest_prompt(&self) -> u64 {
        u64::from(self.config.block_tokens) * u64::from(self.config.kv_blocks)
    }

    /// Tokens of the longest context, as the engine reports it.
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

    /// An SGLang server's description of its model.
    pub fn model_info(&self) -> String {
        let model = &self.config.model;
        json!({"model_path": model, "tokenizer_path": model, "is_generation": true,
            "preferred_sampling_params": null, "weight_version": "default",
            "has_image_understanding": false, "has_audio_understanding": false})
        .to_string()
    }

    /// An SGLang server's description of its configuration.
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

    /// Prometheus text with the metric names of the simulated engine.
    pub fn metrics(&self) -> String {
        let counts = self.tally.counts();
        let (blocks_used, _) = self.kv.counts();
        let load = EngineLoad {
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

    /// Ends the selected requests, running ones and those whose KV waits for its decode.
    pub fn abort(&self, which: &AbortSelection) {
        let dropped = self.rooms.abort(which, &self.kv);
        let notified = self.aborts.notify(which);
        let aborted: HashSet<String> = dropped.into_iter().chain(notified).collect();
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
