//! Tests of SGLang's requests of several sequences, and of its own endpoint.

use super::*;

const GENERATE: &str = "/generate";
const COMPLETIONS: &str = "/v1/completions";

/// Either leg of a request that meets at this prefill engine in these rooms.
fn in_rooms(prefill: &Engine, rooms: &[u64], request: &Value) -> Value {
    let at = prefill.bootstrap.expect("a bootstrap server");
    let mut leg = request.clone();
    leg["bootstrap_host"] = rooms.iter().map(|_| json!(at.ip().to_string())).collect();
    leg["bootstrap_port"] = rooms.iter().map(|_| json!(at.port())).collect();
    leg["bootstrap_room"] = json!(rooms);
    leg
}

/// Sends both legs; returns the answers of prefill and decode.
async fn both(path: &str, prefill: &Engine, decode: &Engine, leg: &Value) -> (String, String) {
    let probe = Probe::new();
    let of_prefill = with(leg, "stream", json!(false));
    let (one, other) = tokio::join!(
        probe.post(prefill.address, path, &of_prefill),
        probe.post(decode.address, path, leg)
    );
    assert_eq!((one.0, other.0), (200, 200), "{} {}", one.1, other.1);
    (one.1, other.1)
}

#[tokio::test]
async fn each_sequence_has_a_room() {
    let (probe, prefill, decode) = sglang_pair().await;
    let long = "x".repeat(4 * 40);
    let batch = json!({"model": "sim", "prompt": [long, "y"], "n": 2, "max_tokens": 3});
    let leg = in_rooms(&prefill, &[1, 2, 3, 4], &batch);
    let (of_prefill, body) = both(COMPLETIONS, &prefill, &decode, &leg).await;
    assert_eq!(parsed(&of_prefill)["usage"]["completion_tokens"], 4);
    assert_eq!(parsed(&body)["choices"].as_array().map(Vec::len), Some(4));

    let choices = with(&chat("hello"), "n", json!(2));
    let leg = with(
        &in_rooms(&prefill, &[5, 6], &choices),
        "stream",
        json!(true),
    );
    let (_, body) = both(CHAT, &prefill, &decode, &leg).await;
    assert_eq!(events(&body).len(), 2 * 4 + 1, "{body}");

    let state = probe.state(prefill.address).await;
    let want = json!({"issued": 6, "pulled": 6, "blocks_issued": 3 + 3 + 1 + 1 + 1 + 1, "blocks_used": 0,
        "rooms_open": 0, "prompt_tokens_computed": 41 + 2});
    for (field, value) in want.as_object().expect("an object") {
        assert_eq!(&state[field], value, "{field}");
    }
    assert_eq!(probe.state(decode.address).await["refused"], 0);
}

#[tokio::test]
async fn mixed_up_rooms_are_noticed() {
    let (probe, prefill, decode) = sglang_pair().await;
    let batch = json!({"model": "sim", "prompt": ["a", "b"], "max_tokens": 1});
    let leg = in_rooms(&prefill, &[1, 2], &batch);
    let prefilled = probe.post(prefill.address, COMPLETIONS, &leg).await;
    assert_eq!(prefilled.0, 200);
    let crossed = in_rooms(&prefill, &[2, 1], &batch);
    let (status, body) = probe.post(decode.address, COMPLETIONS, &crossed).await;
    assert_eq!(status, 500, "{body}");
    for rooms in [&[5][..], &[5, 6, 7], &[5, 5]] {
        let leg = in_rooms(&prefill, rooms, &batch);
        for engine in [&prefill, &decode] {
            assert_eq!(probe.post(engine.address, COMPLETIONS, &leg).await.0, 400);
        }
    }
    assert_eq!(probe.state(prefill.address).await["refused_bad_room"], 3);
}

#[tokio::test]
async fn all_rooms_of_a_request_are_of_one_rank() {
    let probe = Probe::new();
    let prefill = start(EngineConfig {
        dp_size: 2,
        ..sglang(Role::Prefill)
    })
    .await;
    let batch = json!({"model": "sim", "prompt": ["a", "b"], "routed_dp_rank": 1});
    for (rooms, want) in [([1, 2], 400), ([1, 3], 200)] {
        let leg = in_rooms(&prefill, &rooms, &batch);
        assert_eq!(probe.post(prefill.address, COMPLETIONS, &leg).await.0, want);
    }
    assert_eq!(
        probe.state(prefill.address).await["refused_rank_conflict"],
        1
    );
}

#[tokio::test]
async fn one_prompt_is_generated_from() {
    let (probe, prefill, decode) = sglang_pair().await;
    let request = json!({"text": "12345678", "sampling_params": {"max_new_tokens": 2}, "rid": "r",
        "return_logprob": true});
    let at = prefill.bootstrap.expect("a bootstrap server");
    let mut leg = request.clone();
    leg["bootstrap_host"] = json!(at.ip().to_string());
    leg["bootstrap_port"] = json!(at.port());
    leg["bootstrap_room"] = json!(1);
    let (of_prefill, body) = both(GENERATE, &prefill, &decode, &leg).await;
    let (of_prefill, answer) = (parsed(&of_prefill), parsed(&body));
    assert_eq!(answer["text"], "token0 token1");
    let meta = &answer["meta_info"];
    assert_eq!(
        meta["finish_reason"],
        json!({"type": "length", "length": 2})
    );
    assert_eq!(meta["id"], "r");
    assert_eq!(
        (&meta["prompt_tokens"], &meta["cached_tokens"]),
        (&json!(2), &json!(2))
    );
    assert_eq!(meta["input_token_logprobs"], json!([]));
    let count = |of: &Value| of.as_array().map(Vec::len);
    assert_eq!(count(&meta["output_token_logprobs"]), Some(2));
    let meta = &of_prefill["meta_info"];
    assert_eq!(count(&meta["input_token_logprobs"]), Some(2));
    assert_eq!(meta["input_token_logprobs"][0][0], Value::Null);
    assert_eq!(count(&meta["output_token_logprobs"]), Some(1));

    leg["bootstrap_room"] = json!(2);
    leg["stream"] = json!(true);
    let (_, body) = both(GENERATE, &prefill, &decode, &leg).await;
    let events = events(&body);
    assert_eq!(events.len(), 3, "{body}");
    assert_eq!(events[2], "[DONE]");
    let (first, last) = (parsed(events[0]), parsed(events[1]));
    assert_eq!(first["meta_info"]["finish_reason"], Value::Null);
    assert_eq!(first["meta_info"]["input_token_logprobs"], json!([]));
    assert_eq!(
        (&first["text"], &last["text"]),
        (&json!("token0"), &json!("token0 token1"))
    );
    assert_eq!(
        probe.state(decode.address).await["prompt_tokens_computed"],
        0
    );

    let without = probe.post(decode.address, GENERATE, &request).await;
    assert_eq!(without.0, 400, "no room: {}", without.1);
    let other = start(quick(Role::Aggregated)).await;
    assert_eq!(probe.post(other.address, GENERATE, &request).await.0, 404);
}

#[tokio::test]
async fn a_batch_is_generated_from() {
    let (_, prefill, decode) = sglang_pair().await;
    let request = json!({"input_ids": [[1, 2, 3], [4]], "return_logprob": true,
        "sampling_params": {"max_new_tokens": 1, "n": 2}});
    let leg = in_rooms(&prefill, &[1, 2, 3, 4], &request);
    let (of_prefill, body) = both(GENERATE, &prefill, &decode, &leg).await;
    let (of_prefill, answer) = (parsed(&of_prefill), parsed(&body));
    assert_eq!(answer.as_array().map(Vec::len), Some(4));
    let tokens = |of: &Value| {
        of["meta_info"]["input_token_logprobs"]
            .as_array()
            .map(Vec::len)
    };
    let of_prompts: Vec<_> = of_prefill
        .as_array()
        .expect("a list")
        .iter()
        .map(tokens)
        .collect();
    assert_eq!(of_prompts, [Some(3), Some(3), Some(1), Some(1)]);
    assert_eq!(tokens(&answer[0]), Some(0));

    let leg = with(
        &in_rooms(&prefill, &[5, 6, 7, 8], &request),
        "stream",
        json!(true),
    );
    let (_, body) = both(GENERATE, &prefill, &decode, &leg).await;
    let indices: Vec<Value> = events(&body)
        .iter()
        .filter(|event| **event != "[DONE]")
        .map(|event| parsed(event)["index"].clone())
        .collect();
    assert_eq!(indices, [0, 1, 2, 3]);
}
