//! A proxy-wasm host on wasmtime and hyper, with the behaviour of Envoy where it bites.
