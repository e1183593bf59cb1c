//! Tests of prompts with markers that make an engine fail, or end early.

use super::*;
use crate::engine::marker::WORDY;

#[tokio::test]
async fn a_prefill_that_ends_by_itself_hands_nothing_off() {
    let (probe, prefill, _) = pair().await;
    for (mark, finish) in [("<|end|>", "stop"), ("<|lose|>", "length")] {
        let (status, body) = probe.post(prefill.address, CHAT, &prefill_leg(mark)).await;
        assert_eq!(status, 200, "{body}");
        let answer = parsed(&body);
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], finish);
        assert_eq!(choice["message"]["content"], "token0");
        let fields = answer.as_object().expect("an object");
        assert_eq!(fields.get("kv_transfer_params"), Some(&Value::Null));
    }
    let state = probe.state(prefill.address).await;
    for field in ["handoffs_issued", "blocks_unpulled", "blocks_used"] {
        assert_eq!(state[field], 0, "{field}");
    }
    assert_eq!(state["answered"], 2);
}

#[tokio::test]
async fn generation_ends_by_itself_at_its_first_token() {
    let (probe, prefill, decode) = pair().await;
    let aggregated = start(quick(Role::Aggregated)).await;
    let whole = chat("so <|end|>");
    let (_, body) = probe.post(aggregated.address, CHAT, &whole).await;
    let answer = parsed(&body);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["choices"][0]["message"]["content"], "token0");
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    let stream = with(&whole, "stream", json!(true));
    let (_, body) = probe.post(aggregated.address, CHAT, &stream).await;
    let events = events(&body);
    assert_eq!(events.len(), 3, "{body}");
    assert_eq!(parsed(events[1])["choices"][0]["finish_reason"], "stop");
    let response = json!({"model": "sim", "input": "<|end|>", "stream": true});
    let (_, body) = probe
        .post(aggregated.address, "/v1/responses", &response)
        .await;
    assert!(body.contains("event: response.completed"), "{body}");
    let _ = probe.prefill(&prefill, "<|end|>").await;
    let (status, _) = probe.post(decode.address, CHAT, &whole).await;
    assert_eq!(status, 500, "a decode still wants its hand-off");
}

#[tokio::test]
async fn a_prefill_fails_after_computing() {
    let (probe, prefill, _) = pair().await;
    let leg = prefill_leg("<|fail-prefill|>");
    assert_eq!(probe.post(prefill.address, CHAT, &leg).await.0, 500);
    let state = probe.state(prefill.address).await;
    assert_eq!(state["failed_as_marked"], 1);
    assert_eq!(state["prompt_tokens_computed"], 4);
    assert_eq!(state["refused_handoffs"], 0);
    assert_eq!(state["blocks_used"], 0);
    assert_eq!(state["answered"], 0);
}

#[tokio::test]
async fn a_decode_dies_mid_stream() {
    let (probe, prefill, decode) = pair().await;
    let prompt = "<|die-mid-stream|>";
    for max_tokens in [3, 50] {
        let leg = decode_leg(prompt, &probe.prefill(&prefill, prompt).await);
        let leg = with(&leg, "max_tokens", json!(max_tokens));
        let stream = with(&leg, "stream", json!(true));
        let broken = probe.broken(decode.address, &stream).await;
        assert_eq!(broken.status, Some(StatusCode::OK));
        assert_eq!(tokens(&broken.text), 3, "{}", broken.text);
        assert!(!broken.text.contains("[DONE]"));
    }
    let leg = decode_leg(prompt, &probe.prefill(&prefill, prompt).await);
    let broken = probe.broken(decode.address, &leg).await;
    assert_eq!(broken.status, None);
    let state = probe.state(decode.address).await;
    assert_eq!(state["failed_as_marked"], 3);
    for field in ["running", "blocks_used", "answered", "aborted"] {
        assert_eq!(state[field], 0, "{field}");
    }
}

#[tokio::test]
async fn poison_makes_whoever_takes_it_fail_without_a_token() {
    let (probe, prefill, decode) = pair().await;
    let broken = probe
        .broken(prefill.address, &prefill_leg("<|break-prefill|>"))
        .await;
    assert_eq!(broken.status, None);
    for stream in [false, true] {
        for (mark, status) in [("<|fail-decode|>", Some(500)), ("<|break-decode|>", None)] {
            let leg = decode_leg(mark, &probe.prefill(&prefill, mark).await);
            let leg = with(&leg, "stream", json!(stream));
            match status {
                Some(status) => assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, status),
                None => assert_eq!(probe.broken(decode.address, &leg).await.status, None),
            }
        }
    }
    assert_eq!(probe.state(prefill.address).await["pulled"], 4);
    let state = probe.state(decode.address).await;
    assert_eq!(state["failed_as_marked"], 4);
    assert_eq!(state["blocks_used"], 0);
}

#[tokio::test]
async fn an_engine_says_much_with_each_token() {
    let aggregated = start(quick(Role::Aggregated)).await;
    let probe = Probe::new();
    let stream = with(&chat("so <|wordy|>"), "stream", json!(true));
    let (_, body) = probe.post(aggregated.address, CHAT, &stream).await;
    let events = events(&body);
    let (done, tokens) = events.split_last().expect("events");
    assert_eq!(*done, "[DONE]");
    for event in tokens {
        assert!(event.len() > WORDY && parsed(event)["id"].is_string());
    }
}

#[tokio::test]
async fn a_decode_is_slow() {
    let (probe, prefill, decode) = pair().await;
    let prompt = "<|slow-decode|>";
    let leg = decode_leg(prompt, &probe.prefill(&prefill, prompt).await);
    let sent = Instant::now();
    assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 200);
    // Three tokens of 10 ms, times 20, at a speed-up of 20.
    assert!(sent.elapsed() >= Duration::from_millis(30));
}
