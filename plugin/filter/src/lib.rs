//! The proxy-wasm filter of pd-router: translates Envoy's callbacks into calls on `routing`, and the answers into host calls.
//! Takes no decision of its own.
#![deny(unsafe_code)]

mod bindings;
mod context;
mod discovery;
mod endpoints;
mod host;
mod journal;
mod legs;
mod planning;
mod registration;
mod response;
mod root;
mod scrape;
mod shared;
mod telemetry;
#[cfg(feature = "trap")]
mod trap;
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
