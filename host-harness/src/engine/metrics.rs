//! Owns the writing of an engine's load as Prometheus text, with the metric names of the simulated engine.

use std::fmt::Write;

use pd_harness_common::prometheus::escaped;

use super::dialect::Dialect;

/// The reported figures.
pub struct EngineLoad<'a> {
    /// The model served.
    pub model: &'a str,
    /// Running requests.
    pub running: u64,
    /// Waiting requests.
    pub waiting: u64,
    /// KV blocks in use.
    pub blocks_used: u32,
    /// KV blocks in total.
    pub blocks: u32,
    /// Tokens per KV block.
    pub block_tokens: u32,
    /// Start time of the engine, in seconds since 1970.
    pub started: f64,
    /// Minimum bytes of the page: a real engine's has tens of thousands, most of them histograms.
    pub padded_to: usize,
}

/// One engine's names of its gauges.
struct Names {
    prefix: &'static str,
    labels: &'static str,
    running: &'static str,
    waiting: &'static str,
    usage: &'static str,
    cache: Cache,
}

/// Form in which an engine reports the size of its KV cache.
enum Cache {
    /// As labels of one gauge whose value means nothing.
    Info {
        /// Labels before those of the size, each followed by a comma; `None`: those of the other gauges.
        labels: Option<&'static str>,
        block_tokens: &'static str,
        blocks: &'static str,
    },
    /// As gauges.
    Gauges {
        block_tokens: &'static str,
        blocks: &'static str,
    },
}

/// vLLM 0.32's cache labels beside the size: names that end like that of the block size, string values, and no model.
pub(super) const VLLM_CACHE_LABELS: &str = concat!(
    r#"engine="0",_block_size_resolved="True",cache_dtype="auto","#,
    r#"cache_hit_alignment_tokens="None",effective_attention_block_size="32",enable_mamba_shared_prefix_checkpoint="False","#,
    r#"enable_prefix_caching="True",gpu_memory_utilization="0.92",hash_block_size="None","#,
    r#"is_attention_free="False",kv_cache_dtype_skip_layers="[]",kv_cache_layout="None","#,
    r#"kv_cache_max_concurrency="256.0",kv_cache_memory_bytes="1073741824",kv_cache_size_tokens="1048576","#,
    r#"kv_offloading_backend="native",kv_offloading_size="None",kv_sharing_fast_prefill="False","#,
    r#"mamba_block_size="None",mamba_cache_dtype="auto",mamba_cache_mode="none","#,
    r#"mamba_page_size_padded="None",mamba_ssm_cache_dtype="auto",num_cpu_blocks="None","#,
    r#"num_gpu_blocks_override="None",prefix_cache_retention_interval="0",prefix_caching_hash_algo="sha256","#,
    r#"prefix_match_unit="None",replayssm_buffer_len="16",skip_page_size_padded="None","#,
    r#"sliding_window="None",swa_bounded_replay="True",use_kda_recoverssm="False","#,
    r#"use_replayssm="False",user_specified_block_size="True","#,
);

const VLLM: Names = Names {
    prefix: "vllm:",
    labels: r#"engine="0","#,
    running: "num_requests_running",
    waiting: "num_requests_waiting",
    usage: "kv_cache_usage_perc",
    cache: Cache::Info {
        labels: Some(VLLM_CACHE_LABELS),
        block_tokens: "block_size",
        blocks: "num_gpu_blocks",
    },
};

const TRTLLM: Names = Names {
    prefix: "trtllm_",
    labels: "",
    running: "num_requests_running",
    waiting: "num_requests_waiting",
    usage: "kv_cache_utilization",
    cache: Cache::Gauges {
        block_tokens: "kv_cache_tokens_per_block",
        blocks: "kv_cache_max_blocks",
    },
};

const SGLANG: Names = Names {
    prefix: "sglang:",
    labels: "",
    running: "num_running_reqs",
    waiting: "num_queue_reqs",
    usage: "token_usage",
    cache: Cache::Info {
        labels: None,
        block_tokens: "page_size",
        blocks: "num_pages",
    },
};

/// The page's text.
pub fn write(dialect: Dialect, load: &EngineLoad) -> String {
    let names = match dialect {
        Dialect::Vllm | Dialect::Llmd | Dialect::Mooncake => &VLLM,
        Dialect::Trtllm => &TRTLLM,
        Dialect::Sglang => &SGLANG,
    };
    let mut page = format!(
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n\
         # TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {:?}\n",
        load.started
    );
    page.push_str(&names.load(load));
    page.push_str(&names.cache(load));
    names.pad(&mut page, load);
    page
}

impl Names {
    fn load(&self, load: &EngineLoad) -> String {
        let used = f64::from(load.blocks_used) / f64::from(load.blocks);
        [
            (
                self.running,
                "Number of requests that compute or generate.",
                load.running as f64,
            ),
            (
                self.waiting,
                "Number of requests waiting to be processed.",
                load.waiting as f64,
            ),
            (
                self.usage,
                "Part of the KV cache in use, from 0 to 1.",
                used,
            ),
        ]
        .map(|(name, help, value)| self.gauge(name, help, &self.labels(load), value))
        .concat()
    }

    fn cache(&self, load: &EngineLoad) -> String {
        const HELP: &str = "The KV cache's configuration.";
        match self.cache {
            Cache::Info {
                labels,
                block_tokens,
                blocks,
            } => {
                let of_others = || self.labels(load) + ",";
                let mut labels = labels.map_or_else(of_others, str::to_owned);
                let _ = write!(
                    labels,
                    "{block_tokens}=\"{}\",{blocks}=\"{}\"",
                    load.block_tokens, load.blocks
                );
                self.gauge("cache_config_info", HELP, &labels, 1.0)
            }
            Cache::Gauges {
                block_tokens,
                blocks,
            } => [(block_tokens, load.block_tokens), (blocks, load.blocks)]
                .map(|(name, value)| self.gauge(name, HELP, &self.labels(load), value.into()))
                .concat(),
        }
    }

    fn gauge(&self, name: &str, help: &str, labels: &str, value: f64) -> String {
        let prefix = self.prefix;
        format!(
            "# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} gauge\n{prefix}{name}{{{labels}}} {value:?}\n"
        )
    }

    fn labels(&self, load: &EngineLoad) -> String {
        format!("{}model_name=\"{}\"", self.labels, escaped(load.model))
    }

    /// Adds histograms without meaning until the page is long enough.
    fn pad(&self, page: &mut String, load: &EngineLoad) {
        let (prefix, labels) = (self.prefix, self.labels(load));
        for number in 0.. {
            if page.len() >= load.padded_to {
                return;
            }
            let name = format!("{prefix}simulated_{number}_seconds");
            let _ = writeln!(page, "# HELP {name} Padding.\n# TYPE {name} histogram");
            for bound in BOUNDS {
                let _ = writeln!(page, "{name}_bucket{{{labels},le=\"{bound:?}\"}} 0.0");
            }
            let _ = writeln!(
                page,
                "{name}_bucket{{{labels},le=\"+Inf\"}} 0.0\n{name}_count{{{labels}}} 0.0\n{name}_sum{{{labels}}} 0.0"
            );
        }
    }
}

/// Bounds of a usual latency histogram, in seconds.
const BOUNDS: [f64; 12] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

#[cfg(test)]
mod tests {
    use routing::engine_metrics::{Figures, parse};

    use super::*;

    /// The router's own parser finds the figures on every page, at any length.
    #[test]
    fn the_figures_are_read_as_they_are() {
        for dialect in [
            Dialect::Vllm,
            Dialect::Llmd,
            Dialect::Mooncake,
            Dialect::Sglang,
            Dialect::Trtllm,
        ] {
            for padded_to in [0, 60_000] {
                let load = EngineLoad {
                    model: "a\"b",
                    running: 3,
                    waiting: 2,
                    blocks_used: 1000,
                    blocks: 4000,
                    block_tokens: 16,
                    started: 1.75e9,
                    padded_to,
                };
                let page = write(dialect, &load);
                assert!((padded_to..padded_to + 4000).contains(&page.len()));
                let expected = Figures {
                    running: Some(3),
                    waiting: Some(2),
                    kv_use: Some(0.25),
                    kv_blocks: Some(4000),
                    block_tokens: Some(16),
                    started: Some(1.75e9),
                };
                assert_eq!(parse(page.as_bytes()), expected, "{dialect:?}: {page}");
            }
        }
    }
}
