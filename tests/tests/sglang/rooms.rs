//! Rooms: never reused, of the right rank, and the same on both legs.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engine_set::EngineSlot;
use pd_router_e2e::engines::{FAST, Role};
use serde_json::{Value, json};

use crate::rig::{Rig, spec};

/// Requests per batch: an engine remembers its last 64.
const BATCH: usize = 50;

const RANKS: u64 = 4;

/// The three fields by which two legs meet.
#[derive(Clone, Debug, PartialEq)]
struct BootstrapFields {
    host: String,
    port: u64,
    room: u64,
}

fn bootstrap_fields(body: &Value) -> BootstrapFields {
    let number = |name: &str| {
        let value = body[name].as_u64();
        value.unwrap_or_else(|| panic!("{name} is no whole number in {body}"))
    };
    let host = body["bootstrap_host"].as_str();
    let host = host.unwrap_or_else(|| panic!("no bootstrap_host in {body}"));
    BootstrapFields {
        host: host.to_owned(),
        port: number("bootstrap_port"),
        room: number("bootstrap_room"),
    }
}

/// The fields of each prompt's leg, by prompt.
async fn bootstrap_fields_by_prompt(
    slots: &[EngineSlot],
    prompts: &BTreeSet<String>,
) -> BTreeMap<String, BootstrapFields> {
    let mut all = BTreeMap::new();
    for slot in slots.iter().filter(|slot| slot.is_running()) {
        for got in slot.engine().requests().await {
            let body = got.json();
            let prompt = body["messages"][0]["content"].as_str().unwrap_or_default();
            if !prompts.contains(prompt) {
                continue;
            }
            let other = all.insert(prompt.to_owned(), bootstrap_fields(&body));
            assert!(other.is_none(), "two legs of one role for {prompt}");
        }
    }
    all
}

/// Sends this many requests in batches; returns the rooms, which both legs must share.
async fn rooms_of(rig: &Rig, topic: &str, batches: usize, ask: impl Fn(&str) -> Ask) -> Vec<u64> {
    let mut rooms = Vec::new();
    let prefills = rig.fixture.slots(Role::Prefill).iter();
    let servers = prefills.filter_map(|slot| slot.bootstrap);
    let servers: Vec<String> = servers.map(|server| server.to_string()).collect();
    for batch in 0..batches {
        let prompts: BTreeSet<String> = (0..BATCH)
            .map(|number| format!("{topic} {batch}/{number}"))
            .collect();
        // Separate connections spread over both threads.
        let replies = prompts.iter().map(|prompt| rig.fixture.send(ask(prompt)));
        for reply in join_all(replies).await {
            reply.expect(200);
        }
        rig.assert_comes_to_rest().await;
        let prefill = bootstrap_fields_by_prompt(rig.fixture.slots(Role::Prefill), &prompts).await;
        let decode = bootstrap_fields_by_prompt(rig.fixture.slots(Role::Decode), &prompts).await;
        assert_eq!(prefill.len(), BATCH, "every request has its prefill leg");
        assert_eq!(prefill, decode, "prefill's legs, then decode's");
        for fields in prefill.values() {
            let server = format!("{}:{}", fields.host, fields.port);
            assert!(servers.contains(&server), "{fields:?} of {servers:?}");
            let largest = i64::MAX.unsigned_abs();
            assert!(fields.room <= largest, "{fields:?}");
            rooms.push(fields.room);
        }
    }
    rooms
}

pub async fn no_room_is_used_twice(proxy: Proxy) {
    let rig = Rig::start(proxy, FAST, (2, 2)).await;
    let rooms = rooms_of(&rig, "question", 4, Ask::chat).await;
    let different: BTreeSet<u64> = rooms.iter().copied().collect();
    assert_eq!((different.len(), rooms.len()), (4 * BATCH, 4 * BATCH));
    rig.assert_none_refused().await;
    rig.ends().await;
}

/// Prefill engines with ranks.
async fn with_ranks(proxy: Proxy) -> Rig {
    let ranks = spec(proxy).engines(&["--dp-size", "4"], json!({"dp_size": RANKS}));
    Rig::on(ranks.workers((1, 1))).await
}

pub async fn every_rank_has_its_rooms(proxy: Proxy) {
    let rig = with_ranks(proxy).await;
    let rooms = rooms_of(&rig, "question", 2, Ask::chat).await;
    let ranks: BTreeSet<u64> = rooms.iter().map(|room| room % RANKS).collect();
    assert_eq!(ranks, (0..RANKS).collect());
    rig.assert_none_refused().await;
    rig.ends().await;
}

pub async fn a_pinned_rank_has_rooms_of_its_own(proxy: Proxy) {
    let rig = with_ranks(proxy).await;
    for rank in 0..RANKS {
        let other = (rank + 1) % RANKS;
        let pinned = |prompt: &str| {
            Ask::chat(prompt)
                .header("x-prefill-dp-rank", &rank.to_string())
                // Decode's own rank has another header.
                .header("x-dp-rank", &other.to_string())
        };
        let topic = format!("question for {rank}");
        for room in rooms_of(&rig, &topic, 1, pinned).await {
            assert_eq!(room % RANKS, rank, "{room}");
        }
    }
    rig.assert_none_refused().await;
    rig.ends().await;
}
