//! Requests that must not wait, and a decode worker that leaves during prefill.

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Connection, Reply};
use pd_router_e2e::engines::{Fleet, Role};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

/// 1,000 tokens of prompt, at one token for four bytes.
const PROMPT_BYTES: usize = 4000;

/// At the rate below, a prefill of that prompt takes two seconds.
const SLOW_PREFILL: [&str; 4] = ["--prefill-rate", "500", "--token-ms", "1"];

/// More than one such prompt, less than two, in tokens.
const ALLOWED_TOKENS: u64 = 1500;

fn long_prompt() -> Ask {
    Ask::chat(&"tell ".repeat(PROMPT_BYTES / 5))
}

/// Two handles of one connection, whose requests meet one thread.
async fn shared(gateway: &Gateway, handles: usize) -> Vec<Connection> {
    let opened = Connection::open_http2(gateway.listen).await;
    let connection = opened.unwrap_or_else(|failure| panic!("no connection: {failure}"));
    (0..handles).filter_map(|_| connection.share()).collect()
}

async fn until_prefill_runs(running: u64, state: impl AsyncFn() -> u64) {
    eventually("prefill runs", GENEROUS, || async {
        let now = state().await;
        if now == running {
            return Ok(());
        }
        Err(format!("{now} of {running}"))
    })
    .await;
}

pub async fn too_many_tokens_before_prefill_are_refused_at_once(proxy: Proxy) {
    let fleet = Fleet::start(1, 1, &SLOW_PREFILL).await;
    let pool = json!({"prefill": {"max_queued_tokens": ALLOWED_TOKENS}});
    let gateway = Gateway::start(proxy, &fleet.config_with(pool), &[]).await;
    let mut handles = shared(&gateway, 2).await;
    let (mut second, mut first) = (handles.remove(1), handles.remove(0));
    let running = tokio::spawn(async move { first.send(long_prompt()).await });
    until_prefill_runs(1, async || fleet.prefill_total().await.requests).await;

    let reply = second.send(long_prompt()).await;
    let reply: Reply = reply.unwrap_or_else(|failure| panic!("no answer: {failure}"));
    let message = reply.expect_code(429, "backpressure");
    assert!(reply.header("retry-after").is_some(), "{reply:?}");
    assert!(message.contains(&ALLOWED_TOKENS.to_string()), "{message}");
    assert!(!running.is_finished(), "refused while the first still runs");
    assert_eq!(fleet.prefill_total().await.requests, 1);

    let first = running.await.unwrap_or_else(|error| panic!("{error}"));
    first
        .unwrap_or_else(|failure| panic!("no answer: {failure}"))
        .expect(200);
    let again = second.send(long_prompt()).await;
    again
        .unwrap_or_else(|failure| panic!("no answer: {failure}"))
        .expect(200);
    let decode = fleet.decode_total().await;
    assert_eq!((decode.answered, decode.refused()), (2, 0), "{decode:?}");
    gateway.assert_comes_to_rest().await;
}

pub async fn a_decode_that_left_during_prefill_is_replaced(proxy: Proxy) {
    // An engine computes one prompt after the other, so each request has an engine.
    let spec = FixtureSpec::nixl(proxy, (2, 2)).only_options(&SLOW_PREFILL);
    let mut fixture = Fixture::acquire(spec).await;
    let handles = shared(&fixture.gateway, 2).await;
    // Round robin: one of the two is assigned to the leaving decode worker.
    let running = handles
        .into_iter()
        .map(|mut handle| tokio::spawn(async move { handle.send(long_prompt()).await }));
    let running: Vec<_> = running.collect();
    until_prefill_runs(2, async || {
        fixture.engines.total(Role::Prefill).await.requests
    })
    .await;

    fixture.engines.unlist_one(Role::Decode, 0);
    eventually("the gateway knows", GENEROUS, || async {
        let page = fixture
            .gateway
            .try_send(Ask::get("/v1/models/sim/ready"))
            .await;
        let page = page.map_err(|failure| failure.to_string())?;
        let namespaces = page.json()["namespaces"].clone();
        let namespaces = namespaces.as_object().cloned().unwrap_or_default();
        let workers = namespaces
            .values()
            .map(|one| one["worker_types"]["decode"]["workers"].clone());
        if workers.eq([json!(1)]) {
            return Ok(());
        }
        Err(page.text().into_owned())
    })
    .await;
    let still = running.iter().all(|request| !request.is_finished());
    assert!(still, "it left during prefill");

    let stays = fixture.engines.decode[1].name();
    for reply in join_all(running).await {
        let reply = reply.unwrap_or_else(|error| panic!("{error}"));
        let reply = reply.unwrap_or_else(|failure| panic!("no answer: {failure}"));
        assert_eq!(reply.expect(200).pair().decode, stays);
    }
    assert_eq!(fixture.engines.decode[0].state().await.requests, 0);
    assert_eq!(fixture.engines.total(Role::Decode).await.refused(), 0);
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}
