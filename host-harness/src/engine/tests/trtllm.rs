//! Tests of TensorRT-LLM's protocol: the generation leg repeats exactly the context leg's answer.

use super::*;

const COMPLETIONS: &str = "/v1/completions";
/// An id that no float holds.
const ID: u64 = (1 << 62) + 1;

fn trtllm(role: Role) -> EngineConfig {
    EngineConfig {
        dialect: Dialect::Trtllm,
        ..quick(role)
    }
}

async fn trtllm_pair() -> (Probe, Engine, Engine) {
    let prefill = start(trtllm(Role::Prefill)).await;
    let decode = start(trtllm(Role::Decode)).await;
    (Probe::new(), prefill, decode)
}

fn context(request: &Value, id: u64) -> Value {
    let mut leg = request.clone();
    leg["max_tokens"] = json!(1);
    leg["disaggregated_params"] =
        json!({"request_type": "context_only", "disagg_request_id": id, "schedule_style": 0});
    leg
}

/// The generation leg that belongs to a context's answer.
fn generation(request: &Value, answer: &Value) -> Value {
    let mut leg = request.clone();
    let mut params = answer["choices"][0]["disaggregated_params"].clone();
    params["request_type"] = json!("generation_only");
    params["ctx_usage"] = answer["usage"].clone();
    leg["disaggregated_params"] = params;
    let ids = match request.get("prompt") {
        Some(_) => "prompt",
        None => "prompt_token_ids",
    };
    leg[ids] = answer["prompt_token_ids"].clone();
    leg
}

fn completion(prompt: Value) -> Value {
    json!({"model": "sim", "prompt": prompt, "max_tokens": 3})
}

impl Probe {
    async fn context(&self, prefill: &Engine, path: &str, request: &Value, id: u64) -> Value {
        let (status, body) = self
            .post(prefill.address, path, &context(request, id))
            .await;
        assert_eq!(status, 200, "{body}");
        parsed(&body)
    }
}

#[tokio::test]
async fn a_context_is_shown_again_and_taken_over() {
    let (probe, prefill, decode) = trtllm_pair().await;
    let prompt = "x".repeat(4 * 40);
    let requests = [
        (CHAT, chat(&prompt)),
        (COMPLETIONS, completion(json!(prompt))),
        (COMPLETIONS, completion(json!([prompt]))),
        (COMPLETIONS, completion(json!([7, 8, 2_000_000_000]))),
    ];
    for (id, (path, request)) in (ID..).zip(&requests) {
        let answer = probe.context(&prefill, path, request, id).await;
        let params = &answer["choices"][0]["disaggregated_params"];
        assert_eq!(params["request_type"], "context_only");
        assert_eq!(params["disagg_request_id"], id);
        assert!(
            params["ctx_request_id"].as_u64() >= Some(1 << 53),
            "{params}"
        );
        assert_eq!(params["first_gen_tokens"].as_array().map(Vec::len), Some(1));
        let ids = answer["prompt_token_ids"].as_array().map(Vec::len);
        assert_eq!(
            ids.map(|ids| json!(ids)),
            Some(answer["usage"]["prompt_tokens"].clone())
        );
        let stream = json!(id % 2 == 0);
        let leg = with(&generation(request, &answer), "stream", stream);
        let (status, body) = probe.post(decode.address, path, &leg).await;
        assert_eq!(status, 200, "{leg} {body}");
        assert!(body.contains("token2"), "{body}");
        let again = probe.post(decode.address, path, &leg).await;
        assert_eq!(again.0, 500, "{}", again.1);
    }
    let count = requests.len();
    let state = probe.state(prefill.address).await;
    assert_eq!(
        (&state["issued"], &state["pulled"]),
        (&json!(count), &json!(count))
    );
    assert_eq!(state["requests_by_leg"]["prefill"], count);
    let state = probe.state(decode.address).await;
    assert_eq!(state["refused_used_handoff"], count);
    assert_eq!(state["requests_by_leg"]["decode"], 2 * count);
    assert_eq!(state["prompt_tokens_computed"], 0);
    assert_eq!(state["answered"], count);
}

#[tokio::test]
async fn a_context_that_ends_by_itself_is_terminal() {
    let (probe, prefill, decode) = trtllm_pair().await;
    let request = chat("<|end|>");
    let answer = probe.context(&prefill, CHAT, &request, ID).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    let params = choice["disaggregated_params"].as_object().expect("params");
    assert_eq!(params.get("ctx_request_id"), Some(&Value::Null));
    assert_eq!(probe.state(prefill.address).await["issued"], 0);
    let leg = generation(&request, &answer);
    assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 500);

    let fault = json!({"kind": "no_handoff"});
    probe.post(prefill.address, "/__fault", &fault).await;
    let answer = probe.context(&prefill, CHAT, &chat("x"), ID + 1).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert!(answer["choices"][0].get("disaggregated_params").is_none());
}

#[tokio::test]
async fn only_context_legs_run_and_an_id_serves_once() {
    let (probe, prefill, _) = trtllm_pair().await;
    let good = context(&chat("hello"), ID);
    let changed = |field: &str, value: Value| {
        let mut leg = good.clone();
        leg["disaggregated_params"][field] = value;
        leg
    };
    let bad = [
        chat("hello"),
        changed("request_type", json!("generation_only")),
        changed("request_type", Value::Null),
        changed("schedule_style", json!(1)),
        changed("schedule_style", Value::Null),
        changed("disagg_request_id", json!((1u64 << 42) - 1)),
        changed("disagg_request_id", json!(1u64 << 63)),
        changed("disagg_request_id", json!(4.7e18)),
        changed("disagg_request_id", json!("4611686018427387905")),
        changed("disagg_request_id", Value::Null),
        changed("ctx_request_id", json!(1)),
        with(&good, "disaggregated_params", json!([])),
        with(&good, "n", json!(2)),
        with(&good, "stream", json!(true)),
        with(&good, "max_tokens", json!(2)),
    ];
    for leg in &bad {
        let (status, body) = probe.post(prefill.address, CHAT, leg).await;
        assert_eq!(status, 400, "{leg}: {body}");
        assert_eq!(parsed(&body)["object"], "error", "flat: {body}");
    }
    let batch = context(&completion(json!(["a", "b"])), ID);
    assert_eq!(
        probe.post(prefill.address, COMPLETIONS, &batch).await.0,
        400
    );
    let responses = context(&json!({"model": "sim", "input": "x"}), ID);
    assert_eq!(
        probe
            .post(prefill.address, "/v1/responses", &responses)
            .await
            .0,
        404
    );
    for want in [200, 400] {
        assert_eq!(probe.post(prefill.address, CHAT, &good).await.0, want);
    }
    let state = probe.state(prefill.address).await;
    assert_eq!(state["refused_used_handoff"], 1);
    assert_eq!(state["refused_wrong_handoff"], 2);
    assert_eq!(state["issued"], 1);
}

#[tokio::test]
async fn what_is_shown_must_be_what_was_answered() {
    let (probe, prefill, decode) = trtllm_pair().await;
    let request = chat("hello");
    let answer = probe.context(&prefill, CHAT, &request, ID).await;
    let good = generation(&request, &answer);
    let changed = |field: &str, value: Value| {
        let mut leg = good.clone();
        leg["disaggregated_params"][field] = value;
        leg
    };
    let internal = good["disaggregated_params"]["ctx_request_id"].as_u64();
    let wrong = [
        changed("ctx_request_id", json!(internal.map(|id| id ^ 1))),
        changed("ctx_request_id", json!(internal.map(|id| id as f64))),
        changed("encoded_opaque_state", json!("")),
        changed("first_gen_tokens", json!([])),
        changed("disagg_request_id", json!(ID + 1)),
        changed("ctx_usage", Value::Null),
        changed("ctx_dp_rank", json!(1)),
        changed("ctx_info_endpoint", Value::Null),
        changed("more", json!(1)),
        with(&good, "prompt_token_ids", json!([1, 2])),
    ];
    for leg in &wrong {
        let (status, body) = probe.post(decode.address, CHAT, leg).await;
        assert_eq!(status, 500, "{leg}: {body}");
    }
    let missing = [
        chat("hello"),
        changed("request_type", json!("context_only")),
    ];
    for leg in &missing {
        assert_eq!(probe.post(decode.address, CHAT, leg).await.0, 500, "{leg}");
    }
    let bad = [
        with(&good, "prompt_token_ids", Value::Null),
        with(&good, "n", json!(2)),
    ];
    for leg in &bad {
        assert_eq!(probe.post(decode.address, CHAT, leg).await.0, 400, "{leg}");
    }
    let text = completion(json!("hello"));
    let answer = probe.context(&prefill, COMPLETIONS, &text, ID + 1).await;
    let leg = with(&generation(&text, &answer), "prompt", json!("hello"));
    assert_eq!(probe.post(decode.address, COMPLETIONS, &leg).await.0, 400);
    let leg = with(&leg, "prompt", json!([1]));
    assert_eq!(
        probe.post(decode.address, COMPLETIONS, &leg).await.0,
        500,
        "of another prompt"
    );

    let state = probe.state(decode.address).await;
    assert_eq!(state["refused_wrong_handoff"], wrong.len() + 1);
    assert_eq!(state["refused_missing_handoff"], missing.len());
    assert_eq!(state["refused_bad_request"], bad.len() + 1);
    let (status, body) = probe.post(decode.address, CHAT, &good).await;
    assert_eq!(status, 200, "a refused leg takes nothing: {body}");
    assert_eq!(
        probe.state(decode.address).await["prompt_tokens_computed"],
        0
    );
}
