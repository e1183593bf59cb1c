//! Two pools that list the same workers, and share no knowledge.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::conversation::{CHAT, Conversation};
use pd_router_e2e::engines::{Fleet, named};
use pd_router_e2e::gateway::{Gateway, GatewayParts, worker};
use pd_router_e2e::threads::{Thread, connections_by_thread, endless};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::{ONE, ROUTES, TO_ONE, TO_TWO, TWO, configuration, pool_of};

const THREADS: u16 = 2;
const UNHURRIED: &[&str] = &["--prefill-rate", "1000000", "--token-ms", "50"];

/// Waits until each thread's status page has this property.
async fn until_all_say(threads: &[Thread], what: &str, is_so: impl Fn(&Value) -> bool) {
    eventually(what, GENEROUS, || async {
        for thread in threads {
            let page = thread.status().await;
            if !is_so(&page) {
                return Err(page.to_string());
            }
        }
        Ok(())
    })
    .await;
}

/// The blocks that all workers of this pool hold together, as one thread estimates them.
fn held(page: &Value, pool: &str) -> u64 {
    let pool = pool_of(page, pool);
    let workers = pool["workers"].as_array().cloned().unwrap_or_default();
    let blocks = workers
        .iter()
        .map(|worker| worker["prefix_blocks"].as_u64());
    blocks
        .map(|blocks| blocks.unwrap_or_else(|| panic!("{page}")))
        .sum()
}

pub async fn pools_of_the_same_workers_share_neither_prefixes_nor_loads(proxy: Proxy) {
    let fleet = Fleet::start(2, 2, UNHURRIED).await;
    let workers = [
        named(&fleet.prefill, "p", 11),
        named(&fleet.decode, "d", 21),
    ];
    let pool = |name| {
        json!({
            "name": name,
            "protocol": "nixl",
            "trust_clients": true,
            "discovery": {"static": {"workers": workers.concat()}},
        })
    };
    let config = configuration(vec![pool(ONE), pool(TWO)]);
    let gateway = Gateway::build(proxy, &GatewayParts::on_threads(THREADS), &config, &ROUTES).await;
    let threads = connections_by_thread(&gateway, THREADS.into()).await;

    // All threads learn of the prefixes in the first pool, and the second pool has none.
    let mut first = Conversation::alone("the one");
    for _ in 0..2 {
        first.turn_at(gateway.listen).await;
    }
    until_all_say(&threads, "the first pool's prefixes", |page| {
        held(page, ONE) > 30
    })
    .await;
    for thread in &threads {
        let page = thread.status().await;
        assert_eq!(held(&page, TWO), 0, "{page}");
    }

    // The same conversation in the second pool starts on the other worker, and stays there.
    let stays = first.turn_at(gateway.listen).await.pair().prefill;
    let (elsewhere, id) = match stays.as_str() {
        "p0" => ("p1", "12"),
        _ => ("p0", "11"),
    };
    let mut again = Conversation::alone("the one");
    let ask = again.ask().to(TO_TWO).header("x-prefill-instance-id", id);
    let reply = gateway.send(ask).await.expect(200);
    again.append_reply(&reply);
    until_all_say(&threads, "the second pool's prefixes", |page| {
        held(page, TWO) > 20
    })
    .await;
    for _ in 0..4 {
        let reply = gateway.send(again.ask().to(TO_TWO)).await.expect(200);
        again.append_reply(&reply);
        assert_eq!(reply.pair().prefill, elsewhere);
        let reply = gateway.send(first.ask().to(TO_ONE)).await.expect(200);
        first.append_reply(&reply);
        assert_eq!(reply.pair().prefill, stays);
    }

    // A stream of one pool is booked in that pool alone.
    let ask = Ask::post(CHAT, endless("a stream").to_string()).to(TO_TWO);
    let stream = threads[0].ask(ask);
    let decodes = |page: &Value, pool: &str| pool_of(page, pool)["bookings"]["decodes"].clone();
    until_all_say(&threads[..1], "the stream is booked", |page| {
        decodes(page, TWO) == 1
    })
    .await;
    let page = threads[0].status().await;
    assert_eq!(decodes(&page, ONE), 0, "{page}");
    for name in ["d0", "d1"] {
        let one = worker(&pool_of(&page, ONE), name);
        assert_eq!(one["bookings"]["decodes"], 0, "{page}");
    }
    stream.abort();
    gateway.assert_comes_to_rest().await;
    fleet.assert_no_decode_refused().await;
}
