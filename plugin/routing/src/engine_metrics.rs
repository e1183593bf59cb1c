//! Owns what engines report in `/metrics`: the few figures that routing needs, read line by line.
//!
//! The text is Prometheus's or OpenMetrics'. A worker of many engines or ranks has a series for each; together they are the
//! worker. A figure that cannot be read is missing, even if only one of its series cannot: the rest would make the worker
//! look idler than it is.

mod sample;

use sample::Sample;

/// Longest text of a worker, in bytes; a longer one is ignored entirely. Engines of many ranks send some hundred kilobytes.
pub const MAX_TEXT: usize = 8 * 1024 * 1024;

/// One worker's figures. A missing figure is unknown, never zero.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Figures {
    /// Requests in the worker's queues.
    pub waiting: Option<u32>,
    /// Requests under way.
    pub running: Option<u32>,
    /// Used part of the worker's KV cache, 0 to 1; the mean of its engines.
    pub kv_use: Option<f32>,
    /// Blocks of all the worker's KV caches together.
    pub kv_blocks: Option<u32>,
    /// Tokens of one block; missing where its engines disagree.
    pub block_tokens: Option<u32>,
    /// Start time, in seconds since 1970; the latest of several processes.
    pub started: Option<f64>,
}

/// Reads a worker's figures from its `/metrics`.
///
/// Names are those of vLLM, SGLang, TensorRT-LLM's own server, and TensorRT-LLM in Triton; of the first two, those of
/// several versions.
pub fn parse(text: &[u8]) -> Figures {
    if text.len() > MAX_TEXT {
        return Figures::default();
    }
    let mut read = Read::default();
    let mut rest = text;
    while !rest.is_empty() {
        let line;
        (line, rest) = first_line(rest);
        read.take(line);
    }
    read.figures()
}

/// The first line, without its end, and what follows it.
fn first_line(text: &[u8]) -> (&[u8], &[u8]) {
    let end = memchr::memchr(b'\n', text).unwrap_or(text.len());
    let (line, rest) = text.split_at_checked(end).unwrap_or((text, &[]));
    (line, rest.get(1..).unwrap_or_default())
}

/// Figures read so far. Where an engine has had two names for a figure, some versions serve both: the newer name counts.
#[derive(Default)]
struct Read {
    waiting: Tally,
    running: Tally,
    kv_use: Tally,
    older_kv_use: Tally,
    kv_blocks: Tally,
    older_kv_blocks: Tally,
    block_tokens: Tally,
    older_block_tokens: Tally,
    started: Tally,
}

impl Read {
    fn take(&mut self, line: &[u8]) {
        let Some(sample) = Sample::of(line) else {
            return;
        };
        let tally = match sample.name {
            b"vllm:num_requests_waiting"
            | b"sglang:num_queue_reqs"
            | b"trtllm_num_requests_waiting" => &mut self.waiting,
            b"vllm:num_requests_running"
            | b"sglang:num_running_reqs"
            | b"trtllm_num_requests_running" => &mut self.running,
            b"vllm:kv_cache_usage_perc"
            | b"sglang:token_usage"
            | b"trtllm_kv_cache_utilization" => &mut self.kv_use,
            b"vllm:gpu_cache_usage_perc" => &mut self.older_kv_use,
            b"sglang:num_pages" | b"trtllm_kv_cache_max_blocks" => &mut self.kv_blocks,
            b"sglang:page_size" | b"trtllm_kv_cache_tokens_per_block" => &mut self.block_tokens,
            b"process_start_time_seconds" => &mut self.started,
            b"vllm:cache_config_info" => {
                return self.cache_config(&sample, b"num_gpu_blocks", b"block_size");
            }
            b"sglang:cache_config_info" => {
                return self.cache_config(&sample, b"num_pages", b"page_size");
            }
            b"nv_trt_llm_request_metrics" => return self.triton_requests(&sample),
            b"nv_trt_llm_kv_cache_block_metrics" => return self.triton_blocks(&sample),
            _ => return,
        };
        if !sample.repeats_another() {
            tally.add(sample.value());
        }
    }

    /// Reads figures that are labels.
    fn cache_config(&mut self, sample: &Sample<'_>, blocks: &[u8], tokens: &[u8]) {
        if sample.repeats_another() {
            return;
        }
        self.older_kv_blocks.add(sample.number_of(blocks));
        self.older_block_tokens.add(sample.number_of(tokens));
    }

    /// Triton separates requests by a label.
    fn triton_requests(&mut self, sample: &Sample<'_>) {
        let tally = match sample.label(b"request_type") {
            Some(b"waiting") => &mut self.waiting,
            Some(b"scheduled") => &mut self.running,
            _ => return,
        };
        tally.add(sample.value());
    }

    /// Triton separates blocks by a label.
    fn triton_blocks(&mut self, sample: &Sample<'_>) {
        let tally = match sample.label(b"kv_cache_block_type") {
            Some(b"fraction") => &mut self.kv_use,
            Some(b"max") => &mut self.kv_blocks,
            Some(b"tokens_per") => &mut self.block_tokens,
            _ => return,
        };
        tally.add(sample.value());
    }

    fn figures(&self) -> Figures {
        let kv_use = self.kv_use.or(&self.older_kv_use);
        let kv_blocks = self.kv_blocks.or(&self.older_kv_blocks);
        let block_tokens = self.block_tokens.or(&self.older_block_tokens);
        Figures {
            waiting: self.waiting.sum().and_then(whole),
            running: self.running.sum().and_then(whole),
            kv_use: kv_use.mean().map(|mean| mean.min(1.0) as f32),
            // No blocks, or no tokens in a block: the cache is not set up yet.
            kv_blocks: kv_blocks.sum().and_then(whole).filter(|blocks| *blocks > 0),
            block_tokens: block_tokens
                .agreed()
                .and_then(whole)
                .filter(|tokens| *tokens > 0),
            started: self.started.most(),
        }
    }
}

/// A count that fits 32 bits.
fn whole(count: f64) -> Option<u32> {
    (count <= f64::from(u32::MAX)).then_some(count as u32)
}

/// The series of one figure.
#[derive(Default)]
struct Tally {
    count: u32,
    sum: f64,
    least: f64,
    most: f64,
    /// Whether a series could not be read.
    unreadable: bool,
}

impl Tally {
    fn add(&mut self, value: Option<f64>) {
        let Some(value) = value else {
            self.unreadable = true;
            return;
        };
        if self.count == 0 {
            (self.least, self.most) = (value, value);
        }
        self.count = self.count.saturating_add(1);
        self.sum += value;
        self.least = self.least.min(value);
        self.most = self.most.max(value);
    }

    /// This tally, or `other` where no series has this name.
    fn or<'a>(&'a self, other: &'a Self) -> &'a Self {
        match self.count == 0 && !self.unreadable {
            true => other,
            false => self,
        }
    }

    fn known(&self) -> Option<&Self> {
        (self.count > 0 && !self.unreadable).then_some(self)
    }

    fn sum(&self) -> Option<f64> {
        self.known().map(|known| known.sum)
    }

    fn mean(&self) -> Option<f64> {
        self.known().map(|known| known.sum / f64::from(known.count))
    }

    fn most(&self) -> Option<f64> {
        self.known().map(|known| known.most)
    }

    /// The value, where all series have the same one.
    fn agreed(&self) -> Option<f64> {
        let known = self.known()?;
        (known.least == known.most).then_some(known.most)
    }
}

#[cfg(test)]
mod tests;
