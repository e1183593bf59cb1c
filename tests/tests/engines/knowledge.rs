//! What the gateway knows of the engines, and says of them.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::gateway::{self, Gateway};
use pd_router_e2e::vllm::{Fleet, MODEL};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::corpus::{COMPLETIONS, words};

/// Blocks of 32 tokens that an engine has.
const BLOCKS: u64 = 1024;

pub async fn found_v5_models_are_listed_as_an_engine_lists_them(fleet: &Fleet) {
    let gateway = Gateway::start(Proxy::Envoy, &fleet.config(), &[]).await;
    let ours = gateway
        .send(Ask::get("/v1/models"))
        .await
        .expect(200)
        .json();
    let theirs = fleet
        .alone
        .send(Ask::get("/v1/models"))
        .await
        .expect(200)
        .json();
    assert_eq!(ours["object"], theirs["object"]);
    let (ours, theirs) = (&ours["data"][0], &theirs["data"][0]);
    for name in ["id", "object", "parent"] {
        assert_eq!(ours[name], theirs[name], "{name}");
    }
    // All of its fields, but for the one that only the engine knows.
    let names = |model: &Value| -> Vec<String> {
        let names = model
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, _)| name.clone());
        names.filter(|name| name != "max_model_len").collect()
    };
    assert_eq!(names(ours), names(theirs));
    let unknown = json!({"model": "another", "prompt": "x"});
    let refused = gateway
        .send(Ask::post(COMPLETIONS, unknown.to_string()))
        .await;
    let engines = fleet
        .alone
        .send(Ask::post(COMPLETIONS, unknown.to_string()))
        .await;
    let (refused, engines) = (refused.expect(404).json(), engines.expect(404).json());
    for name in ["type", "param", "code"] {
        assert_eq!(
            refused["error"][name], engines["error"][name],
            "{refused}, {engines}"
        );
    }
}

pub async fn engine_metrics_are_read_by_their_real_names(fleet: &Fleet) {
    let pool = json!({"engine_metrics": {"interval_ms": 500}});
    let gateway = Gateway::start(Proxy::Envoy, &fleet.config_with(pool), &[]).await;
    eventually("every engine's figures are known", GENEROUS, || async {
        let status = gateway.status().await;
        for engine in &fleet.engines {
            let figures = gateway::worker(&status, &engine.name)["engine"].clone();
            let known = ["waiting", "running"].iter().all(|name| figures[name] == 0);
            if !known || figures["kv_blocks"] != BLOCKS {
                return Err(format!("{}: {figures}", engine.name));
            }
        }
        Ok(())
    })
    .await;
}

pub async fn cached_tokens_are_those_of_prefill(fleet: &Fleet) {
    let gateway = Gateway::start_on_one_thread(Proxy::Envoy, &fleet.config(), &[]).await;
    let prompt = words(9000, 120);
    let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0});
    let ask = Ask::post(COMPLETIONS, body.to_string());
    let cached = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    let engines = fleet.engines.len();
    let first = gateway.send(ask.clone()).await.expect(200).json();
    assert_eq!(cached(&first), Some(0), "{first}");
    // Each prefill engine has had it by then.
    for _ in 0..engines {
        gateway.send(ask.clone()).await.expect(200);
    }
    let last = gateway.send(ask).await.expect(200).json();
    let tokens = last["usage"]["prompt_tokens"].as_u64().unwrap_or_default();
    let cached = cached(&last).unwrap_or_default();
    assert!(cached > tokens / 2 && cached < tokens, "{last}");
}
