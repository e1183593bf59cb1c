//! What all requests to one engine share, and what the engine tells about itself.

use std::rc::Rc;

use serde::Serialize;
use serde_json::json;

use super::kv::Kv;
use super::pace::PrefillServer;
use super::pull::Puller;
use super::recorder::Recorder;
use super::refusal::Refusal;
use super::request::Generation;
use super::tally::{Counts, Tally};
use super::{EngineConfig, Role};

/// One engine.
pub struct Node {
    /// As it was started.
    pub config: EngineConfig,
    /// New with each start, so that a hand-off from before a restart is known as such.
    pub engine_id: String,
    /// KV blocks and leases.
    pub kv: Rc<Kv>,
    /// The place where prompts are computed.
    pub prefill: PrefillServer,
    /// The way to other engines' blocks.
    pub puller: Puller,
    /// What was done.
    pub tally: Rc<Tally>,
    /// What was asked.
    pub recorder: Recorder,
}

/// The answer to `GET /__state`.
#[derive(Serialize)]
struct State {
    role: Role,
    engine_id: String,
    #[serde(flatten)]
    counts: Counts,
    handoffs_issued: u64,
    handoffs_consumed: u64,
    handoffs_expired: u64,
    blocks_issued: u64,
    blocks_pulled: u64,
    blocks_unpulled: u64,
    blocks_used: u32,
}

impl Node {
    /// An engine that has done nothing yet.
    pub fn new(config: EngineConfig) -> Rc<Self> {
        Rc::new(Self {
            engine_id: format!("{:032x}", rand::random::<u128>()),
            kv: Kv::new(config.kv_blocks, config.lease),
            prefill: PrefillServer::new(),
            puller: Puller::new(),
            tally: Rc::default(),
            recorder: Recorder::default(),
            config,
        })
    }

    /// Whether the prompts fit into the engine at all, in vLLM's words.
    pub fn check_fits(&self, generation: &Generation) -> Result<(), Refusal> {
        let EngineConfig {
            block_tokens,
            kv_blocks,
            ..
        } = self.config;
        if generation.prompt_blocks(block_tokens) <= u64::from(kv_blocks) {
            return Ok(());
        }
        Err(Refusal::BadRequest(format!(
            "This model's maximum context length is {} tokens. However, your request has {} input tokens. \
             Please reduce the length of the input messages.",
            u64::from(block_tokens) * u64::from(kv_blocks),
            generation.prompt_tokens(),
        )))
    }

    /// The counters, as JSON.
    pub fn state(&self) -> Result<Vec<u8>, serde_json::Error> {
        let (blocks_used, leases) = self.kv.counts();
        serde_json::to_vec(&State {
            role: self.config.role,
            engine_id: self.engine_id.clone(),
            counts: self.tally.counts(),
            handoffs_issued: leases.issued,
            handoffs_consumed: leases.consumed,
            handoffs_expired: leases.expired,
            blocks_issued: leases.blocks_issued,
            blocks_pulled: leases.blocks_pulled,
            blocks_unpulled: leases.blocks_issued - leases.blocks_pulled,
            blocks_used,
        })
    }

    /// The OpenAI list of the one model.
    pub fn models(&self) -> String {
        let model = &self.config.model;
        json!({"object": "list", "data": [{
            "id": model, "object": "model", "created": 0, "owned_by": "pd-harness", "root": model,
            "parent": null,
            "max_model_len": u64::from(self.config.block_tokens) * u64::from(self.config.kv_blocks),
        }]})
        .to_string()
    }

    /// Prometheus text with vLLM's names.
    pub fn metrics(&self) -> String {
        let counts = self.tally.counts();
        let (used, _) = self.kv.counts();
        let EngineConfig {
            block_tokens,
            kv_blocks,
            ..
        } = self.config;
        let model = label(&self.config.model);
        let gauge = |name: &str, help: &str, labels: &str, value: f64| {
            format!(
                "# HELP vllm:{name} {help}\n# TYPE vllm:{name} gauge\n\
                 vllm:{name}{{engine=\"0\",model_name=\"{model}\"{labels}}} {value:?}\n"
            )
        };
        let cache = format!(",block_size=\"{block_tokens}\",num_gpu_blocks=\"{kv_blocks}\"");
        [
            gauge(
                "num_requests_running",
                "Number of requests in model execution batches.",
                "",
                counts.running as f64,
            ),
            gauge(
                "num_requests_waiting",
                "Number of requests waiting to be processed.",
                "",
                counts.waiting as f64,
            ),
            gauge(
                "kv_cache_usage_perc",
                "KV-cache usage. 1 means 100 percent usage.",
                "",
                f64::from(used) / f64::from(kv_blocks),
            ),
            gauge(
                "cache_config_info",
                "Information of the LLMEngine CacheConfig",
                &cache,
                1.0,
            ),
        ]
        .concat()
    }
}

fn label(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
