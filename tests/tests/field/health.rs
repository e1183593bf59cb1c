//! Workers that fail, under load and alone: no healthy worker is kept out, and no worker is ejected for another's failure.

use std::net::SocketAddr;

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, send};
use pd_router_e2e::engines::{Engine, FAST, Fleet, Role, in_turns, with};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

/// sgl-project/sglang #31206: a breaker that opens and never closes.
pub async fn an_ejected_worker_comes_back_after_one_trial(proxy: Proxy) {
    let fleet = Fleet::start(2, 1, FAST).await;
    let pool = json!({"health": {"eject_after": 2, "eject_ms": 1500}});
    let config = fleet.config_with(with(in_turns(), pool));
    let gateway = Gateway::start_on_one_thread(proxy, &config, &[]).await;
    let faulty = &fleet.prefill[0];
    let ejections = async || {
        gateway.send(Ask::chat("hello")).await.expect_tokens(4);
        let metrics = gateway.metrics().await;
        metrics.sum("pd_router_ejections_total").unwrap_or_default()
    };
    faulty
        .fault(&json!({"kind": "status", "status": 500}))
        .await;
    for times in [1.0, 2.0] {
        eventually("it is ejected", GENEROUS, || async {
            match ejections().await {
                now if now == times => Ok(()),
                now => Err(format!("{now}")),
            }
        })
        .await;
        let before = faulty.state().await.requests;
        for _ in 0..6 {
            gateway.send(Ask::chat("hello")).await.expect_tokens(4);
        }
        let meanwhile = faulty.state().await.requests - before;
        assert_eq!(meanwhile, 0, "it is passed over");
    }
    // Two failures in a row, then one in its trial, which costs its client nothing.
    assert_eq!(faulty.state().await.failed_by_fault, 3);

    faulty.clear_faults().await;
    let before = faulty.state().await.answered;
    eventually("it serves again", GENEROUS, || async {
        gateway.send(Ask::chat("hello")).await.expect_tokens(4);
        let served = faulty.state().await.answered - before;
        if served > 3 {
            return Ok(());
        }
        Err(format!("{served}"))
    })
    .await;
    let ejected = gateway.metrics().await.sum("pd_router_ejected");
    assert_eq!(ejected.unwrap_or_default(), 0.0);
    fleet.assert_no_decode_refused().await;
    gateway.assert_comes_to_rest().await;
}

/// Message of a decode engine whose prefill engine died before the blocks were pulled.
const PARTNER_DIED: &str = "NIXL handshake failed";

const CLIENTS: usize = 40;

/// Requests of a client.
const TURNS: usize = 30;

/// Prompts that an engine has computed before it is killed: a tenth of them all.
const BEFORE: u64 = (CLIENTS * TURNS / 10) as u64;

/// More prompts than an engine computes beside another that lives to the end.
const MORE_THAN_ITS_HALF: u64 = (CLIENTS * TURNS * 3 / 5) as u64;

/// One of many clients, one request after the other; returns how many answers were lost with the dead prefill engine.
async fn ask_meanwhile(to: SocketAddr, number: usize) -> usize {
    let mut lost = 0;
    for turn in 0..TURNS {
        let prompt = format!("question {turn} of client {number}");
        let ask = match number % 2 {
            0 => Ask::chat(&prompt),
            _ => Ask::chat_stream(&prompt),
        };
        let reply = send(to, ask).await;
        if reply.status == 500 && reply.text().contains(PARTNER_DIED) {
            lost += 1;
            continue;
        }
        reply.expect_tokens(4);
    }
    lost
}

async fn until_it_has_answered(engine: &Engine, prompts: u64) {
    eventually("an engine computes prompts", GENEROUS, || async {
        let answered = engine.state().await.answered;
        match answered >= prompts {
            true => Ok(()),
            false => Err(format!("{answered} prompts")),
        }
    })
    .await;
}

/// Kills one of two prefill engines under 40 clients; returns how many answers were lost.
async fn lost_with_a_prefill(proxy: Proxy, decodes: usize) -> usize {
    let spec = FixtureSpec::nixl(proxy, (2, decodes)).only_options(&["--speedup", "10"]);
    let mut fixture = Fixture::acquire(spec).await;
    let listen = fixture.gateway.listen;
    let clients = (0..CLIENTS).map(|number| ask_meanwhile(listen, number));
    let (lost, ()) = tokio::join!(join_all(clients), async {
        until_it_has_answered(fixture.prefill(0), BEFORE).await;
        fixture.engines.prefill[0].kill().await;
    });
    let by_the_other = fixture.prefill(1).state().await.answered;
    assert!(
        by_the_other > MORE_THAN_ITS_HALF,
        "{by_the_other}: the engine died when all was over"
    );
    // Later requests lose nothing.
    assert_eq!(ask_meanwhile(listen, 0).await, 0);
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
    lost.iter().sum()
}

/// SemiAnalysisAI/InferenceX #2255, and losses of other routers when a prefill engine dies.
pub async fn killing_one_of_two_prefills_under_load_costs_no_answer(proxy: Proxy) {
    assert_eq!(lost_with_a_prefill(proxy, 2).await, 0);
    // The only decode worker fails requests whose blocks it was about to pull, and is tried again.
    assert_eq!(lost_with_a_prefill(proxy, 1).await, 0);
}

/// gateway-api-inference-extension #1436, TensorRT-LLM #12893: an error that is not JSON, parsed or hidden.
pub async fn an_engine_error_that_is_text_passes_as_it_is(proxy: Proxy) {
    let page = "no healthy upstream\n\t<html>\u{e9}</html>";
    for role in [Role::Prefill, Role::Decode] {
        let fixture = Fixture::one_of_each(proxy).await;
        let fault = json!({
            "kind": "status", "status": 418, "headers": {"content-type": "text/plain"}, "body": page,
        });
        fixture.inject_one(role, &fault).await;
        for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
            let reply = fixture.send(ask).await.expect(418);
            assert_eq!(reply.text(), page);
            assert_eq!(reply.header("content-type"), Some("text/plain"));
        }
        fixture.gateway.assert_comes_to_rest().await;
        fixture.release();
    }
}
