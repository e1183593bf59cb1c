//! Owns short ways to build a router and to plan requests.

use routing::config::{Config, ConfigError, Discovery};
use routing::discovery::static_workers;
use routing::fleet::{Fleet, Worker};
use routing::request::Generation;
use routing::route::{
    AfterPrefill, Assignment, CallEnd, Dispatch, Plan, PlanInput, PrefillPhase, Refusal, Router,
};
use serde_json::{Value, json};
use std::time::Duration;

/// A worker; its port is its id, as far as the id is a port.
pub fn worker(role: &str, id: u64) -> Value {
    let port = id % 60_000;
    json!({"role": role, "id": id, "address": format!("127.0.0.1:{port}"), "model": "m"})
}

/// A worker with further fields.
pub fn worker_with(role: &str, id: u64, fields: Value) -> Value {
    with(worker(role, id), fields)
}

pub fn with(mut value: Value, fields: Value) -> Value {
    let fields = fields.as_object().expect("an object").clone();
    value.as_object_mut().expect("an object").extend(fields);
    value
}

/// Prefill workers 1 and 2, decode workers 11 and 12.
pub fn two_by_two() -> Vec<Value> {
    vec![
        worker("prefill", 1),
        worker("prefill", 2),
        worker("decode", 11),
        worker("decode", 12),
    ]
}

pub fn configured(protocol: &str, workers: &[Value], fields: Value) -> Result<Config, ConfigError> {
    let mut pool =
        json!({"name": "p", "protocol": protocol, "discovery": {"static": {"workers": workers}}});
    if protocol == "direct" {
        pool["frontends"] = json!(["127.0.0.1:8000"]);
    }
    let document = json!({"pools": [with(pool, fields)]});
    Config::parse(document.to_string().as_bytes())
}

/// A router with trusted callers and round-robin selection, unless the fields say otherwise.
pub fn router(protocol: &str, workers: &[Value], fields: Value) -> Router {
    let turns = json!({"prefill": "round_robin", "decode": "round_robin"});
    let fields = with(json!({"trust_clients": true, "selection": turns}), fields);
    let config = configured(protocol, workers, fields).unwrap();
    Router::new(config.pools[0].clone(), 42, 7, Duration::ZERO)
}

/// Removes workers.
pub fn leave(router: &mut Router, gone: &[u64]) {
    let staying: Vec<Worker> = router
        .fleet()
        .workers()
        .filter(|worker| !gone.contains(&worker.id.0))
        .map(|worker| Worker::clone(worker))
        .collect();
    let version = router.fleet().version() + 1;
    router.adopt(Fleet::new(version, staying));
}

/// Replaces all workers.
pub fn replace(router: &mut Router, workers: &[Value]) {
    let config = configured("nixl", workers, json!({})).unwrap();
    let Discovery::Static(list) = &config.pools[0].discovery else {
        panic!("listed workers");
    };
    let version = router.fleet().version() + 1;
    router.adopt(Fleet::new(version, static_workers(&list.workers)));
}

pub fn body(nvext: &Value) -> Vec<u8> {
    json!({"model": "m", "messages": [{"role": "user", "content": "hello"}], "nvext": nvext})
        .to_string()
        .into_bytes()
}

pub fn ask(router: &mut Router, nvext: Value) -> Result<Plan, Refusal> {
    ask_with(router, &[], nvext)
}

pub fn ask_with(
    router: &mut Router,
    headers: &[(&str, String)],
    nvext: Value,
) -> Result<Plan, Refusal> {
    let headers: Vec<(Vec<u8>, Vec<u8>)> = headers
        .iter()
        .map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec()))
        .collect();
    let input = PlanInput {
        headers: &headers,
        now: Duration::from_secs(1),
        ..PlanInput::default()
    };
    router.plan(Generation::Chat, &body(&nvext), input)
}

pub fn prefill(plan: Result<Plan, Refusal>) -> (PrefillPhase, Assignment) {
    match plan {
        Ok(Plan::Prefill(phase, assignment)) => (phase, assignment),
        Ok(_) => panic!("no prefill"),
        Err(refusal) => panic!("{refusal}"),
    }
}

pub fn forward(plan: Result<Plan, Refusal>) -> (Dispatch, Assignment) {
    match plan {
        Ok(Plan::Forward(dispatch, assignment)) => (dispatch, assignment),
        Ok(_) => panic!("not forwarded"),
        Err(refusal) => panic!("{refusal}"),
    }
}

pub fn refusal(plan: Result<Plan, Refusal>) -> Refusal {
    match plan {
        Ok(_) => panic!("not refused"),
        Err(refusal) => refusal,
    }
}

/// The pair that a request has got: prefill, decode.
pub fn pair(plan: Result<Plan, Refusal>) -> (u64, u64) {
    let (phase, assignment) = prefill(plan);
    (
        phase.worker().id.0,
        assignment.decode.as_ref().unwrap().id.0,
    )
}

/// The pair that would be picked: prefill, decode.
pub fn who(router: &mut Router) -> (u64, u64) {
    query(router, json!({}))
}

/// The pair that would be picked for a request with this `nvext`.
pub fn query(router: &mut Router, nvext: Value) -> (u64, u64) {
    let nvext = with(nvext, json!({"annotations": ["query_instance_id:"]}));
    let answer = match ask(router, nvext) {
        Ok(Plan::Answer(answer)) => answer,
        Ok(_) => panic!("not answered here"),
        Err(refusal) => panic!("{refusal}"),
    };
    let answer: Value = serde_json::from_str(&answer.body).unwrap();
    let id = |name: &str| answer["nvext"]["worker_id"][name].as_u64().unwrap();
    (id("prefill_worker_id"), id("decode_worker_id"))
}

/// A prefill answer that hands over two blocks.
pub const GOOD: CallEnd<'static> = CallEnd::Whole {
    status: 200,
    body: br#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[4,5]]}}"#,
};

/// The proxy's own text where a connection was reset before the first byte of an answer.
pub const RESET: &[u8] = b"upstream connect error or disconnect/reset before headers. reset reason: connection termination";

/// An answer of this status and body.
pub fn whole_of(status: u16, body: &'static [u8]) -> CallEnd<'static> {
    CallEnd::Whole { status, body }
}

/// The proxy's own answer where a worker accepted no connection.
pub const UNREACHED: CallEnd<'static> = CallEnd::Whole {
    status: 503,
    body: b"upstream connect error or disconnect/reset before headers. reset reason: remote connection failure, transport failure reason: delayed connect error: Connection refused",
};

/// The proxy's own answer where a worker has passed its deadline.
pub const TOO_LATE: CallEnd<'static> = CallEnd::Whole {
    status: 504,
    body: b"upstream request timeout",
};

/// A prefill answer of that status.
pub fn status(status: u16) -> CallEnd<'static> {
    CallEnd::Whole { status, body: b"" }
}

/// The outcome, as one word.
pub fn word(after: &AfterPrefill) -> &'static str {
    match after {
        AfterPrefill::Decode { .. } => "decode",
        AfterPrefill::Again(_) => "again",
        AfterPrefill::Answer => "answer",
        AfterPrefill::AnswerUnlessPair(_) => "answer unless pair",
        AfterPrefill::Terminal(_) => "terminal",
        AfterPrefill::TerminalStaged(..) => "terminal, staged",
        AfterPrefill::Whole { .. } => "whole",
        AfterPrefill::Good => "good",
        AfterPrefill::Refused(_) => "refused",
        AfterPrefill::FailedBeside(..) => "failed beside",
        AfterPrefill::CleanUp(_) => "clean-up",
        AfterPrefill::Leaked { .. } => "leaked",
        AfterPrefill::CallOff { .. } => "call-off",
        AfterPrefill::Nothing => "nothing",
    }
}

/// A leg's body, as JSON.
pub fn leg(dispatch: &Dispatch, body: &[u8]) -> Value {
    let edited = match &dispatch.edits {
        Some(edits) => edits.apply(body),
        None => body.to_vec(),
    };
    serde_json::from_slice(&edited).unwrap()
}
