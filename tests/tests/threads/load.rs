//! Bookings of one thread count on all threads.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::conversation::CHAT;
use pd_router_e2e::engines::with;
use pd_router_e2e::gateway::Booked;
use pd_router_e2e::threads::{PendingReply, Thread, endless_ask};
use pd_router_e2e::wait::{GENEROUS, eventually, within_tries};
use serde_json::{Value, json};

use crate::rig::{Rig, SUBSET, UNHURRIED};

const LONG_STREAMS: u64 = 32;
const REQUESTS: usize = 16;

/// Blocks of the long streams' prompts together, at the least.
const LEAST_BLOCKS: u64 = 10 * LONG_STREAMS;

/// Some sixteen blocks that no other stream shares.
fn long_prompt(number: u64) -> String {
    format!("Story number {number} is a long one. ").repeat(40)
}

/// Begins the long streams on one thread, all on the first two decode workers.
async fn load_half(rig: &Rig, thread: &Thread) -> Vec<PendingReply> {
    let half = rig.only(&[0, 1]);
    let one = |number| {
        let ask = endless_ask(&long_prompt(number)).header(SUBSET, &half);
        thread.ask(ask)
    };
    let streams: Vec<PendingReply> = (0..LONG_STREAMS).map(one).collect();
    thread.until_decodes(LONG_STREAMS).await;
    let counts = running(rig).await;
    assert_eq!(counts[0] + counts[1], LONG_STREAMS, "{counts:?}");
    assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
    streams
}

/// Running requests of each decode worker, once all streams have begun.
async fn running(rig: &Rig) -> Vec<u64> {
    eventually("the streams run", GENEROUS, || async {
        let states = join_all(rig.fleet.decode.iter().map(|engine| engine.state())).await;
        let counts: Vec<u64> = states.iter().map(|state| state.running).collect();
        match counts.iter().sum::<u64>() == LONG_STREAMS {
            true => Ok(counts),
            false => Err(format!("{counts:?}")),
        }
    })
    .await
}

/// The decode workers of a thread's next requests, each sent after the answer to the one before.
async fn next_requests(thread: &Thread, count: usize) -> Vec<String> {
    let body = with(chat_body("hello"), json!({"max_tokens": 1})).to_string();
    let mut decodes = Vec::new();
    for _ in 0..count {
        let reply = thread.send(Ask::post(CHAT, body.clone())).await.expect(200);
        decodes.push(reply.pair().decode);
    }
    decodes
}

/// The same on all threads but the first, concurrently.
async fn next_requests_elsewhere(rig: &Rig, count: usize) -> Vec<Vec<String>> {
    let others = rig.threads.iter().skip(1);
    join_all(others.map(|thread| next_requests(thread, count))).await
}

async fn leave(rig: &Rig, streams: Vec<PendingReply>) {
    for stream in streams {
        stream.abort();
    }
    rig.threads[0].until_decodes(0).await;
    rig.gateway.assert_comes_to_rest().await;
}

fn is_loaded(decode: &str) -> bool {
    ["d0", "d1"].contains(&decode)
}

pub async fn threads_avoid_the_workers_that_another_has_loaded(proxy: Proxy) {
    let rig = Rig::open(proxy, (2, 4), UNHURRIED, json!({"load": true})).await;
    let streams = load_half(&rig, &rig.threads[0]).await;
    until_others_count(&rig, LONG_STREAMS).await;
    for decodes in next_requests_elsewhere(&rig, REQUESTS).await {
        assert!(
            !decodes.iter().any(|decode| is_loaded(decode)),
            "{decodes:?}"
        );
    }
    leave(&rig, streams).await;
    rig.fleet.assert_no_decode_refused().await;
}

pub async fn without_sharing_no_thread_knows_what_another_has_loaded(proxy: Proxy) {
    let rig = Rig::open(proxy, (2, 4), UNHURRIED, json!({"load": false})).await;
    let streams = load_half(&rig, &rig.threads[0]).await;
    until_others_know_the_prompts(&rig).await;
    assert_others_count_nothing(&rig).await;
    // Other threads see all four workers as idle. Forty-eight draws miss half of them once in 2^48 times.
    let decodes = next_requests_elsewhere(&rig, REQUESTS).await.concat();
    assert!(
        decodes.iter().any(|decode| is_loaded(decode)),
        "{decodes:?}"
    );
    leave(&rig, streams).await;
}

pub async fn what_a_thread_lets_go_the_others_use_again(proxy: Proxy) {
    let rig = Rig::open(proxy, (2, 4), UNHURRIED, json!({})).await;
    let streams = load_half(&rig, &rig.threads[0]).await;
    until_others_count(&rig, LONG_STREAMS).await;
    leave(&rig, streams).await;
    until_others_count(&rig, 0).await;
    // Of the four that are idle one is drawn.
    let mut seen = BTreeSet::new();
    within_tries("all are used", async |_| {
        seen.extend(next_requests_elsewhere(&rig, 1).await.concat());
        match seen.len() {
            4 => Ok(()),
            _ => Err(format!("{seen:?}")),
        }
    })
    .await;
    assert_all_idle(&rig).await;
}

/// Waits until all threads but the first count this many decodes of other threads, and no prefill.
async fn until_others_count(rig: &Rig, decodes: u64) {
    let wanted = Booked {
        prefills: 0,
        decodes,
    };
    for thread in &rig.threads[1..] {
        eventually("a thread counts the load of others", GENEROUS, || async {
            let page = thread.status().await;
            match Booked::elsewhere(&page["pools"][0]) == wanted {
                true => Ok(()),
                false => Err(page.to_string()),
            }
        })
        .await;
    }
}

/// Waits until all threads know the same prompts: what a thread shares of its load comes with its decisions.
async fn until_others_know_the_prompts(rig: &Rig) {
    for thread in &rig.threads[1..] {
        eventually("a thread knows the prompts of others", GENEROUS, || async {
            let first = known_blocks(&rig.threads[0].status().await);
            let own = known_blocks(&thread.status().await);
            match own == first && first >= LEAST_BLOCKS {
                true => Ok(()),
                false => Err(format!("{own} blocks, and {first} on the first thread")),
            }
        })
        .await;
    }
}

/// Fails if a thread but the first counts any load of other threads.
async fn assert_others_count_nothing(rig: &Rig) {
    for thread in &rig.threads[1..] {
        let page = thread.status().await;
        let elsewhere = Booked::elsewhere(&page["pools"][0]);
        assert_eq!(elsewhere, Booked::default(), "{page}");
    }
}

/// The blocks that the thread of this page remembers, on all workers.
fn known_blocks(page: &Value) -> u64 {
    let workers = page["pools"][0]["workers"].as_array();
    let blocks = workers.into_iter().flatten();
    let blocks = blocks.map(|worker| worker["prefix_blocks"].as_u64());
    let sum = blocks.sum::<Option<u64>>();
    sum.unwrap_or_else(|| panic!("a worker without its blocks in {page}"))
}

/// Fails if any thread has anything booked, in total or on a worker.
async fn assert_all_idle(rig: &Rig) {
    for thread in &rig.threads {
        eventually("a thread has nothing booked", GENEROUS, || async {
            let page = thread.status().await;
            let pool = &page["pools"][0];
            let workers = pool["workers"].as_array().cloned().unwrap_or_default();
            let idle =
                |of: &Value| of["bookings"]["prefills"] == 0 && of["bookings"]["decodes"] == 0;
            match idle(pool) && workers.iter().all(idle) {
                true => Ok(()),
                false => Err(page.to_string()),
            }
        })
        .await;
    }
}
