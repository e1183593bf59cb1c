//! Tests of the hand-off from prefill to decode, its misuse, its loss.

use super::*;

#[tokio::test]
async fn a_handoff_is_pulled_and_decoded() {
    let (probe, prefill, decode) = pair().await;
    let prompt = "x".repeat(4 * 40);
    let handoff = probe.prefill(&prefill, &prompt).await;
    assert_eq!(handoff["do_remote_prefill"], true);
    assert_eq!(handoff["do_remote_decode"], false);
    assert_eq!(handoff["remote_block_ids"], json!([[1, 2, 3]]));
    assert_eq!(handoff["remote_host"], "127.0.0.1");
    assert_eq!(handoff["remote_port"], prefill.address.port());
    assert_eq!(handoff["tp_size"], 1);
    assert_eq!(handoff["remote_num_tokens"], 40);
    assert_eq!(handoff["transfer_mode"], "pull");

    let leg = decode_leg(&prompt, &handoff);
    let (status, body) = probe.post(decode.address, CHAT, &leg).await;
    assert_eq!(status, 200, "{body}");
    let answer = parsed(&body);
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], "token0 token1 token2");
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43,
            "prompt_tokens_details": {"cached_tokens": 39, "created_cache_tokens": 0,
                "multimodal_tokens": null},
            "completion_tokens_details": null})
    );

    let state = probe.state(prefill.address).await;
    let want = json!({"requests": 1, "answered": 1, "running": 0, "handoffs_issued": 1,
        "handoffs_consumed": 1, "handoffs_expired": 0, "blocks_issued": 3, "blocks_pulled": 3,
        "blocks_unpulled": 0, "blocks_used": 0, "prompt_tokens_computed": 40});
    for (field, value) in want.as_object().expect("an object") {
        assert_eq!(&state[field], value, "{field}");
    }
    let state = probe.state(decode.address).await;
    assert_eq!(state["prompt_tokens_computed"], 1);
    assert_eq!(state["answered"], 1);
}

#[tokio::test]
async fn a_stream_has_role_tokens_usage_and_done() {
    let (probe, prefill, decode) = pair().await;
    let mut leg = decode_leg("hello", &probe.prefill(&prefill, "hello").await);
    leg["stream"] = json!(true);
    leg["stream_options"] = json!({"include_usage": true});
    let (status, body) = probe.post(decode.address, CHAT, &leg).await;
    assert_eq!(status, 200, "{body}");
    let events = events(&body);
    assert_eq!(events.last(), Some(&"[DONE]"));
    let chunks: Vec<Value> = events[..events.len() - 1]
        .iter()
        .map(|event| parsed(event))
        .collect();
    assert_eq!(chunks.len(), 5, "{body}");
    let choice = |at: usize| &chunks[at]["choices"][0];
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
    assert_eq!(
        choice(0)["delta"],
        json!({"role": "assistant", "content": ""})
    );
    assert_eq!(choice(1)["delta"], json!({"content": "token0"}));
    assert_eq!(choice(2)["finish_reason"], Value::Null);
    assert_eq!(choice(3)["finish_reason"], "length");
    assert_eq!(chunks[4]["choices"], json!([]));
    assert_eq!(chunks[4]["usage"]["completion_tokens"], 3);
}

#[tokio::test]
async fn headers_of_a_stream_come_before_its_first_token() {
    let probe = Probe::new();
    let prefill = start(quick(Role::Prefill)).await;
    let decode = start(EngineConfig {
        token_ms: 60_000.0,
        ..EngineConfig::new(Role::Decode)
    })
    .await;
    let mut leg = decode_leg("hello", &probe.prefill(&prefill, "hello").await);
    leg["stream"] = json!(true);
    let request = Request::post(format!("http://{}{CHAT}", decode.address))
        .body(Full::from(leg.to_string()))
        .expect("a request");
    let answer = tokio::time::timeout(SOON, probe.client.request(request))
        .await
        .expect("headers in time")
        .expect("an answer");
    assert_eq!(answer.status(), StatusCode::OK);
    let kind = answer.headers()["content-type"].to_str().expect("text");
    assert!(kind.starts_with("text/event-stream"), "{kind}");
    probe.until(&prefill, "handoffs_consumed", 1).await;
    probe.until(&decode, "running", 1).await;
    drop(answer);
    probe.until(&decode, "running", 0).await;
    probe.until(&decode, "aborted", 1).await;
    probe.until(&decode, "blocks_used", 0).await;
}

#[tokio::test]
async fn bad_handoffs_are_refused_and_told_apart() {
    let (probe, prefill, decode) = pair().await;
    let good = probe.prefill(&prefill, "hello").await;
    let with = |field: &str, value: Value| {
        let mut changed = good.clone();
        changed[field] = value;
        decode_leg("hello", &changed)
    };
    let missing = [
        chat("hello"),
        decode_leg("hello", &Value::Null),
        decode_leg("hello", &json!({})),
        prefill_leg("hello"),
    ];
    let wrong = [
        with("remote_block_ids", json!([[2]])),
        with("remote_block_ids", json!([1])),
        with("remote_block_ids", Value::Null),
        with("remote_engine_id", json!("0")),
        with("remote_request_id", json!("chatcmpl-0")),
        with("remote_port", json!("5600")),
        with("remote_port", json!(decode.address.port())),
        with("remote_host", json!("no host")),
        with("tp_size", json!(2)),
        with("do_remote_decode", json!(true)),
    ];
    for leg in missing.iter().chain(&wrong) {
        let (status, body) = probe.post(decode.address, CHAT, leg).await;
        assert_eq!(status, 500, "{leg}: {body}");
        let error = &parsed(&body)["error"];
        assert_eq!(error["type"], "InternalServerError");
        assert_eq!(error["code"], 500);
    }
    let (status, _) = probe
        .post(decode.address, CHAT, &decode_leg("hello", &json!([])))
        .await;
    assert_eq!(status, 400, "not an object");

    let leg = decode_leg("hello", &good);
    for want in [200, 500, 500] {
        assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, want);
    }
    let other = probe.prefill(&prefill, "hello").await;
    let (status, body) = probe
        .post(decode.address, CHAT, &decode_leg("hullo", &other))
        .await;
    assert_eq!(status, 500);
    assert!(body.contains("another prompt"), "{body}");

    let state = probe.state(decode.address).await;
    assert_eq!(state["refused_missing_handoff"], missing.len());
    assert_eq!(state["refused_wrong_handoff"], wrong.len() + 1);
    assert_eq!(state["refused_used_handoff"], 2);
    assert_eq!(state["refused_bad_request"], 1);
    assert_eq!(state["answered"], 1);
    assert_eq!(state["prompt_tokens_computed"], 1);
}

#[tokio::test]
async fn a_handoff_expires_with_its_lease_and_ends_with_its_engine() {
    let probe = Probe::new();
    let decode = start(quick(Role::Decode)).await;
    let prefill = start(EngineConfig {
        lease: Duration::from_millis(50),
        ..quick(Role::Prefill)
    })
    .await;
    let handoff = probe.prefill(&prefill, "hello").await;
    sleep(Duration::from_millis(60)).await;
    let leg = decode_leg("hello", &handoff);
    assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 500);
    let state = probe.state(prefill.address).await;
    assert_eq!(state["handoffs_expired"], 1);
    assert_eq!(state["blocks_unpulled"], 1);
    assert_eq!(state["blocks_used"], 0);

    let listen = prefill.address;
    prefill.stop().await;
    assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 500);
    let again = start(EngineConfig {
        listen,
        ..quick(Role::Prefill)
    })
    .await;
    assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 500);
    let state = probe.state(decode.address).await;
    assert_eq!(state["refused_expired_handoff"], 1);
    assert_eq!(state["refused_unreachable_handoff"], 1);
    assert_eq!(state["refused_wrong_handoff"], 1);
    again.stop().await;
}

#[tokio::test]
async fn a_prefill_engine_refuses_what_vllm_would_and_what_is_no_prefill_leg() {
    let (probe, prefill, _) = pair().await;
    let with = |field: &str, value: Value| {
        let mut leg = prefill_leg("hello");
        leg[field] = value;
        leg
    };
    let not_a_leg = [
        chat("hello"),
        with("kv_transfer_params", Value::Null),
        with("kv_transfer_params", json!({"do_remote_decode": false})),
        with("max_tokens", json!(2)),
        with("max_tokens", Value::Null),
        with("max_completion_tokens", json!(50)),
        with("n", json!(2)),
        with("stream", json!(true)),
    ];
    for leg in &not_a_leg {
        let (status, body) = probe.post(prefill.address, CHAT, leg).await;
        assert_eq!(status, 400, "{leg}: {body}");
        let words = "prefill engine only runs prefill legs";
        assert!(body.contains(words), "{leg}: {body}");
    }
    let invalid = [
        (
            with("stream_options", json!({})),
            400,
            Some("stream_options"),
        ),
        (with("min_tokens", json!(2)), 400, None),
        (with("max_tokens", json!(0)), 400, Some("max_tokens")),
        (with("messages", Value::Null), 400, Some("body.messages")),
        (with("messages", json!([])), 400, None),
        (with("model", json!("other")), 404, Some("model")),
        (
            prefill_leg(&"x".repeat(4 * 16 * 4000 + 1)),
            400,
            Some("input_tokens"),
        ),
    ];
    for (leg, want, param) in &invalid {
        let (status, body) = probe.post(prefill.address, CHAT, leg).await;
        assert_eq!(status, *want, "{body}");
        let error = &parsed(&body)["error"];
        assert_eq!(error["code"], *want);
        assert_eq!(error["param"], json!(param));
    }
    let (status, _) = probe
        .send(Method::POST, prefill.address, CHAT, "no json")
        .await;
    assert_eq!(status, 400);
    let state = probe.state(prefill.address).await;
    assert_eq!(state["refused_not_a_prefill_leg"], not_a_leg.len());
    assert_eq!(state["refused_bad_request"], invalid.len() + 1);
    assert_eq!(state["handoffs_issued"], 0);
    assert_eq!(state["aborted"], 0);
}

#[tokio::test]
async fn a_client_that_leaves_aborts_its_prefill() {
    let probe = Probe::new();
    let prefill = start(EngineConfig {
        prefill_rate: 1.0,
        ..EngineConfig::new(Role::Prefill)
    })
    .await;
    let post = async |prompt: &str| {
        let body = prefill_leg(prompt).to_string();
        let mut stream = TcpStream::connect(prefill.address).await.expect("connects");
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.expect("writes");
        stream
    };
    let computing = post(&"x".repeat(4000)).await;
    probe.until(&prefill, "running", 1).await;
    let waiting = post(&"y".repeat(4000)).await;
    probe.until(&prefill, "waiting", 1).await;
    drop(computing);
    probe.until(&prefill, "aborted", 1).await;
    probe.until(&prefill, "waiting", 0).await;
    probe.until(&prefill, "running", 1).await;
    drop(waiting);
    probe.until(&prefill, "aborted", 2).await;
    let state = probe.state(prefill.address).await;
    for field in ["running", "handoffs_issued", "answered", "blocks_used"] {
        assert_eq!(state[field], 0, "{field}");
    }
}

#[tokio::test]
async fn prefills_wait_in_line_for_blocks() {
    let probe = Probe::new();
    let prefill = start(EngineConfig {
        kv_blocks: 3,
        ..quick(Role::Prefill)
    })
    .await;
    let decode = start(quick(Role::Decode)).await;
    let two_blocks = "x".repeat(4 * 32);
    let first = probe.prefill(&prefill, &two_blocks).await;
    let (second, ()) = tokio::join!(probe.prefill(&prefill, &two_blocks), async {
        probe.until(&prefill, "waiting", 1).await;
        let leg = decode_leg(&two_blocks, &first);
        assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 200);
    });
    assert_ne!(first["remote_request_id"], second["remote_request_id"]);
    assert_eq!(probe.state(prefill.address).await["blocks_used"], 2);
}
