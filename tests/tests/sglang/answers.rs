//! Requests that are answered.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::engine_set::EngineSet;
use pd_router_e2e::engines::{Engine, FAST, Role, static_config};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::wait::{GENEROUS, eventually};
use pd_router_e2e::worker_document::own_loopback;
use serde_json::json;
use std::net::SocketAddr;

use crate::rig::{CHAT, Ports, QUICK, Rig, pool};

/// Sends one request of each kind; fails unless both legs ran.
async fn assert_answers(gateway: &Gateway, engines: &EngineSet) {
    let completion = json!({"model": "sim", "prompt": "Once upon a time", "max_tokens": 4});
    let mut streamed = completion.clone();
    streamed["stream"] = json!(true);
    let all = [
        Ask::chat("hello"),
        Ask::chat_stream("hello"),
        Ask::post("/v1/completions", completion.to_string()),
        Ask::post("/v1/completions", streamed.to_string()),
    ];
    let times = 2 * all.len() as u64;
    for ask in all.iter().chain(&all) {
        let reply = gateway.send(ask.clone()).await.expect(200);
        match reply.header("content-type") {
            Some("application/json") => {
                let answer = reply.json();
                assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
            }
            _ => assert!(!reply.events().is_empty()),
        }
        assert!(!reply.text().contains("bootstrap"), "{}", reply.text());
    }
    engines.is_idle(Role::Prefill).await;
    engines.is_idle(Role::Decode).await;
    gateway.assert_comes_to_rest().await;
    let prefill = engines.total(Role::Prefill).await;
    let decode = engines.total(Role::Decode).await;
    assert_eq!(prefill.refused(), 0, "{prefill:?}");
    assert_eq!(decode.refused(), 0, "{decode:?}");
    assert_eq!(prefill.requests, times, "{prefill:?}");
    assert_eq!(decode.requests, times, "{decode:?}");
    assert_eq!(decode.answered, times, "{decode:?}");
    assert!(decode.prompt_tokens_computed <= times, "{decode:?}");
}

pub async fn chats_and_completions_are_answered_by_both_legs(proxy: Proxy) {
    let rig = Rig::start(proxy, FAST, (2, 2)).await;
    assert_answers(&rig.fixture.gateway, &rig.fixture.engines).await;
    rig.ends().await;
}

pub async fn a_prefill_worker_is_asked_for_its_bootstrap_port(proxy: Proxy) {
    let mut engines = EngineSet::with_slots(2, 2, QUICK).await;
    engines.start_and_list(Role::Prefill).await;
    engines.start_and_list(Role::Decode).await;
    let gateway = engines.gateway(proxy, pool(Ports::Fetched)).await;
    gateway.is_ready().await;
    assert_answers(&gateway, &engines).await;
}

pub async fn a_prefill_worker_that_does_not_tell_is_pending_until_it_does(proxy: Proxy) {
    let decode = Engine::start(Role::Decode, QUICK).await;
    // An engine finds a free address, and is then killed.
    let anywhere = SocketAddr::from((own_loopback(), 0));
    let mut prefill = Engine::start_at(anywhere, Role::Prefill, QUICK).await;
    prefill.kill();
    let workers = vec![prefill.listed(), decode.listed()];
    let config = static_config(workers, pool(Ports::Fetched));
    let gateway = Gateway::start(proxy, &config, &[]).await;
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        let reply = gateway.send(ask).await;
        reply.expect_code(503, "prefill_pending");
        assert!(reply.header("retry-after").is_some(), "{reply:?}");
    }
    gateway.send(Ask::get("/pd-router/ready")).await.expect(503);
    assert_eq!(decode.state().await.requests, 0);

    let back = Engine::start_at(prefill.address, Role::Prefill, QUICK).await;
    gateway.answers().await;
    gateway.is_ready().await;
    for engine in [&back, &decode] {
        let state = engine.state().await;
        assert_eq!((state.requests, state.refused()), (1, 0), "{state:?}");
    }
    gateway.assert_comes_to_rest().await;
}

pub async fn decode_ends_only_after_prefill_is_known_to_be_good(proxy: Proxy) {
    // Prefill takes half a second, and decode ends as soon as it has the blocks.
    let options = ["--prefill-rate", "800", "--token-ms", "1"];
    let rig = Rig::start(proxy, &options, (1, 1)).await;
    let prompt = "tell ".repeat(320);
    for streamed in [false, true] {
        let mut body = chat_body(&prompt);
        body["stream"] = json!(streamed);
        let reply = rig.fixture.send(Ask::post(CHAT, body.to_string())).await;
        let reply = reply.expect(200);
        match streamed {
            true => assert!(reply.events().len() >= 4, "{}", reply.text()),
            false => assert_eq!(reply.json()["usage"]["completion_tokens"], 4),
        }
        // The last chunk comes after prefill's answer.
        eventually("prefill has answered", GENEROUS, || async {
            let state = rig.fixture.total(Role::Prefill).await;
            if state.running == 0 {
                return Ok(());
            }
            Err(format!("{state:?}"))
        })
        .await;
    }
    rig.assert_none_refused().await;
    rig.ends().await;
}
