//! Owns `pd-harness engine`: one engine in its own process.

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::dialect::DIALECTS;
use super::fault::FAULTS;
use super::marker::MARKERS;
use super::pace::TIME_MODEL;
use super::prefixes::PREFIX_CACHE;
use super::{Dialect, Engine, EngineConfig, EngineError, InstantSettings, PrefixCache, Role};
use crate::cli::within;
use crate::logging;
use crate::run::stop;

/// Arguments of `pd-harness engine`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = format!("{TIME_MODEL}\n\n{PREFIX_CACHE}\n\n{DIALECTS}\n\n{MARKERS}\n\n{FAULTS}"))]
pub struct Args {
    /// Role: prefill computes prompts and hands their KV off, decode generates from KV handed to it, aggregated does both itself.
    #[arg(long, value_parser = PossibleValuesParser::new(Role::ALL.map(Role::name)).try_map(role))]
    role: Role,
    /// Engine whose hand-off protocol is spoken.
    #[arg(long, default_value = "vllm")]
    dialect: Dialect,
    /// Address to serve on; port 0 takes a free one.
    #[arg(long, default_value_t = defaults().listen)]
    listen: SocketAddr,
    /// Name of the one model served.
    #[arg(long, default_value_t = defaults().model)]
    model: String,
    /// Factor that divides all computing times.
    #[arg(long, default_value_t = defaults().speedup)]
    speedup: f64,
    /// Tokens per KV block.
    #[arg(long, default_value_t = defaults().block_tokens)]
    block_tokens: u32,
    /// KV blocks of the engine.
    #[arg(long, default_value_t = defaults().kv_blocks)]
    kv_blocks: u32,
    /// Time for which a hand-off is held for its pull, in milliseconds; not sped up.
    #[arg(long, default_value_t = defaults().lease.as_millis() as u64)]
    lease_ms: u64,
    /// Prompt tokens computed per second.
    #[arg(long, default_value_t = defaults().prefill_rate)]
    prefill_rate: f64,
    /// Milliseconds per output token of each running request.
    #[arg(long, default_value_t = defaults().token_ms)]
    token_ms: f64,
    /// sglang, mooncake: port of a prefill engine's bootstrap server; 0 takes a free one.
    #[arg(long, default_value_t = defaults().bootstrap_port)]
    bootstrap_port: u16,
    /// sglang, mooncake: data-parallel ranks.
    #[arg(long, default_value_t = defaults().dp_size)]
    dp_size: u32,
    /// sglang, mooncake: time for which a leg waits for the other, in milliseconds; not sped up.
    #[arg(long, default_value_t = defaults().partner_timeout.as_millis() as u64)]
    partner_timeout_ms: u64,
    /// sglang: time from the hand-over of its KV to the failure of a prefill marked to fail late, in milliseconds; not sped up.
    #[arg(long, default_value_t = defaults().late.as_millis() as u64)]
    late_ms: u64,
    /// Maximum tokens of a prompt and its output; without it prompts must fit the blocks, and output may be of any length.
    #[arg(long, value_name = "TOKENS")]
    max_model_len: Option<u64>,
    /// Minimum bytes of /metrics: a real engine's has some 60,000.
    #[arg(long, value_name = "BYTES", default_value_t = defaults().metrics_padding)]
    metrics_padding: usize,
    /// Only pretend: answer chat completions and completions at once with prepared answers, check nothing, hold nothing. For
    /// measuring what stands in front of an engine.
    #[arg(long)]
    instant: bool,
    /// With --instant: milliseconds between two events of a stream; 0 sends each as fast as it can be written.
    #[arg(long, value_name = "MS", default_value_t = 0.0, requires = "instant", value_parser = |text: &str| within(text, 0.0..=60_000.0, "milliseconds, from 0 to 60000"))]
    gap_ms: f64,
    /// Keep the KV of computed prompts, as --kv-blocks blocks, and compute only what follows the longest prefix kept.
    #[arg(long)]
    prefix_cache: bool,
    /// Print one JSON line when ready, for machines.
    #[arg(long)]
    json: bool,
    /// Stop when stdin closes, so that the engine does not outlive the process that started it.
    #[arg(long)]
    until_stdin_closes: bool,
}

fn role(name: String) -> Result<Role, &'static str> {
    let found = Role::ALL.into_iter().find(|role| role.name() == name);
    found.ok_or("no role")
}

/// The defaults of all engines.
fn defaults() -> EngineConfig {
    EngineConfig::new(Role::Aggregated)
}

impl Args {
    fn config(&self) -> EngineConfig {
        EngineConfig {
            role: self.role,
            dialect: self.dialect,
            listen: self.listen,
            model: self.model.clone(),
            speedup: self.speedup,
            block_tokens: self.block_tokens,
            kv_blocks: self.kv_blocks,
            lease: Duration::from_millis(self.lease_ms),
            prefill_rate: self.prefill_rate,
            token_ms: self.token_ms,
            bootstrap_port: self.bootstrap_port,
            dp_size: self.dp_size,
            partner_timeout: Duration::from_millis(self.partner_timeout_ms),
            late: Duration::from_millis(self.late_ms),
            max_model_len: self.max_model_len,
            metrics_padding: self.metrics_padding,
            instantly: self.instant.then(|| InstantSettings {
                gap: Duration::from_secs_f64(self.gap_ms / 1000.0),
            }),
            prefix_cache: match self.prefix_cache {
                true => PrefixCache::Lru,
                false => PrefixCache::Off,
            },
        }
    }
}

/// Runs one engine until SIGINT or SIGTERM, or the end of stdin if requested.
///
/// # Errors
/// When the arguments are invalid, or the address cannot be bound.
pub fn run(args: Args) -> Result<(), EngineError> {
    logging::begin("error");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(EngineError::Runtime)?;
    runtime.block_on(async {
        let stop = stop::requested(args.until_stdin_closes).map_err(EngineError::Runtime)?;
        let engine = Engine::start(args.config()).await?;
        announce(&args, &engine).map_err(EngineError::Runtime)?;
        stop.await;
        engine.stop().await;
        Ok(())
    })
}

fn announce(args: &Args, engine: &Engine) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let (role, address) = (args.role.name(), engine.address);
    if args.json {
        let bootstrap = match engine.bootstrap {
            Some(at) => format!(r#","bootstrap":"{at}""#),
            None => String::new(),
        };
        writeln!(
            out,
            r#"{{"ready":true,"role":"{role}","address":"{address}"{bootstrap}}}"#
        )?;
    } else {
        let model = &args.model;
        let bootstrap = match engine.bootstrap {
            Some(at) => format!(", bootstrap server on {at}"),
            None => String::new(),
        };
        writeln!(
            out,
            "simulated {role} engine, model {model}, on http://{address}{bootstrap} (state: /__state, metrics: /metrics)"
        )?;
    }
    out.flush()
}
