//! Owns the list of contenders, and the plugin configuration of those that are pd-router.

use serde_json::{Value, json};

use super::fleet::{Engines, MODEL};
use super::peers::{EngineAddresses, Peer};

/// One gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// Envoy, with the decode engines only.
    Envoy,
    /// Envoy with a filter in Wasm that does less than pd-router.
    Lesser(LesserFilter),
    /// Envoy with pd-router.
    Ours(OwnSetup),
    /// The wasmtime host with pd-router, NIXL.
    Wasmtime,
    /// Another router.
    Peer(Peer),
    /// Envoy in front of another router.
    Behind(Peer),
}

/// Work of a lesser filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LesserFilter {
    /// Nothing.
    Empty,
    /// Buffers the body.
    Buffer,
    /// Parses the body as well.
    Parse,
    /// Parses the body twice.
    ParseTwice,
}

impl LesserFilter {
    /// The filter's configuration.
    pub fn configuration(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Buffer => "buffer",
            Self::Parse => "parse",
            Self::ParseTwice => "parse2",
        }
    }
}

/// Configuration of pd-router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnSetup {
    /// Aggregated engines.
    Aggregated,
    /// Dynamo frontends, which run the legs.
    Direct,
    /// The same, without reading the answers.
    Unread,
    /// vLLM's hand-off.
    Nixl,
    /// SGLang's hand-off.
    Sglang,
}

impl Contender {
    /// Name in reports.
    pub fn name(self) -> String {
        match self {
            Self::Envoy => "envoy".to_owned(),
            Self::Lesser(lesser) => format!("envoy+{}", lesser.configuration()),
            Self::Ours(ours) => format!("pd-router {}", ours.name()),
            Self::Wasmtime => "pd-router wasmtime".to_owned(),
            Self::Peer(peer) => peer.name().to_owned(),
            Self::Behind(peer) => format!("envoy+{}", peer.name()),
        }
    }
}

impl OwnSetup {
    fn name(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Direct => "direct",
            Self::Unread => "direct, no accounting",
            Self::Nixl => "nixl",
            Self::Sglang => "sglang",
        }
    }

    /// The plugin's configuration in front of these engines: defaults where possible.
    pub fn configuration(self, engines: &Engines) -> Value {
        let pool = match self {
            Self::Aggregated => json!({
                "protocol": "aggregated",
                "discovery": workers(engines.aggregated().into_iter().map(|at| json!({
                    "address": at, "role": "aggregated", "model": MODEL}))),
            }),
            Self::Direct => direct(engines),
            Self::Unread => {
                let mut pool = direct(engines);
                pool["output"] = json!({"accounting": false});
                pool
            }
            Self::Nixl => nixl(&engines.vllm.addresses()),
            Self::Sglang => sglang(&engines.sglang.addresses()),
        };
        document(pool)
    }
}

/// A pool of vLLM's engines.
pub fn nixl(fleet: &EngineAddresses) -> Value {
    json!({"protocol": "nixl", "discovery": workers(legs(fleet))})
}

/// A pool of SGLang's engines.
pub fn sglang(fleet: &EngineAddresses) -> Value {
    json!({"protocol": "sglang", "discovery": workers(legs(fleet))})
}

/// The configuration of one pool.
pub fn document(mut pool: Value) -> Value {
    pool["name"] = json!("bench");
    json!({"pools": [pool]})
}

fn direct(engines: &Engines) -> Value {
    let role_of = |role: &str, ids: [u64; 2]| {
        let role = role.to_owned();
        ids.map(move |id| json!({"id": id, "role": role, "model": MODEL}))
    };
    json!({
        "protocol": "direct",
        "frontends": engines.aggregated(),
        "discovery": workers(role_of("prefill", [11, 12]).into_iter().chain(role_of("decode", [21, 22]))),
    })
}

fn legs(fleet: &EngineAddresses) -> impl Iterator<Item = Value> {
    let prefill = fleet.prefill.iter().map(|(at, bootstrap)| {
        let mut worker = json!({"address": at, "role": "prefill", "model": MODEL});
        if let Some(bootstrap) = bootstrap {
            worker["bootstrap_port"] = json!(bootstrap.port());
        }
        worker
    });
    let decode = fleet.decode.iter();
    prefill.chain(decode.map(|at| json!({"address": at, "role": "decode", "model": MODEL})))
}

fn workers(list: impl Iterator<Item = Value>) -> Value {
    json!({"static": {"workers": list.collect::<Vec<_>>()}})
}
