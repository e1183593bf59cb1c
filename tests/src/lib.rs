//! Owns what the end-to-end tests share: starting gateways, engines and Dynamo, sending requests, and reading reports.
//!
//! No test is ever skipped: a missing part fails the test with a sentence that says what to run.
#![forbid(unsafe_code)]

pub mod client;
pub mod conversation;
pub mod dns_server;
pub mod dynamo;
pub mod endpoints;
pub mod engine_set;
pub mod engines;
pub mod fixture;
pub mod gateway;
pub mod gateway_builder;
pub mod golden;
pub mod json_text;
pub mod metrics;
pub mod paths;
pub mod plain;
pub mod process;
pub mod protocols;
pub mod raw;
pub mod scripted;
pub mod sse;
pub mod threads;
pub mod traffic;
pub mod trailer_worker;
pub mod vllm;
pub mod wait;
pub mod worker_document;

/// The plugin's host.
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

/// Turns each function of the host in a module of the suite into one test per host; with `wasmtime only` or `envoy only`, for
/// that host only.
#[macro_export]
macro_rules! on_both_hosts {
    ($($module:ident { $($name:ident,)* })*) => {
        mod wasmtime {
            $(mod $module { $($crate::on_both_hosts!(@test Wasmtime, $module, $name);)* })*
        }
        mod envoy {
            $(mod $module { $($crate::on_both_hosts!(@test Envoy, $module, $name);)* })*
        }
    };
    (wasmtime only $($module:ident { $($name:ident,)* })*) => {
        mod wasmtime_only {
            $(mod $module { $($crate::on_both_hosts!(@test Wasmtime, $module, $name);)* })*
        }
    };
    (envoy only $($module:ident { $($name:ident,)* })*) => {
        mod envoy_only {
            $(mod $module { $($crate::on_both_hosts!(@test Envoy, $module, $name);)* })*
        }
    };
    (@test $proxy:ident, $module:ident, $name:ident) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let name = concat!(stringify!($proxy), "-", stringify!($module), "-", stringify!($name));
            let behaviour = super::super::$module::$name($crate::Proxy::$proxy);
            $crate::wait::judged(name, behaviour).await;
        }
    };
}
