//! The filter in front of a real Dynamo: the workers that it chose are the workers that answered.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Connection, Pair, Reply};
use pd_router_e2e::dynamo::{Dynamo, MODEL};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually, judged};
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};

/// One Dynamo for all tests of this file, one test at a time.
static DYNAMO: Mutex<Option<Dynamo>> = Mutex::const_new(None);

const REQUESTS: usize = 24;
const CONNECTIONS: usize = 6;

macro_rules! on_both_hosts {
    ($($name:ident,)*) => {
        on_both_hosts!(@host wasmtime, Proxy::Wasmtime; $($name,)*);
        on_both_hosts!(@host envoy, Proxy::Envoy; $($name,)*);
    };
    (@host $host:ident, $proxy:expr; $($name:ident,)*) => {
        mod $host {
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let mut guard = DYNAMO.lock().await;
                    judged(concat!("dynamo-", stringify!($host), "-", stringify!($name)), async {
                        let dynamo = running(&mut guard).await;
                        super::$name($proxy, dynamo).await;
                    })
                    .await;
                }
            )*
        }
    };
}

on_both_hosts! {
    the_workers_that_answer_are_those_that_the_filter_chose,
    streams_are_answered_by_the_workers_that_the_filter_chose,
    the_models_are_listed,
    workers_that_restart_with_new_ids_are_found_again,
}

async fn running<'a>(guard: &'a mut MutexGuard<'_, Option<Dynamo>>) -> &'a mut Dynamo {
    // A test that failed half-way may have left one that is not whole; its drop ends it.
    let whole = match guard.as_ref() {
        Some(dynamo) => dynamo.is_ready().await,
        None => false,
    };
    if !whole {
        guard.take();
        guard.replace(Dynamo::start().await);
    }
    guard
        .as_mut()
        .unwrap_or_else(|| panic!("Dynamo was just started"))
}

async fn gateway(proxy: Proxy, dynamo: &Dynamo) -> Gateway {
    let gateway = Gateway::start(proxy, &dynamo.config(), &[]).await;
    eventually("the workers are discovered", GENEROUS, || async {
        let ready = gateway.try_send(Ask::get("/pd-router/ready")).await;
        let ready = ready.map_err(|failure| failure.to_string())?;
        if ready.status == 200 {
            return Ok(());
        }
        Err(format!("{}: {}", ready.status, ready.text()))
    })
    .await;
    gateway
}

fn body(number: usize) -> Value {
    json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": format!("question {number}")}],
        "max_tokens": 4,
        "nvext": {"extra_fields": ["worker_id"]},
    })
}

fn ask(body: &Value) -> Ask {
    Ask::post("/v1/chat/completions", body.to_string())
}

/// Fails where the two workers that Dynamo names are not those that the response headers name.
fn assert_same_workers(reply: &Reply, nvext: &Value) -> (u64, u64) {
    let Pair { prefill, decode } = reply.pair();
    let id = |text: &str| {
        text.parse::<u64>()
            .unwrap_or_else(|_| panic!("not a decimal instance id: {text:?}"))
    };
    let chosen = (id(&prefill), id(&decode));
    let used = |name: &str| {
        nvext["worker_id"][name]
            .as_u64()
            .unwrap_or_else(|| panic!("Dynamo does not tell {name}: {}", reply.text()))
    };
    let used = (used("prefill_worker_id"), used("decode_worker_id"));
    assert_eq!(chosen, used, "(prefill, decode): chosen, then used");
    chosen
}

async fn assert_all_pairs(dynamo: &Dynamo, pairs: &BTreeSet<(u64, u64)>) {
    let (prefill, decode) = (dynamo.prefill_ids().await, dynamo.decode_ids().await);
    let all: BTreeSet<(u64, u64)> = prefill
        .iter()
        .flat_map(|p| decode.iter().map(|d| (*p, *d)))
        .collect();
    assert_eq!(pairs, &all, "the pairs used, then all that there are");
}

async fn the_workers_that_answer_are_those_that_the_filter_chose(
    proxy: Proxy,
    dynamo: &mut Dynamo,
) {
    let gateway = gateway(proxy, dynamo).await;
    let mut pairs = BTreeSet::new();
    for first in 0..CONNECTIONS {
        let mut connection = connect(&gateway).await;
        for number in (first..REQUESTS).step_by(CONNECTIONS) {
            let reply = answered(&mut connection, ask(&body(number))).await;
            let nvext = reply.json()["nvext"].clone();
            pairs.insert(assert_same_workers(&reply, &nvext));
        }
    }
    assert_all_pairs(dynamo, &pairs).await;
}

async fn streams_are_answered_by_the_workers_that_the_filter_chose(
    proxy: Proxy,
    dynamo: &mut Dynamo,
) {
    let gateway = gateway(proxy, dynamo).await;
    let mut pairs = BTreeSet::new();
    for first in 0..CONNECTIONS {
        let mut connection = connect(&gateway).await;
        for number in (first..REQUESTS).step_by(CONNECTIONS) {
            let mut body = body(number);
            body["stream"] = json!(true);
            let reply = answered(&mut connection, ask(&body)).await;
            let events = reply.events();
            let nvext = events
                .iter()
                .map(|event| &event["nvext"])
                .find(|nvext| !nvext["worker_id"].is_null())
                .unwrap_or_else(|| panic!("no event tells the workers: {}", reply.text()));
            pairs.insert(assert_same_workers(&reply, nvext));
        }
    }
    assert_all_pairs(dynamo, &pairs).await;
}

async fn the_models_are_listed(proxy: Proxy, dynamo: &mut Dynamo) {
    let gateway = gateway(proxy, dynamo).await;
    let models = gateway
        .send(Ask::get("/v1/models"))
        .await
        .expect(200)
        .json();
    assert_eq!(models["data"][0]["id"], MODEL, "{models}");
}

async fn workers_that_restart_with_new_ids_are_found_again(proxy: Proxy, dynamo: &mut Dynamo) {
    let gateway = gateway(proxy, dynamo).await;
    let old = dynamo.prefill_ids().await;
    dynamo.restart_prefill().await;
    let new = dynamo.prefill_ids().await;
    assert!(new.is_disjoint(&old), "ids are new at every start");

    eventually("the new workers are used", GENEROUS, || async {
        let reply = gateway.try_send(ask(&body(0))).await;
        let reply = reply.map_err(|failure| failure.to_string())?;
        if reply.status == 200 {
            return Ok(());
        }
        Err(format!("{}: {}", reply.status, reply.text()))
    })
    .await;
    // Every thread has adopted the new fleet once its own copy is a poll old; then nothing may fail.
    eventually("no thread uses an old worker", GENEROUS, || async {
        for number in 0..8 {
            let reply = gateway.try_send(ask(&body(number))).await;
            let reply = reply.map_err(|failure| failure.to_string())?;
            if reply.status != 200 {
                return Err(format!("{}: {}", reply.status, reply.text()));
            }
            let (prefill, _) = assert_same_workers(&reply, &reply.json()["nvext"]);
            if !new.contains(&prefill) {
                return Err(format!("{prefill} is none of {new:?}"));
            }
        }
        Ok(())
    })
    .await;
}

async fn connect(gateway: &Gateway) -> Connection {
    let opened = Connection::open(gateway.listen).await;
    opened.unwrap_or_else(|failure| panic!("no connection: {failure}"))
}

async fn answered(connection: &mut Connection, ask: Ask) -> Reply {
    let reply = connection.send(ask).await;
    reply
        .unwrap_or_else(|failure| panic!("no answer: {failure}"))
        .expect(200)
}
