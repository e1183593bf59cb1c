//! Writes an engine's load as Prometheus text, with the names of the engine simulated.

use super::dialect::Dialect;

/// What is told.
pub struct Load<'a> {
    /// The model served.
    pub model: &'a str,
    /// Requests that compute or generate.
    pub running: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// KV blocks in use.
    pub blocks_used: u32,
    /// KV blocks in all.
    pub blocks: u32,
    /// Tokens per KV block.
    pub block_tokens: u32,
}

/// What one engine calls its gauges.
struct Names {
    prefix: &'static str,
    labels: &'static str,
    running: &'static str,
    waiting: &'static str,
    usage: &'static str,
    block_tokens: &'static str,
    blocks: &'static str,
}

const VLLM: Names = Names {
    prefix: "vllm:",
    labels: r#"engine="0","#,
    running: "num_requests_running",
    waiting: "num_requests_waiting",
    usage: "kv_cache_usage_perc",
    block_tokens: "block_size",
    blocks: "num_gpu_blocks",
};

const TRTLLM: Names = Names {
    prefix: "trtllm_",
    labels: "",
    running: "num_requests_running",
    waiting: "num_requests_waiting",
    usage: "kv_cache_utilization",
    block_tokens: "tokens_per_block",
    blocks: "num_blocks",
};

const SGLANG: Names = Names {
    prefix: "sglang:",
    labels: "",
    running: "num_running_reqs",
    waiting: "num_queue_reqs",
    usage: "token_usage",
    block_tokens: "page_size",
    blocks: "num_pages",
};

/// The text.
pub fn write(dialect: Dialect, load: &Load) -> String {
    let names = match dialect {
        Dialect::Vllm | Dialect::Mooncake => &VLLM,
        Dialect::Trtllm => &TRTLLM,
        Dialect::Sglang => &SGLANG,
    };
    let gauge = |name: &str, help: &str, labels: &str, value: f64| {
        let Names {
            prefix,
            labels: engine,
            ..
        } = names;
        let model = label(load.model);
        format!(
            "# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} gauge\n\
             {prefix}{name}{{{engine}model_name=\"{model}\"{labels}}} {value:?}\n"
        )
    };
    let cache = format!(
        ",{}=\"{}\",{}=\"{}\"",
        names.block_tokens, load.block_tokens, names.blocks, load.blocks
    );
    [
        gauge(
            names.running,
            "Number of requests that compute or generate.",
            "",
            load.running as f64,
        ),
        gauge(
            names.waiting,
            "Number of requests waiting to be processed.",
            "",
            load.waiting as f64,
        ),
        gauge(
            names.usage,
            "Part of the KV cache in use, from 0 to 1.",
            "",
            f64::from(load.blocks_used) / f64::from(load.blocks),
        ),
        gauge(
            "cache_config_info",
            "The KV cache's configuration.",
            &cache,
            1.0,
        ),
    ]
    .concat()
}

fn label(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
