//! Owns the engines behind contenders; most give prepared answers, so that only the contender in front is measured.

use std::net::SocketAddr;
use std::time::Duration;

use super::peers::EngineAddresses;
use crate::engine::{Dialect, Engine, EngineConfig, EngineError, InstantSettings, Role};

/// The model of all engines.
pub const MODEL: &str = "sim";

/// Number of engines of each role.
#[derive(Clone, Copy, Debug)]
pub struct EngineCounts {
    /// Prefill engines.
    pub prefill: usize,
    /// Decode engines.
    pub decode: usize,
}

/// Engines of each role that only pretend: the fewest that leave a choice.
const EACH: usize = 2;

/// Engines of one dialect.
pub struct DisaggregatedEngines {
    prefill: Vec<Engine>,
    decode: Vec<Engine>,
}

impl DisaggregatedEngines {
    /// Starts the engines, each on its own thread and a free loopback port, with the configuration of its role from `config`.
    ///
    /// # Errors
    /// When an engine cannot start.
    pub async fn start(
        counts: EngineCounts,
        config: impl Fn(Role) -> EngineConfig,
    ) -> Result<Self, EngineError> {
        Ok(Self {
            prefill: several(counts.prefill, || config(Role::Prefill)).await?,
            decode: several(counts.decode, || config(Role::Decode)).await?,
        })
    }

    /// Addresses of the engines.
    pub fn addresses(&self) -> EngineAddresses {
        let prefill = self.prefill.iter();
        EngineAddresses {
            prefill: prefill
                .map(|engine| (engine.address, engine.bootstrap))
                .collect(),
            decode: self.decode.iter().map(|engine| engine.address).collect(),
        }
    }

    /// Ends the engines.
    pub async fn stop(self) {
        for engine in self.prefill.into_iter().chain(self.decode) {
            engine.stop().await;
        }
    }
}

/// All engines.
pub struct Engines {
    /// Engines with vLLM's protocol.
    pub vllm: DisaggregatedEngines,
    /// Engines with SGLang's protocol.
    pub sglang: DisaggregatedEngines,
    aggregated: Vec<Engine>,
}

impl Engines {
    /// Starts the engines, each on its own thread and a free loopback port; `gap` is the time between two events of a stream.
    ///
    /// # Errors
    /// When an engine cannot start.
    pub async fn start(gap: Duration) -> Result<Self, EngineError> {
        let how = InstantSettings { gap };
        let counts = EngineCounts {
            prefill: EACH,
            decode: EACH,
        };
        let legs =
            |dialect| DisaggregatedEngines::start(counts, move |role| instant(role, dialect, how));
        Ok(Self {
            vllm: legs(Dialect::Vllm).await?,
            sglang: legs(Dialect::Sglang).await?,
            aggregated: several(EACH, || instant(Role::Aggregated, Dialect::Vllm, how)).await?,
        })
    }

    /// Addresses of the engines of this dialect.
    pub fn of(&self, dialect: Dialect) -> EngineAddresses {
        match dialect {
            Dialect::Sglang => self.sglang.addresses(),
            _ => self.vllm.addresses(),
        }
    }

    /// Engines that run aggregated requests; also used as frontends.
    pub fn aggregated(&self) -> Vec<SocketAddr> {
        self.aggregated
            .iter()
            .map(|engine| engine.address)
            .collect()
    }

    /// Ends the engines.
    pub async fn stop(self) {
        self.vllm.stop().await;
        self.sglang.stop().await;
        for engine in self.aggregated {
            engine.stop().await;
        }
    }
}

fn instant(role: Role, dialect: Dialect, how: InstantSettings) -> EngineConfig {
    EngineConfig {
        dialect,
        model: MODEL.to_owned(),
        instantly: Some(how),
        ..EngineConfig::new(role)
    }
}

async fn several(
    number: usize,
    config: impl Fn() -> EngineConfig,
) -> Result<Vec<Engine>, EngineError> {
    let mut engines = Vec::new();
    for _ in 0..number {
        engines.push(Engine::start(config()).await?);
    }
    Ok(engines)
}
