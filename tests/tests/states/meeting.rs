//! The meeting of prefill and decode, from an empty fleet: the answers and the readiness in each state.

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{FAST, MODEL, Role};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::traffic::Traffic;
use pd_router_e2e::wait::{GENEROUS, count, eventually};
use serde_json::{Value, json};

const CLIENTS: usize = 8;

/// The expected state on all of the gateway's pages.
#[derive(Clone, Copy, Debug)]
enum Expected<'a> {
    /// No worker is present: a chat gets this code, or that of an unknown model.
    NoWorkers,
    /// One role is present, and a chat gets one of these codes.
    Waiting { present: Role, codes: &'a [&'a str] },
    /// Both roles are present.
    Serving,
}

async fn get(gateway: &Gateway, path: &str) -> Result<Reply, String> {
    let reply = gateway.try_send(Ask::get(path)).await;
    reply.map_err(|failure| failure.to_string())
}

fn check(right: bool, what: &str, reply: &Reply) -> Result<(), String> {
    if right {
        return Ok(());
    }
    Err(format!("{what}: {} {}", reply.status, reply.text()))
}

/// Waits until all pages show the expected state. Each page is fetched several times: two threads answer.
async fn until(gateway: &Gateway, expected: Expected<'_>) {
    eventually(&format!("{expected:?}"), GENEROUS, || async {
        for _ in 0..4 {
            check_ready(&get(gateway, "/pd-router/ready").await?, expected)?;
            check_models(&get(gateway, "/v1/models").await?, expected)?;
            let path = format!("/v1/models/{MODEL}/ready");
            check_model(&get(gateway, &path).await?, expected)?;
            for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
                let reply = gateway.try_send(ask).await;
                let reply = reply.map_err(|failure| failure.to_string())?;
                check_chat(&reply, expected)?;
            }
        }
        Ok(())
    })
    .await;
}

fn check_ready(reply: &Reply, expected: Expected) -> Result<(), String> {
    let status = match expected {
        Expected::Serving => 200,
        _ => 503,
    };
    check(reply.status == status, "ready", reply)
}

fn check_models(reply: &Reply, expected: Expected) -> Result<(), String> {
    check(reply.status == 200, "models", reply)?;
    let models = reply.json();
    let ids = models["data"].as_array().cloned().unwrap_or_default();
    let ids: Vec<Value> = ids.iter().map(|model| model["id"].clone()).collect();
    let right = match expected {
        Expected::Serving => ids == [json!(MODEL)],
        _ => ids.is_empty(),
    };
    check(right, "models", reply)
}

fn check_model(reply: &Reply, expected: Expected) -> Result<(), String> {
    let what = "the model's readiness";
    if matches!(expected, Expected::NoWorkers) {
        return check(matches!(reply.status, 404 | 503), what, reply);
    }
    let serving = matches!(expected, Expected::Serving);
    let status = if serving { 200 } else { 503 };
    check(reply.status == status, what, reply)?;
    let page = reply.json();
    let namespaces = page["namespaces"].as_object().cloned().unwrap_or_default();
    let roles: Vec<BTreeSet<String>> = namespaces.values().map(roles).collect();
    let present = match expected {
        Expected::Waiting { present, .. } => roles == [BTreeSet::from([present.as_str().into()])],
        _ => roles == [BTreeSet::from(["prefill".into(), "decode".into()])],
    };
    let right = page["model"] == MODEL && page["ready"] == serving && present;
    check(right, what, reply)
}

/// The roles that one namespace lists as present.
fn roles(namespace: &Value) -> BTreeSet<String> {
    let present = namespace["present"].as_array().cloned().unwrap_or_default();
    let names = present.iter().filter_map(Value::as_str);
    names.map(str::to_owned).collect()
}

fn check_chat(reply: &Reply, expected: Expected) -> Result<(), String> {
    if matches!(expected, Expected::Serving) {
        return check(reply.status == 200, "a chat", reply);
    }
    let codes = match expected {
        Expected::Waiting { codes, .. } => codes,
        _ => &[
            "no_worker",
            "no_decode_worker",
            "no_prefill_worker",
            "no_fleet",
        ],
    };
    if matches!(expected, Expected::NoWorkers) && reply.status == 404 {
        return Ok(());
    }
    check(reply.status == 503, "a chat", reply)?;
    check(reply.header("retry-after").is_some(), "when", reply)?;
    let code = reply.json()["error"]["code"].clone();
    let right = codes.iter().any(|right| code == *right);
    check(right, "a chat's code", reply)
}

const NO_PREFILL: Expected = Expected::Waiting {
    present: Role::Decode,
    codes: &["prefill_not_activated"],
};

const NO_DECODE: Expected = Expected::Waiting {
    present: Role::Prefill,
    codes: &["no_decode_worker"],
};

/// Fails unless every answer went through one hand-off and no decode engine got a request without one.
async fn judge(engines: &EngineSet, gateway: &mut Gateway, traffic: Traffic, processes: &[u32]) {
    let tally = traffic.stop().await;
    let prefill = engines.total(Role::Prefill).await;
    let decode = engines.total(Role::Decode).await;
    let seen = format!("{tally:?}\nprefill: {prefill:?}\ndecode: {decode:?}");
    assert!(tally.answered > 0, "{seen}");
    assert_eq!(decode.refused(), 0, "{seen}");
    assert!(decode.prompt_tokens_computed <= decode.requests, "{seen}");
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(processes);
}

pub async fn decode_comes_first_and_leaves_and_returns_and_then_prefill_comes(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(2, 2, FAST).await;
    let mut gateway = engines.gateway(proxy, json!({})).await;
    let processes = gateway.processes();
    until(&gateway, Expected::NoWorkers).await;
    let traffic = Traffic::start(gateway.listen, CLIENTS);
    for _ in 0..count(2, 5) {
        engines.start_and_list(Role::Decode).await;
        until(&gateway, NO_PREFILL).await;
        engines.remove(Role::Decode).await;
        until(&gateway, Expected::NoWorkers).await;
        engines.start_and_list(Role::Decode).await;
        until(&gateway, NO_PREFILL).await;
        let untouched = engines.total(Role::Decode).await;
        assert_eq!(untouched.refused(), 0, "{untouched:?}");
        engines.start_and_list(Role::Prefill).await;
        until(&gateway, Expected::Serving).await;
        traffic
            .until_answered_by(&engines.names(Role::Decode))
            .await;
        engines.remove(Role::Prefill).await;
        until(&gateway, NO_PREFILL).await;
        engines.remove(Role::Decode).await;
        until(&gateway, Expected::NoWorkers).await;
    }
    judge(&engines, &mut gateway, traffic, &processes).await;
    let metrics = gateway.metrics().await;
    let transitions = metrics.expect("pd_router_transitions_total");
    // A round has at least six transitions.
    assert!(transitions >= 6.0 * count(2, 5) as f64, "{transitions}");
}

pub async fn prefill_comes_first_and_then_decode(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(1, 2, FAST).await;
    let mut gateway = engines.gateway(proxy, json!({})).await;
    let processes = gateway.processes();
    until(&gateway, Expected::NoWorkers).await;
    let traffic = Traffic::start(gateway.listen, CLIENTS);
    engines.start_and_list(Role::Prefill).await;
    until(&gateway, NO_DECODE).await;
    let state = engines.total(Role::Prefill).await;
    assert_eq!(state.requests, 0, "nothing to prefill for: {state:?}");
    engines.start_and_list(Role::Decode).await;
    until(&gateway, Expected::Serving).await;
    traffic
        .until_answered_by(&engines.names(Role::Decode))
        .await;
    judge(&engines, &mut gateway, traffic, &processes).await;
    let metrics = gateway.metrics().await;
    let active = metrics.sum_where("pd_router_places", &[("state", "active")]);
    assert_eq!(active, Some(1.0), "one model in one namespace");
    // No worker ever left, so each answer has one prefill, and each prefill its answer.
    let prefill = engines.total(Role::Prefill).await;
    let decode = engines.total(Role::Decode).await;
    let counts = [
        prefill.requests,
        prefill.handoffs_issued,
        prefill.handoffs_consumed,
        decode.requests,
    ];
    assert_eq!(counts, [decode.answered; 4], "{prefill:?} {decode:?}");
}

pub async fn a_roster_that_cannot_be_read_changes_nothing(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(1, 1, FAST).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let gateway = engines.gateway(proxy, json!({})).await;
    until(&gateway, Expected::Serving).await;
    for page in [
        "",
        "{",
        "[]",
        r#"{"workers": 7}"#,
        r#"{"workers": [{"address": 3}]}"#,
    ] {
        engines.document.publish_text(page);
        // A page has certainly been read when further polls have come.
        engines.document.until_polled(3).await;
        gateway.send(Ask::chat("hello")).await.expect(200);
    }
    engines.remove(Role::Prefill).await;
    until(&gateway, NO_PREFILL).await;
}
