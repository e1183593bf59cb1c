//! The filter in front of a real Dynamo: the selected workers are those that answer.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Ask, Connection, Pair, Reply};
use pd_router_e2e::dynamo::{Dynamo, MODEL};
use pd_router_e2e::engines::Role;
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, count, eventually, judged, within_tries};
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// One Dynamo for all tests of this file, one test at a time.
static DYNAMO: Mutex<Option<Dynamo>> = Mutex::const_new(None);

/// Requests of one connection, and the fewest connections.
const REQUESTS: usize = 4;
const CONNECTIONS: usize = 6;

/// Pause between two requests of a client.
const PAUSE: Duration = Duration::from_millis(100);

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
    all_decode_workers_are_restarted_again_and_again,
    prefill_leaves_and_then_decode_and_both_return,
}

async fn running<'a>(guard: &'a mut MutexGuard<'_, Option<Dynamo>>) -> &'a mut Dynamo {
    // A failed test may have left an incomplete Dynamo; its drop ends it.
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
    gateway.is_ready().await;
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

/// Fails unless Dynamo and the response headers name the same two workers.
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

/// Sends requests with these bodies until all pairs of workers have answered. Fails where an answer, in what `nvext`
/// finds in it, names another pair than the filter chose.
async fn assert_all_pairs_answer(
    gateway: &Gateway,
    dynamo: &Dynamo,
    asked: impl Fn(usize) -> Value,
    nvext: impl Fn(&Reply) -> Value,
) {
    let (prefill, decode) = (dynamo.prefill_ids().await, dynamo.decode_ids().await);
    let all: BTreeSet<(u64, u64)> = prefill
        .iter()
        .flat_map(|p| decode.iter().map(|d| (*p, *d)))
        .collect();
    let mut pairs = BTreeSet::new();
    // Every worker has its turn in each round; in what order is drawn.
    within_tries("all pairs are used", async |connections| {
        let mut connection = connect(gateway).await;
        let first = connections * REQUESTS;
        for number in first..first + REQUESTS {
            let reply = answered(&mut connection, ask(&asked(number))).await;
            pairs.insert(assert_same_workers(&reply, &nvext(&reply)));
        }
        match pairs.len() >= all.len() && connections + 1 >= CONNECTIONS {
            true => Ok(()),
            false => Err(format!("{pairs:?} of {all:?}")),
        }
    })
    .await;
    assert_eq!(pairs, all, "the pairs used, then all that there are");
}

async fn the_workers_that_answer_are_those_that_the_filter_chose(
    proxy: Proxy,
    dynamo: &mut Dynamo,
) {
    let gateway = gateway(proxy, dynamo).await;
    let nvext = |reply: &Reply| reply.json()["nvext"].clone();
    assert_all_pairs_answer(&gateway, dynamo, body, nvext).await;
}

async fn streams_are_answered_by_the_workers_that_the_filter_chose(
    proxy: Proxy,
    dynamo: &mut Dynamo,
) {
    let gateway = gateway(proxy, dynamo).await;
    let streamed = |number| {
        let mut body = body(number);
        body["stream"] = json!(true);
        body
    };
    let nvext = |reply: &Reply| {
        let events = reply.events();
        let mut named = events.iter().map(|event| &event["nvext"]);
        let found = named.find(|nvext| !nvext["worker_id"].is_null());
        found
            .cloned()
            .unwrap_or_else(|| panic!("no event tells the workers: {}", reply.text()))
    };
    assert_all_pairs_answer(&gateway, dynamo, streamed, nvext).await;
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
    dynamo.restart(Role::Prefill).await;
    let new = dynamo.prefill_ids().await;
    assert!(new.is_disjoint(&old), "ids are new at every start");
    until_these_answer(&gateway, dynamo).await;
}

/// Waits until requests are answered repeatedly, all by the present workers.
async fn until_these_answer(gateway: &Gateway, dynamo: &Dynamo) {
    let (prefill, decode) = (dynamo.prefill_ids().await, dynamo.decode_ids().await);
    eventually("the workers that there are answer", GENEROUS, || async {
        // Every thread has adopted the new fleet once its own copy is a poll old.
        for number in 0..8 {
            let reply = gateway.try_send(ask(&body(number))).await;
            let reply = reply.map_err(|failure| failure.to_string())?;
            if reply.status != 200 {
                return Err(format!("{}: {}", reply.status, reply.text()));
            }
            let (by_prefill, by_decode) = assert_same_workers(&reply, &reply.json()["nvext"]);
            if !prefill.contains(&by_prefill) || !decode.contains(&by_decode) {
                return Err(format!("answered by {by_prefill} and {by_decode}"));
            }
        }
        Ok(())
    })
    .await;
}

/// Waits until clients repeatedly get the gateway's own error that it cannot serve.
async fn until_clients_get_503(gateway: &Gateway, codes: &[&str]) {
    eventually("clients get the error", GENEROUS, || async {
        for number in 0..gateway.enough_connections() {
            let reply = gateway.try_send(ask(&body(number))).await;
            let reply = reply.map_err(|failure| failure.to_string())?;
            let error = serde_json::from_slice::<Value>(&reply.body).unwrap_or_default();
            let code = &error["error"]["code"];
            let known = codes.iter().any(|right| code == *right);
            if reply.status != 503 || !known || reply.header("retry-after").is_none() {
                return Err(format!("{}: {}", reply.status, reply.text()));
            }
        }
        Ok(())
    })
    .await;
    gateway.send(Ask::get("/pd-router/ready")).await.expect(503);
}

/// A gateway that serves, and its processes.
async fn serving(proxy: Proxy, dynamo: &Dynamo) -> (Gateway, Vec<u32>) {
    let gateway = gateway(proxy, dynamo).await;
    until_these_answer(&gateway, dynamo).await;
    let processes = gateway.processes();
    (gateway, processes)
}

async fn all_decode_workers_are_restarted_again_and_again(proxy: Proxy, dynamo: &mut Dynamo) {
    let (mut gateway, processes) = serving(proxy, dynamo).await;
    let traffic = Traffic::start(&gateway);
    for _ in 0..count(3, 10) {
        let old = dynamo.decode_ids().await;
        dynamo.restart(Role::Decode).await;
        let new = dynamo.decode_ids().await;
        assert!(new.is_disjoint(&old), "ids are new at every start");
        until_these_answer(&gateway, dynamo).await;
    }
    assert!(
        traffic.stop().await > 0,
        "no request was answered meanwhile"
    );
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(&processes);
}

/// Clients in a loop: every answer is by the workers that the filter selected.
struct Traffic {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<u64>>,
}

impl Traffic {
    fn start(gateway: &Gateway) -> Traffic {
        let stop = Arc::new(AtomicBool::new(false));
        let client = |number| {
            let (to, stop) = (gateway.listen, Arc::clone(&stop));
            tokio::spawn(async move {
                let mut answered = 0;
                while !stop.load(Ordering::Relaxed) {
                    let reply = client::send(to, ask(&body(number))).await;
                    if reply.status == 200 {
                        assert_same_workers(&reply, &reply.json()["nvext"]);
                        answered += 1;
                    }
                    sleep(PAUSE).await;
                }
                answered
            })
        };
        let clients = (0..4).map(client).collect();
        Traffic { stop, clients }
    }

    async fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let mut answered = 0;
        for client in self.clients {
            let one = client.await;
            answered += one.unwrap_or_else(|error| panic!("a client failed: {error}"));
        }
        answered
    }
}

async fn prefill_leaves_and_then_decode_and_both_return(proxy: Proxy, dynamo: &mut Dynamo) {
    let (mut gateway, processes) = serving(proxy, dynamo).await;
    for _ in 0..count(1, 5) {
        let old = dynamo.prefill_ids().await;
        dynamo.remove(Role::Prefill).await;
        until_clients_get_503(&gateway, &["prefill_not_activated"]).await;
        dynamo.remove(Role::Decode).await;
        until_no_worker_is_known(&gateway).await;
        dynamo.add(Role::Decode).await;
        until_clients_get_503(&gateway, &["prefill_not_activated"]).await;
        dynamo.add(Role::Prefill).await;
        dynamo.wait_until_ready().await;
        let new = dynamo.prefill_ids().await;
        assert!(new.is_disjoint(&old), "ids are new at every start");
        until_these_answer(&gateway, dynamo).await;
    }
    gateway.assert_comes_to_rest().await;
    gateway.assert_never_restarted(&processes);
}

/// Waits until the gateway knows that all workers have left: the model is unknown, or has no workers.
async fn until_no_worker_is_known(gateway: &Gateway) {
    eventually("no worker is known", GENEROUS, || async {
        let reply = gateway.try_send(ask(&body(0))).await;
        let reply = reply.map_err(|failure| failure.to_string())?;
        let error = serde_json::from_slice::<Value>(&reply.body).unwrap_or_default();
        let code = error["error"]["code"].as_str().unwrap_or_default();
        match (reply.status, code) {
            (404, _) | (503, "no_worker" | "no_decode_worker" | "no_fleet") => Ok(()),
            _ => Err(format!("{}: {}", reply.status, reply.text())),
        }
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
