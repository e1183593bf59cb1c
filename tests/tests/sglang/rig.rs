//! SGLang engines, and the two sources of their bootstrap ports.

use pd_router_e2e::Proxy;
use pd_router_e2e::engines::{Engine, Fleet, static_config, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

pub const CHAT: &str = "/v1/chat/completions";

pub const QUICK: &[&str] = &["--dialect", "sglang", "--speedup", "50"];

/// Source of the bootstrap ports.
#[derive(Clone, Copy, Debug)]
pub enum Ports {
    /// From the list of workers.
    Listed,
    /// From the workers.
    Fetched,
}

pub struct Rig {
    pub fleet: Fleet,
    pub gateway: Gateway,
}

impl Rig {
    pub async fn start(proxy: Proxy, options: &[&str], counts: (usize, usize)) -> Rig {
        Rig::start_with(proxy, options, counts, Ports::Listed, json!({})).await
    }

    /// A gateway with further fields for each worker's entry.
    pub async fn start_with(
        proxy: Proxy,
        options: &[&str],
        (prefill, decode): (usize, usize),
        ports: Ports,
        entry: Value,
    ) -> Rig {
        let fleet = Fleet::start(prefill, decode, options).await;
        let listed = |engine: &Engine| {
            let line = with(engine.listed(), entry.clone());
            match (ports, engine.bootstrap) {
                (Ports::Listed, Some(bootstrap)) => {
                    with(line, json!({"bootstrap_port": bootstrap.port()}))
                }
                _ => line,
            }
        };
        let config = static_config(fleet.engines().map(listed).collect(), pool(ports));
        let gateway = Gateway::start(proxy, &config, &[]).await;
        gateway.is_ready().await;
        Rig { fleet, gateway }
    }

    /// Waits until no engine runs anything and the gateway has no booking.
    pub async fn assert_comes_to_rest(&self) {
        eventually("no engine runs anything", GENEROUS, || async {
            let prefill = self.fleet.prefill_total().await;
            let decode = self.fleet.decode_total().await;
            if prefill.running + decode.running == 0 {
                return Ok(());
            }
            Err(format!("{prefill:?} {decode:?}"))
        })
        .await;
        self.gateway.assert_comes_to_rest().await;
    }

    /// Fails if any engine refused a leg.
    pub async fn assert_none_refused(&self) {
        for engine in self.fleet.engines() {
            let state = engine.state().await;
            assert_eq!(state.refused(), 0, "{}: {state:?}", engine.role.as_str());
        }
    }
}

pub fn pool(ports: Ports) -> Value {
    let bootstrap = match ports {
        // No server listens on the default port, so every worker's own must be used.
        Ports::Listed => json!({"port": 1}),
        Ports::Fetched => json!("ask"),
    };
    json!({"protocol": "sglang", "bootstrap": bootstrap, "trust_clients": true})
}
