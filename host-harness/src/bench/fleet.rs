//! Owns the engines behind contenders; mostly with ready-made answers, so that nothing is measured but what stands in front.

use std::net::SocketAddr;
use std::time::Duration;

use super::peers::Fleet;
use crate::engine::{Dialect, Engine, EngineConfig, EngineError, Instantly, Role};

/// The model that all of them serve.
pub const MODEL: &str = "sim";

/// How many engines there are of each role.
#[derive(Clone, Copy, Debug)]
pub struct EngineCounts {
    /// Prefill engines.
    pub prefill: usize,
    /// Decode engines.
    pub decode: usize,
}

/// Of those that only pretend: the fewest among which there is a choice.
const EACH: usize = 2;

/// Engines of one dialect.
pub struct Legs {
    prefill: Vec<Engine>,
    decode: Vec<Engine>,
}

impl Legs {
    /// Starts them, each on a thread of its own and a free port of the loopback interface, as `config` has the role's.
    ///
    /// # Errors
    /// When one cannot start.
    pub async fn start(
        counts: EngineCounts,
        config: impl Fn(Role) -> EngineConfig,
    ) -> Result<Self, EngineError> {
        Ok(Self {
            prefill: several(counts.prefill, || config(Role::Prefill)).await?,
            decode: several(counts.decode, || config(Role::Decode)).await?,
        })
    }

    /// Where they are.
    pub fn fleet(&self) -> Fleet {
        let prefill = self.prefill.iter();
        Fleet {
            prefill: prefill
                .map(|engine| (engine.address, engine.bootstrap))
                .collect(),
            decode: self.decode.iter().map(|engine| engine.address).collect(),
        }
    }

    /// Ends them.
    pub async fn stop(self) {
        for engine in self.prefill.into_iter().chain(self.decode) {
            engine.stop().await;
        }
    }
}

/// All engines.
pub struct Engines {
    /// With vLLM's protocol.
    pub vllm: Legs,
    /// With SGLang's.
    pub sglang: Legs,
    whole: Vec<Engine>,
}

impl Engines {
    /// Starts them, each on a thread of its own and a free port of the loopback interface; `gap` lies between two events of a
    /// stream.
    ///
    /// # Errors
    /// When one cannot start.
    pub async fn start(gap: Duration) -> Result<Self, EngineError> {
        let how = Instantly { gap };
        let counts = EngineCounts {
            prefill: EACH,
            decode: EACH,
        };
        let legs = |dialect| Legs::start(counts, move |role| instant(role, dialect, how));
        Ok(Self {
            vllm: legs(Dialect::Vllm).await?,
            sglang: legs(Dialect::Sglang).await?,
            whole: several(EACH, || instant(Role::Aggregated, Dialect::Vllm, how)).await?,
        })
    }

    /// Where those are that speak this.
    pub fn of(&self, dialect: Dialect) -> Fleet {
        match dialect {
            Dialect::Sglang => self.sglang.fleet(),
            _ => self.vllm.fleet(),
        }
    }

    /// Engines that run whole requests; frontends as well.
    pub fn whole(&self) -> Vec<SocketAddr> {
        self.whole.iter().map(|engine| engine.address).collect()
    }

    /// Ends them.
    pub async fn stop(self) {
        self.vllm.stop().await;
        self.sglang.stop().await;
        for engine in self.whole {
            engine.stop().await;
        }
    }
}

fn instant(role: Role, dialect: Dialect, how: Instantly) -> EngineConfig {
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
