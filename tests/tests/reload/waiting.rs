//! Requests that wait while the configuration changes: in the queue, and for a prefill that hangs.

use pd_router_e2e::client::{self, Ask, Failure, Reply};
use pd_router_e2e::conversation::CHAT;
use pd_router_e2e::engines::with;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::threads::endless;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::rig::Rig;

const OPTIONS: &[&str] = &["--prefill-rate", "1000000", "--token-ms", "50"];

/// Requests that wait at once.
const MANY: usize = 20;

/// Deadline of a prefill, in milliseconds.
const DEADLINE_MS: u64 = 12_000;

fn ask(rig: &Rig, content: &str) -> JoinHandle<Result<Reply, Failure>> {
    tokio::spawn(client::try_send(rig.gateway, Ask::chat(content)))
}

async fn answer(pending: JoinHandle<Result<Reply, Failure>>) -> Reply {
    let outcome = pending.await.unwrap_or_else(|error| panic!("{error}"));
    outcome.unwrap_or_else(|failure| panic!("no answer: {failure}"))
}

/// A pool whose decode workers take one answer at a time; requests wait for at most `deadline_ms`.
fn one_at_a_time(deadline_ms: u64) -> Value {
    json!({"admission": {"decode": {"blocks": 0}, "queue": {"deadline_ms": deadline_ms}}})
}

/// An answer without end from each decode worker.
async fn all_busy(rig: &Rig) -> Vec<Raw> {
    let mut busy = Vec::new();
    for _ in &rig.decode {
        let mut client = Raw::connect(rig.gateway).await;
        let body = endless("for ever").to_string();
        client.write(&raw::post(CHAT, &[], body.as_bytes())).await;
        client.read_until("data:", 3).await;
        busy.push(client);
    }
    busy
}

/// A rejected trial of the configuration could leave waiting requests without a timer and without counts.
pub async fn a_listener_that_is_refused_for_another_reason_changes_nothing() {
    let rig = Rig::start(1, OPTIONS, one_at_a_time(2_000)).await;
    let other = with(one_at_a_time(120_000), json!({"name": "other"}));
    for pool in [one_at_a_time(120_000), other] {
        rig.publish_in_vain(&rig.configuration(pool)).await;
        let busy = all_busy(&rig).await;
        rig.until_streams_are(2.0).await;
        let waits = ask(&rig, "one");
        answer(waits).await.expect_code(429, "queue_deadline");
        drop(busy);
        rig.comes_to_rest().await;
    }
}

pub async fn who_waits_in_a_pool_that_is_no_more_waits_no_longer_than_it_may() {
    let rig = Rig::start(1, OPTIONS, one_at_a_time(10_000)).await;
    let busy = all_busy(&rig).await;
    let waits = ask(&rig, "one");
    rig.until_metric("pd_router_queue_requests", 1.0).await;
    let renamed = with(one_at_a_time(120_000), json!({"name": "renamed"}));
    rig.reconfigure(rig.configuration(renamed)).await;
    answer(waits).await.expect_code(429, "queue_deadline");
    drop(busy);
    rig.comes_to_rest().await;
}

/// A queue belongs to one thread, so there is one thread.
pub async fn who_waits_in_the_queue_waits_on_and_is_served() {
    let pool = one_at_a_time(120_000);
    let rig = Rig::start(1, OPTIONS, pool.clone()).await;
    let busy = all_busy(&rig).await;
    let mut waits = vec![ask(&rig, "one"), ask(&rig, "two")];
    rig.until_metric("pd_router_queue_requests", 2.0).await;
    rig.reconfigure(rig.configuration(pool)).await;
    // Each is counted at a later tick, and all before it as well.
    for number in 3..=MANY {
        waits.push(ask(&rig, &format!("question {number}")));
        let waiting = number as f64;
        rig.until_metric("pd_router_queue_requests", waiting).await;
    }
    assert!(waits.iter().all(|pending| !pending.is_finished()));

    drop(busy);
    for pending in waits {
        answer(pending).await.expect_tokens(4);
    }
    rig.comes_to_rest().await;
}

pub async fn the_deadline_of_a_prefill_holds_after_a_new_configuration() {
    let pool = json!({
        "prefill": {"timeout_ms": DEADLINE_MS, "base_timeout_ms": DEADLINE_MS},
        "health": {"cold_timeout_ms": 0},
        "selection": {"prefill": "round_robin"},
    });
    let rig = Rig::start(1, OPTIONS, pool.clone()).await;
    rig.prefill[0].fault(&json!({"kind": "hang"})).await;
    let hangs = one_that_hangs(&rig).await;
    rig.reconfigure(rig.configuration(pool)).await;
    assert!(!hangs.is_finished(), "it was to hang still");
    let reply = answer(hangs).await.expect_tokens(4);
    assert_eq!(reply.pair().prefill, "p1");
    rig.comes_to_rest().await;
}

/// A request at the first prefill worker, which hangs: round robin reaches that worker within three requests.
async fn one_that_hangs(rig: &Rig) -> JoinHandle<Result<Reply, Failure>> {
    let before = rig.prefill[0].state().await.requests;
    for number in 0..3 {
        let pending = ask(rig, &format!("question {number}"));
        let hangs = eventually("it is answered or hangs", GENEROUS, || async {
            let state = rig.prefill[0].state().await;
            match (state.requests > before, pending.is_finished()) {
                (true, _) => Ok(true),
                (false, true) => Ok(false),
                (false, false) => Err(format!("{state:?}")),
            }
        });
        if hangs.await {
            return pending;
        }
    }
    panic!("no request met the worker that hangs");
}

pub async fn a_prefill_that_is_answered_after_a_new_configuration_is_heard() {
    let rig = Rig::start(1, OPTIONS, json!({})).await;
    let late = json!({"kind": "delay", "ms": DEADLINE_MS, "leg": "prefill"});
    for engine in &rig.prefill {
        engine.fault(&late).await;
    }
    let pending = ask(&rig, "hello");
    eventually("a prefill is late", GENEROUS, || async {
        match rig.metric("pd_router_prefill_charges").await == 1.0 {
            true => Ok(()),
            false => Err("none".to_owned()),
        }
    })
    .await;
    rig.reconfigure(rig.configuration(json!({}))).await;
    assert!(!pending.is_finished(), "it was to be late");
    answer(pending).await.expect_tokens(4);
    rig.comes_to_rest().await;
}
