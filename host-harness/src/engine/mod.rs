//! Owns simulated inference engines, strict about the hand-off and exact in their counts of computed tokens.
//!
//! A prefill engine computes prompts and hands their KV off under a lease; a decode engine generates only from KV that it has
//! received; an aggregated engine does both. So a router's mistake shows as an error or in a counter (`GET /__state`), never as a
//! silently recomputed prompt.
//!
//! `pd-harness engine --help` describes the dialects ([`dialect`]), the model of time ([`pace`]), the prefix cache ([`prefixes`]),
//! and what makes an engine fail: markers in prompts ([`marker`]) and injected faults ([`fault`]). `POST /__health` sets the answer
//! to `GET /health`.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::LocalSet;

mod aborts;
mod answer;
mod body;
mod bootstrap;
mod cli;
mod dialect;
mod fault;
mod generate;
mod health;
mod instant;
mod kv;
mod lease;
mod marker;
mod metrics;
mod node;
mod pace;
mod prefixes;
mod pull;
mod recorder;
mod refusal;
mod request;
mod rooms;
mod server;
mod tally;
#[cfg(test)]
mod tests;
mod tokens;
mod wire;

pub use cli::{Args, run};
pub use dialect::Dialect;
pub use instant::InstantSettings;
pub use node::State;
pub use routing::fleet::Role;

use pace::Pace;
use server::ListenerKind;

/// Prefix cache of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixCache {
    /// None: every prompt is computed completely.
    #[default]
    Off,
    /// As many blocks as the engine has, evicted by least recent use.
    Lru,
}

/// Configuration of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Role of the engine.
    pub role: Role,
    /// Engine whose hand-off protocol is spoken.
    pub dialect: Dialect,
    /// Address to serve on; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Name of the one model served.
    pub model: String,
    /// Factor that divides all computing times.
    pub speedup: f64,
    /// Tokens per KV block.
    pub block_tokens: u32,
    /// KV blocks of the engine.
    pub kv_blocks: u32,
    /// Time for which a hand-off is held for its pull; not sped up.
    pub lease: Duration,
    /// Prompt tokens computed per second.
    pub prefill_rate: f64,
    /// Milliseconds per output token of each running request.
    pub token_ms: f64,
    /// SGLang, Mooncake: port of a prefill engine's bootstrap server; 0 takes a free one.
    pub bootstrap_port: u16,
    /// SGLang, Mooncake: data-parallel ranks.
    pub dp_size: u32,
    /// SGLang, Mooncake: time for which a leg waits for the other; not sped up.
    pub partner_timeout: Duration,
    /// Time from the hand-over of its KV to the failure of a prefill marked to fail late; not sped up.
    pub late: Duration,
    /// Maximum tokens of a prompt and its output, if limited.
    pub max_model_len: Option<u64>,
    /// Minimum bytes of `/metrics`.
    pub metrics_padding: usize,
    /// Instant mode: prepared answers, no checks and no computing time.
    pub instantly: Option<InstantSettings>,
    /// Prefix cache; a decode engine computes no prompts, and keeps none.
    pub prefix_cache: PrefixCache,
}

impl EngineConfig {
    /// An engine of this role on a free port of 127.0.0.1, otherwise with the defaults of `pd-harness engine`.
    pub fn new(role: Role) -> Self {
        Self {
            role,
            dialect: Dialect::default(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            model: "sim".to_owned(),
            speedup: 1.0,
            block_tokens: 16,
            kv_blocks: 4000,
            lease: Duration::from_secs(30),
            prefill_rate: 8000.0,
            token_ms: 10.0,
            bootstrap_port: 0,
            dp_size: 1,
            partner_timeout: Duration::from_secs(300),
            late: Duration::from_millis(300),
            max_model_len: None,
            metrics_padding: 0,
            instantly: None,
            prefix_cache: PrefixCache::default(),
        }
    }

    fn check(&self) -> Result<(), EngineError> {
        let above_zero = [
            ("speedup", self.speedup),
            ("prefill-rate", self.prefill_rate),
            ("block-tokens", self.block_tokens.into()),
            ("kv-blocks", self.kv_blocks.into()),
            ("dp-size", self.dp_size.into()),
        ];
        for (name, value) in above_zero {
            if !(value.is_finite() && value > 0.0) {
                return Err(EngineError::NotAboveZero(name));
            }
        }
        if !(self.token_ms.is_finite() && self.token_ms >= 0.0) {
            return Err(EngineError::BelowZero("token-ms"));
        }
        let waits = [
            ("lease-ms", self.lease),
            ("partner-timeout-ms", self.partner_timeout),
            ("late-ms", self.late),
        ];
        match waits.iter().find(|(_, wait)| *wait > LONGEST_WAIT) {
            Some((name, _)) => Err(EngineError::TooLong(name)),
            None => Ok(()),
        }
    }

    fn pace(&self) -> Pace {
        Pace {
            prefill_rate: self.prefill_rate,
            token_ms: self.token_ms,
            speedup: self.speedup,
        }
    }
}

/// Beyond any use, and well within a clock's range.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Why an engine could not run.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A setting that must be above zero is not.
    #[error("{0} must be above zero")]
    NotAboveZero(&'static str),
    /// A setting that must not be negative is.
    #[error("{0} must not be below zero")]
    BelowZero(&'static str),
    /// A time is longer than a year.
    #[error("{0} must be at most a year")]
    TooLong(&'static str),
    /// The address cannot be served on.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The requested address.
        address: SocketAddr,
        /// The system's error.
        error: std::io::Error,
    },
    /// The system refused a thread, a runtime, a signal handler or the output.
    #[error("cannot run an engine: {0}")]
    Runtime(std::io::Error),
    /// The engine's thread ended before it was ready.
    #[error("the engine ended before it was ready")]
    Ended,
}

/// A running engine, on its own thread and runtime. Dropping it stops it as [`Engine::stop`] does, without waiting.
pub struct Engine {
    /// The address served on.
    pub address: SocketAddr,
    /// Address of the bootstrap server, if there is one.
    pub bootstrap: Option<SocketAddr>,
    stop: oneshot::Sender<()>,
    ended: oneshot::Receiver<State>,
}

impl Engine {
    /// Starts an engine, which serves when this returns.
    ///
    /// # Errors
    /// When the configuration is invalid, or the address cannot be bound.
    pub async fn start(config: EngineConfig) -> Result<Self, EngineError> {
        config.check()?;
        let (started, ready) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let (alive, ended) = oneshot::channel();
        std::thread::Builder::new()
            .name(format!("engine-{}", config.role.name()))
            .spawn(move || {
                if let Some(state) = live(config, started, stopped) {
                    let _ = alive.send(state);
                }
            })
            .map_err(EngineError::Runtime)?;
        let Addresses { address, bootstrap } = ready.await.map_err(|_| EngineError::Ended)??;
        Ok(Self {
            address,
            bootstrap,
            stop,
            ended,
        })
    }

    /// Closes the listener and resets all connections at once, like the end of a process; the port is free when this returns.
    /// Returns the last counts (hand-offs under a lease are lost); `None` if the engine's thread died.
    pub async fn stop(self) -> Option<State> {
        let _ = self.stop.send(());
        self.ended.await.ok()
    }
}

/// Addresses of an engine.
struct Addresses {
    address: SocketAddr,
    bootstrap: Option<SocketAddr>,
}

/// An engine's whole life, on its own thread. Returns its last state.
fn live(
    config: EngineConfig,
    started: oneshot::Sender<Result<Addresses, EngineError>>,
    stopped: oneshot::Receiver<()>,
) -> Option<State> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = started.send(Err(EngineError::Runtime(error)));
            return None;
        }
    };
    LocalSet::new().block_on(&runtime, async {
        match listen(&config).await {
            Ok((listeners, addresses)) => {
                let node = node::EngineContext::new(config, addresses.bootstrap);
                let _ = started.send(Ok(addresses));
                let (stop, stopping) = watch::channel(());
                let serving = listeners.into_iter().map(|(listener, kind)| {
                    server::serve(listener, kind, node.clone(), stopping.clone())
                });
                let stop_signal = async {
                    let _ = stopped.await;
                    drop(stop);
                };
                tokio::join!(futures_util::future::join_all(serving), stop_signal);
                // Tasks of streams with closed connections end, and are counted, at their next poll.
                tokio::task::yield_now().await;
                Some(node.state())
            }
            Err(error) => {
                let _ = started.send(Err(error));
                None
            }
        }
    })
}

/// Opens the engine's listeners.
async fn listen(
    config: &EngineConfig,
) -> Result<(Vec<(TcpListener, ListenerKind)>, Addresses), EngineError> {
    let (listener, address) = bind(config.listen).await?;
    let mut listeners = vec![(listener, ListenerKind::Api)];
    let mut bootstrap = None;
    if config.dialect.has_bootstrap() && config.role == Role::Prefill {
        let wanted = SocketAddr::new(config.listen.ip(), config.bootstrap_port);
        let (listener, address) = bind(wanted).await?;
        listeners.push((listener, ListenerKind::Bootstrap));
        bootstrap = Some(address);
    }
    Ok((listeners, Addresses { address, bootstrap }))
}

async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), EngineError> {
    let refused = |error| EngineError::Listen { address, error };
    let listener = TcpListener::bind(address).await.map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    Ok((listener, address))
}
