//! Owns what the filter answers itself: readiness, and the status where it is turned on.

use routing::config::{Pool, Protocol};
use routing::fleet::Worker;
use routing::load::Load;
use routing::request::Head;
use routing::route::Router;
use serde::Serialize;

use crate::gateway::Gateway;
use crate::host;

const PREFIX: &[u8] = b"/pd-router";

/// Whether a path is the filter's own: it is never forwarded.
pub fn is_own(path: &[u8]) -> bool {
    match path.strip_prefix(PREFIX) {
        Some(rest) => matches!(rest.first(), None | Some(b'/' | b'?')),
        None => false,
    }
}

/// Answers a request to one of the filter's own paths.
pub fn answer(gateway: &Gateway, head: Head<'_>) {
    let path = head
        .path
        .split(|byte| *byte == b'?')
        .next()
        .unwrap_or_default();
    let (status, body) = match (head.method, path) {
        (b"GET" | b"HEAD", b"/pd-router/ready") => ready(&gateway.router.borrow()),
        (b"GET" | b"HEAD", b"/pd-router/status") if gateway.config.status => status(&gateway.router.borrow()),
        _ => (404, r#"{"error":{"message":"not found","type":"not_found_error","param":null,"code":"not_found"}}"#.to_owned()),
    };
    let sent = host::respond(
        status,
        &[("content-type", b"application/json")],
        body.as_bytes(),
    );
    if let Err(error) = sent {
        log::error!("an own answer could not be sent: {error}");
    }
}

fn ready(router: &Router) -> (u32, String) {
    match router.fleet().can_serve() {
        true => (200, r#"{"ready":true}"#.to_owned()),
        false => (503, r#"{"ready":false}"#.to_owned()),
    }
}

/// The fleet and its load as this thread's VM sees them.
#[derive(Serialize)]
struct Status<'a> {
    pool: &'a str,
    protocol: &'static str,
    fleet_version: u64,
    bookings: Bookings,
    workers: Vec<WorkerStatus<'a>>,
}

#[derive(Serialize)]
struct WorkerStatus<'a> {
    name: &'a str,
    /// As text: readers that hold numbers as floating point would change it.
    id: String,
    role: &'static str,
    model: Option<&'a str>,
    namespace: &'a str,
    bookings: Bookings,
}

#[derive(Serialize)]
struct Bookings {
    prefills: u64,
    prefill_tokens: u64,
    decodes: u64,
    decode_blocks: u64,
}

impl From<Load> for Bookings {
    fn from(load: Load) -> Self {
        Self {
            prefills: load.prefills,
            prefill_tokens: load.prefill_tokens,
            decodes: load.decodes,
            decode_blocks: load.decode_blocks,
        }
    }
}

fn status(router: &Router) -> (u32, String) {
    let pool = router.pool();
    let status = Status {
        pool: &pool.name,
        protocol: protocol_name(pool),
        fleet_version: router.fleet().version(),
        bookings: router.total_load().into(),
        workers: router
            .fleet()
            .workers()
            .map(|worker| worker_status(router, worker))
            .collect(),
    };
    (200, serde_json::to_string(&status).unwrap_or_default())
}

fn worker_status<'a>(router: &Router, worker: &'a Worker) -> WorkerStatus<'a> {
    WorkerStatus {
        name: &worker.name,
        id: worker.id.to_string(),
        role: worker.role.name(),
        model: worker.model.as_deref(),
        namespace: &worker.namespace,
        bookings: router.worker_load(worker.id).into(),
    }
}

fn protocol_name(pool: &Pool) -> &'static str {
    match pool.protocol {
        Protocol::Nixl => "nixl",
        Protocol::Direct => "direct",
    }
}
