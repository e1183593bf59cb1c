//! What the end-to-end tests share: starting gateways, engines and Dynamo, talking to them, and reading what they say.
//!
//! Nothing here is ever skipped: a missing part makes the test fail with a sentence that says what to run.
#![forbid(unsafe_code)]

pub mod client;
pub mod dynamo;
pub mod engines;
pub mod gateway;
pub mod json_text;
pub mod metrics;
pub mod paths;
pub mod process;
pub mod raw;
pub mod sse;
pub mod wait;

/// The host that the plugin runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proxy {
    /// The project's own host, wasmtime and hyper.
    Wasmtime,
    /// Real Envoy.
    Envoy,
}

impl Proxy {
    /// The value of `pd-harness run --proxy`.
    pub fn as_str(self) -> &'static str {
        match self {
            Proxy::Wasmtime => "wasmtime",
            Proxy::Envoy => "envoy",
        }
    }
}
