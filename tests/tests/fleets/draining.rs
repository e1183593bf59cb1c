//! Workers that drain.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{self, Ask, Failure, Reply, chat_body};
use pd_router_e2e::conversation::CHAT;
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{Role, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::rig::{UNHURRIED, pairs, tally, until_later, version};

/// Tokens of a stream of five seconds.
const TOKENS: u64 = 100;

/// Requests that meet each of two workers under any policy.
const REQUESTS: usize = 24;

async fn open(proxy: Proxy) -> (EngineSet, Gateway) {
    let mut engines = EngineSet::with_slots(2, 2, UNHURRIED).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let gateway = engines.gateway(proxy, json!({})).await;
    gateway.is_ready().await;
    (engines, gateway)
}

type PendingReply = JoinHandle<Result<Reply, Failure>>;

/// Begins a stream that ends by itself, and finds its decode worker.
async fn begin(engines: &EngineSet, gateway: &Gateway) -> (PendingReply, usize) {
    let body = with(
        chat_body("a long story"),
        json!({"stream": true, "max_tokens": TOKENS}),
    );
    let ask = Ask::post(CHAT, body.to_string());
    let pending = tokio::spawn(client::try_send(gateway.listen, ask));
    let at = eventually("a decode worker runs", GENEROUS, || async {
        for (at, slot) in engines.decode.iter().enumerate() {
            if slot.state().await.running > 0 {
                return Ok(at);
            }
        }
        Err("none".to_owned())
    });
    (pending, at.await)
}

async fn whole(pending: PendingReply) -> Reply {
    let outcome = pending.await.unwrap_or_else(|error| panic!("{error}"));
    let reply = outcome.unwrap_or_else(|failure| panic!("{failure}"));
    reply.expect_tokens(TOKENS)
}

pub async fn a_draining_worker_gets_nothing_new_and_finishes_what_it_has(proxy: Proxy) {
    let (mut engines, gateway) = open(proxy).await;
    let (pending, at) = begin(&engines, &gateway).await;
    let before = version(&gateway).await;
    engines.set_draining(Role::Decode, at, true);
    engines.set_draining(Role::Prefill, 0, true);
    until_later(&gateway, before).await;
    let (decode, prefill) = (engines.decode[at].name(), engines.prefill[0].name());
    let seen = pairs(&gateway, REQUESTS).await;
    let seen = tally(&seen);
    assert!(!seen.contains_key(decode.as_str()), "{seen:?}");
    assert!(!seen.contains_key(prefill.as_str()), "{seen:?}");
    assert_eq!(whole(pending).await.pair().decode, decode);

    let before = version(&gateway).await;
    engines.set_draining(Role::Decode, at, false);
    engines.set_draining(Role::Prefill, 0, false);
    until_later(&gateway, before).await;
    eventually("both work again", GENEROUS, || async {
        let seen = pairs(&gateway, REQUESTS).await;
        let seen = tally(&seen);
        match seen.contains_key(decode.as_str()) && seen.contains_key(prefill.as_str()) {
            true => Ok(()),
            false => Err(format!("{seen:?}")),
        }
    })
    .await;
    gateway.assert_comes_to_rest().await;
}

pub async fn a_draining_worker_alone_is_as_good_as_none(proxy: Proxy) {
    let (mut engines, gateway) = open(proxy).await;
    let (pending, _) = begin(&engines, &gateway).await;
    for (role, code) in [
        (Role::Decode, "no_decode_worker"),
        (Role::Prefill, "prefill_not_activated"),
    ] {
        engines.set_draining(role, 0, true);
        engines.set_draining(role, 1, true);
        gateway.is_not_ready().await;
        let before = engines.total(role).await.requests;
        for _ in 0..8 {
            gateway
                .send(Ask::chat("hello"))
                .await
                .expect_code(503, code);
        }
        assert_eq!(engines.total(role).await.requests, before);
        engines.set_draining(role, 1, false);
        gateway.is_ready().await;
        gateway.send(Ask::chat("hello")).await.expect(200);
        engines.set_draining(role, 0, false);
    }
    whole(pending).await;
    gateway.assert_comes_to_rest().await;
}
