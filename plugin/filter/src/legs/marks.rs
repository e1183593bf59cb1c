//! Owns what is noted of the worker that answers: headers for people, and the destinations that were tried before it.

use std::net::SocketAddr;

use routing::route::Assignment;

use crate::headers;
use crate::host::{self, Header, Map};
use crate::vm::{InStream, PoolRuntime};

/// Adds headers for people to a worker's answer, and notes which worker gave it.
pub fn mark(runtime: &PoolRuntime, stream: &InStream) {
    let explanation = stream.session().explanation.take();
    if let Some(explanation) = explanation {
        // For people only, as the names are: a response without the header is still a response.
        let _ = host::set_header(Map::Response, headers::EXPLAIN, explanation.as_bytes());
    }
    let is_named = runtime.config.response_headers;
    let server = match stream.tried() > 1 || is_named {
        true => last_tried(),
        false => None,
    };
    if let Some(address) = server {
        note_server(runtime, stream, address);
    }
    let mut extra = names(runtime, &stream.session().assignment);
    extra.extend(server.filter(|_| is_named).map(served));
    for (name, value) in extra {
        let name = std::str::from_utf8(&name).unwrap_or_default();
        let _ = host::set_header(Map::Response, name, &value);
    }
}

/// The header that names the endpoint which answered.
pub fn served(address: SocketAddr) -> Header {
    (
        headers::SERVED.as_bytes().to_vec(),
        address.to_string().into_bytes(),
    )
}

/// The headers that name the workers, if configured.
pub fn names(runtime: &PoolRuntime, assignment: &Assignment) -> Vec<Header> {
    let pair = [
        (headers::PREFILL, &assignment.prefill),
        (headers::DECODE, &assignment.decode),
    ];
    let wanted = pair.iter().filter(|_| runtime.config.response_headers);
    let named = wanted.filter_map(|(name, worker)| {
        let worker = worker.as_ref()?;
        Some((name.as_bytes().to_vec(), worker.name.as_bytes().to_vec()))
    });
    named.collect()
}

/// The worker that the proxy tried last.
pub fn last_tried() -> Option<SocketAddr> {
    let address = host::property(&["upstream", "address"])?;
    std::str::from_utf8(&address).ok()?.parse().ok()
}

/// Notes which destinations have been tried so far.
pub fn note_tried(stream: &InStream) {
    let last = last_tried();
    stream.session().tried.reached(last);
}

/// Notes the destination that answered. Those before it in the list took no connection.
fn note_server(runtime: &PoolRuntime, stream: &InStream, address: SocketAddr) {
    let refused = stream
        .session()
        .answered_by(&mut runtime.router_mut(), address);
    if !refused.is_empty() {
        let id = stream.ids();
        log::warn!("[{id}] {refused:?} took no connection, {address} answers");
        runtime.telemetry.decode_retried();
    }
}
