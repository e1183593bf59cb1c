//! SGLang engines, and the two sources of their bootstrap ports.

use pd_router_e2e::Proxy;
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::protocols::Protocol;
use serde_json::{Value, json};

pub const CHAT: &str = "/v1/chat/completions";

/// Quick engines without a fixture.
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
    pub fixture: Fixture,
}

impl Rig {
    /// This many workers of each role, whose engines have these options.
    pub async fn start(proxy: Proxy, options: &[&'static str], counts: (usize, usize)) -> Rig {
        Rig::on(spec(proxy).only_options(options).workers(counts)).await
    }

    pub async fn on(spec: FixtureSpec) -> Rig {
        Rig {
            fixture: Fixture::acquire(spec).await,
        }
    }

    /// Waits until no engine runs anything and the gateway has no booking.
    pub async fn assert_comes_to_rest(&self) {
        self.fixture.comes_to_rest().await;
    }

    /// Releases the gateway to the next test, once no booking is open.
    pub async fn ends(self) {
        self.assert_comes_to_rest().await;
        self.fixture.release();
    }

    /// Fails if any engine refused a leg.
    pub async fn assert_none_refused(&self) {
        for engine in self.fixture.living() {
            let state = engine.state().await;
            assert_eq!(state.refused(), 0, "{}: {state:?}", engine.role.as_str());
        }
    }
}

/// Two quick workers of each role, listed with their bootstrap ports.
pub fn spec(proxy: Proxy) -> FixtureSpec {
    FixtureSpec::of(proxy, Protocol::Sglang).pool(pool(Ports::Listed))
}

pub fn pool(ports: Ports) -> Value {
    let bootstrap = match ports {
        // No server listens on the default port, so every worker's own must be used.
        Ports::Listed => json!({"port": 1}),
        Ports::Fetched => json!("ask"),
    };
    json!({"protocol": "sglang", "bootstrap": bootstrap, "trust_clients": true})
}
