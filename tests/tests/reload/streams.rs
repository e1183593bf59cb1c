//! Streams that run while the configuration changes.

use pd_router_e2e::client::{Ask, Connection, Pair, chat_body};
use pd_router_e2e::conversation::CHAT;
use pd_router_e2e::engines::with;
use pd_router_e2e::gateway::Booked;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::threads::endless_ask;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::Rig;

/// Tokens of the stream that runs meanwhile, and milliseconds between two of them.
const TOKENS: u64 = 200;
const OPTIONS: &[&str] = &["--prefill-rate", "1000000", "--token-ms", "100"];

async fn begin(rig: &Rig) -> Raw {
    let body = with(
        chat_body("a long story"),
        json!({"max_tokens": TOKENS, "stream": true}),
    );
    let request = raw::post(CHAT, &[], body.to_string().as_bytes());
    let mut reader = Raw::connect(rig.gateway).await;
    reader.write(&request).await;
    reader.read_until("data:", 3).await;
    rig.until_streams_are(1.0).await;
    reader
}

pub async fn a_new_configuration_ends_no_stream_and_forgets_no_booking() {
    let rig = Rig::start(2, OPTIONS, json!({})).await;
    let mut reader = begin(&rig).await;
    rig.reconfigure(rig.configuration(json!({}))).await;
    rig.send(Ask::chat("hello")).await.expect_tokens(4);
    // The short request has ended; the earlier stream is still booked.
    rig.until_streams_are(1.0).await;
    reader.read_reply().await.expect_tokens(TOKENS);
    rig.comes_to_rest().await;
    rig.send(Ask::chat("hello")).await.expect_tokens(4);
}

/// Waits until all threads count this many answers and no prefill.
async fn until_all_count(rig: &Rig, decodes: u64) {
    let wanted = Booked {
        prefills: 0,
        decodes,
    };
    eventually("all threads know what is booked", GENEROUS, || async {
        for _ in 0..rig.enough_connections() {
            let pool = rig.pool().await;
            if Booked::anywhere(&pool) != wanted {
                return Err(pool.to_string());
            }
        }
        Ok(())
    })
    .await;
}

/// The pair of a request. Until the other thread learns of its end, both workers look equally loaded: all threads then know of
/// a later stream on its thread, and of the end of both.
async fn pair_once_it_is_known(rig: &Rig, content: &str) -> Pair {
    let connection = Connection::open(rig.gateway).await;
    let mut connection = connection.unwrap_or_else(|failure| panic!("{failure}"));
    let reply = connection.send(Ask::chat(content)).await;
    let reply = reply.unwrap_or_else(|failure| panic!("no answer: {failure}"));
    // A connection stays on its thread.
    let later = tokio::spawn(async move { connection.send(endless_ask("and later?")).await });
    until_all_count(rig, 2).await;
    later.abort();
    until_all_count(rig, 1).await;
    reply.expect(200).pair()
}

/// Selections under the new configuration count the earlier stream.
pub async fn what_was_booked_before_weighs_after() {
    let rig = Rig::start(2, OPTIONS, json!({})).await;
    let mut reader = begin(&rig).await;
    rig.reconfigure(rig.configuration(json!({}))).await;
    let running = match rig.decode[0].state().await.running {
        0 => "d1",
        _ => "d0",
    };
    // On any thread: the other worker is known to be idle.
    until_all_count(&rig, 1).await;
    for number in 0..8 {
        let pair = pair_once_it_is_known(&rig, &format!("question {number}")).await;
        assert_ne!(pair.decode, running);
    }
    reader.read_reply().await.expect_tokens(TOKENS);
    rig.comes_to_rest().await;
}

pub async fn a_worker_that_the_new_configuration_lacks_finishes_its_stream() {
    let rig = Rig::start(2, OPTIONS, json!({})).await;
    let mut reader = begin(&rig).await;
    let running = match rig.decode[0].state().await.running {
        0 => "d1",
        _ => "d0",
    };
    let mut fewer = rig.configuration(json!({}));
    if let Some(workers) = fewer["pools"][0]["discovery"]["static"]["workers"].as_array_mut() {
        workers.retain(|worker: &Value| worker["name"] != running);
    }
    rig.reconfigure(fewer).await;
    for _ in 0..8 {
        let pair = rig.send(Ask::chat("hello")).await.expect(200).pair();
        assert_ne!(pair.decode, running);
    }
    reader.read_reply().await.expect_tokens(TOKENS);
    rig.comes_to_rest().await;
}
