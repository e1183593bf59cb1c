//! Tests of an engine's prefix cache, and of its effects on answers and counters.

use super::*;
use crate::engine::PrefixCache;

fn keeping(config: EngineConfig) -> EngineConfig {
    EngineConfig {
        prefix_cache: PrefixCache::Lru,
        block_tokens: 4,
        ..config
    }
}

/// The cached tokens in an answer.
fn cached(answer: &str) -> u64 {
    let answer = parsed(answer);
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    cached.as_u64().expect("a number")
}

#[tokio::test]
async fn only_what_is_behind_the_longest_prefix_is_computed() {
    let probe = Probe::new();
    let engine = start(keeping(quick(Role::Aggregated))).await;
    let ask = async |prompt: &str| {
        let (status, answer) = probe.post(engine.address, CHAT, &chat(prompt)).await;
        assert_eq!(status, 200, "{answer}");
        cached(&answer)
    };
    let (first, second) = ("a".repeat(48), "b".repeat(8));
    assert_eq!(ask(&first).await, 0);
    assert_eq!(ask(&format!("{first}{second}")).await, 12);
    assert_eq!(ask(&first).await, 11, "the last token is computed");
    assert_eq!(ask(&format!("{second}{first}")).await, 0);
    let state = probe.state(engine.address).await;
    assert_eq!(state["cached_tokens"], 23);
    assert_eq!(state["computed_tokens"], 12 + 2 + 1 + 14);
}

#[tokio::test]
async fn a_prompt_that_is_kept_takes_less_time() {
    let probe = Probe::new();
    let engine = start(EngineConfig {
        prefill_rate: 1000.0,
        speedup: 1.0,
        ..keeping(EngineConfig::new(Role::Prefill))
    })
    .await;
    let long = "x".repeat(2400);
    let before = Instant::now();
    probe.prefill(&engine, &long).await;
    let first = before.elapsed();
    probe.prefill(&engine, &long).await;
    let second = before.elapsed() - first;
    assert!(first >= Duration::from_millis(600), "{first:?}");
    assert!(second < Duration::from_millis(300), "{second:?}");
}

#[tokio::test]
async fn the_least_recently_used_go_first() {
    let probe = Probe::new();
    let engine = start(EngineConfig {
        kv_blocks: 4,
        ..keeping(quick(Role::Prefill))
    })
    .await;
    // Three blocks of another prompt; the handed-off KV is dropped, so that blocks for computing are free.
    for prompt in ["a".repeat(48), "b".repeat(48), "a".repeat(48)] {
        let handoff = probe.prefill(&engine, &prompt).await;
        let decode = start(quick(Role::Decode)).await;
        let leg = decode_leg(&prompt, &handoff);
        assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 200);
    }
    let state = probe.state(engine.address).await;
    assert_eq!(state["cached_tokens"], 4, "one block was left of the first");
}

#[tokio::test]
async fn every_prompt_of_a_batch_is_looked_up_for_itself() {
    let probe = Probe::new();
    let engine = start(EngineConfig {
        dialect: Dialect::Sglang,
        ..keeping(quick(Role::Aggregated))
    })
    .await;
    let ids = [[1u32; 9], [2; 9]];
    let ask = async |ids: Value| {
        let body = json!({"input_ids": ids, "sampling_params": {"max_new_tokens": 1}});
        let (status, answer) = probe.post(engine.address, "/generate", &body).await;
        assert_eq!(status, 200, "{answer}");
        parsed(&answer)
    };
    assert_eq!(ask(json!(ids[0])).await["meta_info"]["cached_tokens"], 0);
    let both = ask(json!(ids)).await;
    assert_eq!(both[0]["meta_info"]["cached_tokens"], 8);
    assert_eq!(both[1]["meta_info"]["cached_tokens"], 0);
}

#[tokio::test]
async fn a_server_tells_a_prompts_ids_without_running_it() {
    let probe = Probe::new();
    let engine = start(quick(Role::Prefill)).await;
    let at = engine.address;
    assert!(probe.get(at, "/version").await.contains("version"));
    let (status, rendered) = probe
        .post(at, &format!("{CHAT}/render"), &chat("12345678"))
        .await;
    assert_eq!(status, 200, "{rendered}");
    let ids = parsed(&rendered)["token_ids"].take();
    assert_eq!(ids.as_array().map(Vec::len), Some(2));
    for body in [
        chat("12345678"),
        json!({"model": "sim", "prompt": "12345678"}),
    ] {
        let (status, answer) = probe.post(at, "/tokenize", &body).await;
        assert_eq!(status, 200, "{answer}");
        let answer = parsed(&answer);
        assert_eq!((&answer["tokens"], &answer["count"]), (&ids, &json!(2)));
    }
    assert_eq!(probe.post(at, "/tokenize", &json!({})).await.0, 400);
    assert_eq!(probe.state(at).await["requests"], 0);
    let other = start(sglang(Role::Decode)).await;
    let info = parsed(&probe.get(other.address, "/model_info").await);
    assert_eq!(info["model_path"], "sim");
    assert_eq!(
        probe.post(other.address, "/tokenize", &json!({})).await.0,
        404
    );
}
