//! Writes an engine's load as Prometheus text, with the names of the engine simulated.

use std::fmt::Write;

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
    /// When the engine started, in seconds since 1970.
    pub started: f64,
    /// Bytes that the page has at least: a real engine's has tens of thousands, most of them histograms.
    pub padded_to: usize,
}

/// What one engine calls its gauges.
struct Names {
    prefix: &'static str,
    labels: &'static str,
    running: &'static str,
    waiting: &'static str,
    usage: &'static str,
    cache: Cache,
}

/// How one engine tells the size of its KV cache.
enum Cache {
    /// As labels of one gauge whose value means nothing.
    Info {
        block_tokens: &'static str,
        blocks: &'static str,
    },
    /// As gauges.
    Gauges {
        block_tokens: &'static str,
        blocks: &'static str,
    },
}

const VLLM: Names = Names {
    prefix: "vllm:",
    labels: r#"engine="0","#,
    running: "num_requests_running",
    waiting: "num_requests_waiting",
    usage: "kv_cache_usage_perc",
    cache: Cache::Info {
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
        block_tokens: "page_size",
        blocks: "num_pages",
    },
};

/// The text.
pub fn write(dialect: Dialect, load: &Load) -> String {
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
    fn load(&self, load: &Load) -> String {
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
        .map(|(name, help, value)| self.gauge(load, name, help, "", value))
        .concat()
    }

    fn cache(&self, load: &Load) -> String {
        const HELP: &str = "The KV cache's configuration.";
        match self.cache {
            Cache::Info {
                block_tokens,
                blocks,
            } => {
                let more = format!(
                    ",{block_tokens}=\"{}\",{blocks}=\"{}\"",
                    load.block_tokens, load.blocks
                );
                self.gauge(load, "cache_config_info", HELP, &more, 1.0)
            }
            Cache::Gauges {
                block_tokens,
                blocks,
            } => [(block_tokens, load.block_tokens), (blocks, load.blocks)]
                .map(|(name, value)| self.gauge(load, name, HELP, "", value.into()))
                .concat(),
        }
    }

    fn gauge(&self, load: &Load, name: &str, help: &str, more: &str, value: f64) -> String {
        let prefix = self.prefix;
        format!(
            "# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} gauge\n{prefix}{name}{{{}{more}}} {value:?}\n",
            self.labels(load)
        )
    }

    fn labels(&self, load: &Load) -> String {
        format!("{}model_name=\"{}\"", self.labels, label(load.model))
    }

    /// Histograms that say nothing, as many as it takes.
    fn pad(&self, page: &mut String, load: &Load) {
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

/// Those of a usual latency histogram, in seconds.
const BOUNDS: [f64; 12] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

fn label(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use routing::engine_metrics::{Figures, parse};

    use super::*;

    /// The router's own reader finds the figures on every page, however long.
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
                let load = Load {
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
