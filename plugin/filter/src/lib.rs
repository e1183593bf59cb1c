//! The proxy-wasm filter of pd-router: translates Envoy's callbacks into calls on `routing`, and the answers into host calls.
//! Takes no decision of its own.
#![deny(unsafe_code)]

mod bindings;
mod calls;
mod cleanup;
mod context;
mod discovery;
mod endpoints;
mod host;
mod journal;
mod planning;
mod pool_runtime;
mod pools;
mod prefill_call;
mod recovery;
mod registration;
mod response;
mod root;
mod scrape;
mod shared;
mod status;
mod stream;
mod telemetry;
mod thread_sync;
#[cfg(feature = "trap")]
mod trap;
mod uploads;
mod vm;

use proxy_wasm::traits::RootContext;
use routing::headers;

#[allow(
    unsafe_code,
    reason = "the ABI's entry point must be exported under its own name"
)]
mod entry {
    use super::*;

    proxy_wasm::main! {{
        journal::open();
        proxy_wasm::set_root_context(|id| -> Box<dyn RootContext> { Box::new(root::Root::new(id)) });
    }}
}
