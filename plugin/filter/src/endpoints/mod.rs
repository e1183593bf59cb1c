//! Owns the filter's own endpoints: readiness, the models that are ready and, if enabled, the status.

mod status;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use routing::discovery::Reply;
use routing::fleet::Role;
use routing::model_state::{ModelKey, ModelState};
use routing::request::Head;
use routing::route::{AboutModels, Refusal, Router};
use serde::Serialize;

use crate::headers;
use crate::host;
use crate::vm::PoolRuntime;
use crate::vm::Pools;

const PREFIX: &[u8] = b"/pd-router";

/// Answers a request to one of the filter's own paths; false for other paths. Answers about models are about the route's pool.
pub fn answer(pools: &Pools, of_route: Option<&Rc<PoolRuntime>>, head: Head<'_>) -> bool {
    let path = head
        .path
        .split(|byte| *byte == b'?')
        .next()
        .unwrap_or_default();
    let is_read = matches!(head.method, b"GET" | b"HEAD");
    let answer = match path {
        b"/pd-router/ready" if is_read => Some(ready(pools)),
        b"/pd-router/status" if is_read && pools.config.status => Some(status::status(pools)),
        b"/pd-router/" if is_read && pools.config.status => {
            return send_page();
        }
        _ if is_own(path) => Some(NOT_FOUND.clone()),
        _ if is_read => of_route.and_then(|runtime| about_models(&runtime.router(), path)),
        _ => None,
    };
    let Some(answer) = answer else {
        return false;
    };
    send(answer.status, &[], &answer.body);
    true
}

/// Sends the status page.
fn send_page() -> bool {
    let headers = [
        ("content-type", &b"text/html; charset=utf-8"[..]),
        ("content-security-policy", status::PAGE_POLICY.as_bytes()),
        ("x-content-type-options", b"nosniff"),
        ("cache-control", b"no-store"),
    ];
    if let Err(error) = host::respond(200, &headers, status::PAGE.as_bytes()) {
        log::error!("the status page could not be sent: {error}");
    }
    true
}

fn send(status: u32, further: &[(&'static str, &'static str)], body: &str) {
    let mut headers = vec![("content-type", &b"application/json"[..])];
    headers.extend(
        further
            .iter()
            .map(|(name, value)| (*name, value.as_bytes())),
    );
    if let Err(error) = host::respond(status, &headers, body.as_bytes()) {
        log::error!("an own answer could not be sent: {error}");
    }
}

/// Answers a worker's request to the registry.
pub fn reply(reply: &Reply) {
    send(reply.status, &reply.headers, &reply.body);
}

/// Refuses a request that has no stream of its own yet.
pub fn refuse(refusal: &Refusal) {
    let dropped = refusal.dropped_reason().map(|why| (headers::DROPPED, why));
    let answer = JsonAnswer::refused(refusal);
    send(answer.status, dropped.as_slice(), &answer.body);
}

fn about_models(router: &Router, path: &[u8]) -> Option<JsonAnswer> {
    match AboutModels::read(path)? {
        AboutModels::All => router.models().map(|models| JsonAnswer::of(200, &models)),
        AboutModels::One(name) => router.named(&name).map(|known| match known {
            Ok(model) => JsonAnswer::of(200, &model),
            Err(refusal) => JsonAnswer::refused(&refusal),
        }),
        AboutModels::Ready(name) => Some(model_ready(router, &name)),
    }
}

/// Whether a path is the filter's own, which is never forwarded.
fn is_own(path: &[u8]) -> bool {
    match path.strip_prefix(PREFIX) {
        Some(rest) => matches!(rest.first(), None | Some(b'/')),
        None => false,
    }
}

/// A JSON answer.
#[derive(Clone)]
pub struct JsonAnswer {
    status: u32,
    body: std::borrow::Cow<'static, str>,
}

const NOT_FOUND: JsonAnswer = JsonAnswer {
    status: 404,
    body: std::borrow::Cow::Borrowed(
        r#"{"error":{"message":"not found","type":"not_found_error","param":null,"code":"not_found"}}"#,
    ),
};

impl JsonAnswer {
    /// An answer with an error.
    fn refused(refusal: &Refusal) -> Self {
        Self {
            status: refusal.status(),
            body: refusal.to_json().into(),
        }
    }

    /// An answer with `body` as JSON.
    pub fn of(status: u32, body: &impl Serialize) -> Self {
        // Strings, numbers and lists of them: serialising to memory cannot fail.
        Self {
            status,
            body: serde_json::to_string(body).unwrap_or_default().into(),
        }
    }
}

#[derive(Serialize)]
struct Ready {
    ready: bool,
}

/// Whether any pool serves: a pool that cannot must not take the proxy out of service for the others.
fn ready(pools: &Pools) -> JsonAnswer {
    let mut all = pools.all().iter();
    let ready = all.any(|runtime| {
        runtime.know_somebody();
        runtime.router().can_serve_any()
    });
    JsonAnswer::of(if ready { 200 } else { 503 }, &Ready { ready })
}

/// Readiness in Dynamo's shape: counts, no ids.
#[derive(Serialize)]
struct ModelReady<'a> {
    model: &'a str,
    ready: bool,
    namespaces: BTreeMap<&'a str, NamespaceReady>,
}

#[derive(Serialize)]
struct NamespaceReady {
    ready: bool,
    state: &'static str,
    worker_types: BTreeMap<&'static str, WorkerType>,
    present: Vec<&'static str>,
    missing_worker_types: Vec<&'static str>,
}

#[derive(Serialize)]
struct WorkerType {
    workers: usize,
    needs: Vec<Vec<&'static str>>,
}

/// `GET /v1/models/{model}/ready`.
fn model_ready(router: &Router, name: &str) -> JsonAnswer {
    let served = router.can_serve_requests(name);
    if matches!(served, Err(Refusal::UnknownModel { .. } | Refusal::NoFleet)) {
        return NOT_FOUND.clone();
    }
    let states = router
        .model_states()
        .filter(|(key, _)| key.model.as_deref().is_none_or(|model| model == name));
    let namespaces =
        states.map(|(key, state)| (key.namespace.as_str(), namespace_ready(router, key, state)));
    let answer = ModelReady {
        model: name,
        ready: served.is_ok(),
        namespaces: namespaces.collect(),
    };
    JsonAnswer::of(if answer.ready { 200 } else { 503 }, &answer)
}

fn namespace_ready(router: &Router, key: &ModelKey, state: &ModelState) -> NamespaceReady {
    let here = |role: Role| {
        router
            .fleet()
            .of_role(role)
            .filter(|worker| key.holds(worker))
            .count()
    };
    let needs = |role: Role| match role {
        Role::Prefill => vec![vec![Role::Decode.name()]],
        Role::Decode => vec![vec![Role::Prefill.name()]],
        Role::Aggregated => Vec::new(),
    };
    let present: Vec<Role> = Role::ALL
        .into_iter()
        .filter(|role| here(*role) > 0)
        .collect();
    let ready = state.can_serve_requests(router.absent_policy()).is_ok();
    let missing = [Role::Prefill, Role::Decode]
        .into_iter()
        .filter(|role| !ready && !present.contains(role));
    let present_names: BTreeSet<&str> = present.iter().map(|role| role.name()).collect();
    NamespaceReady {
        ready,
        state: state.state.name(),
        worker_types: present
            .iter()
            .map(|role| {
                let kind = WorkerType {
                    workers: here(*role),
                    needs: needs(*role),
                };
                (role.name(), kind)
            })
            .collect(),
        present: present_names.into_iter().collect(),
        missing_worker_types: missing.map(Role::name).collect(),
    }
}
