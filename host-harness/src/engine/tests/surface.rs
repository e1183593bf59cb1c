//! Tests of an engine's API for clients, operators and tests.

use super::*;
use crate::engine::metrics::VLLM_CACHE_LABELS;

#[tokio::test]
async fn an_aggregated_engine_does_it_all() {
    let probe = Probe::new();
    let engine = start(quick(Role::Aggregated)).await;
    let at = engine.address;
    let completion = json!({"model": "sim", "prompt": ["12345678", "1"], "n": 2, "stream": true});
    let (status, body) = probe.post(at, "/v1/completions", &completion).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(events(&body).len(), 4 * 16 + 1);
    let response = json!({"model": "sim", "input": "12345678", "max_output_tokens": 2});
    let (status, body) = probe.post(at, "/v1/responses", &response).await;
    assert_eq!(status, 200, "{body}");
    let answer = parsed(&body);
    assert_eq!(answer["output"][0]["content"][0]["text"], "token0 token1");
    assert_eq!(answer["usage"]["total_tokens"], 4);
    let state = probe.state(at).await;
    assert_eq!(state["prompt_tokens_computed"], 5);
    assert_eq!(state["answered"], 2);
}

#[tokio::test]
async fn an_engine_tells_about_itself() {
    let probe = Probe::new();
    let engine = start(EngineConfig {
        model: "a\"b".into(),
        ..quick(Role::Aggregated)
    })
    .await;
    let at = engine.address;
    assert_eq!(probe.get(at, "/health").await, "");
    let models = parsed(&probe.get(at, "/v1/models").await);
    assert_eq!(models["data"][0]["id"], "a\"b");
    let metrics = probe.get(at, "/metrics").await;
    let samples: Vec<(&str, f64)> = metrics
        .lines()
        .filter(|line| !line.starts_with('#') && !line.starts_with("process_"))
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').expect(line);
            (series, value.parse().expect(line))
        })
        .collect();
    let labels = r#"{engine="0",model_name="a\"b""#;
    let want = [
        (format!("vllm:num_requests_running{labels}}}"), 0.0),
        (format!("vllm:num_requests_waiting{labels}}}"), 0.0),
        (format!("vllm:kv_cache_usage_perc{labels}}}"), 0.0),
        (
            format!(
                r#"vllm:cache_config_info{{{VLLM_CACHE_LABELS}block_size="16",num_gpu_blocks="4000"}}"#
            ),
            1.0,
        ),
    ];
    let want: Vec<(&str, f64)> = want.iter().map(|(name, value)| (&**name, *value)).collect();
    assert_eq!(samples, want);
    // Without a model's name the served one is meant.
    let (status, body) = probe
        .post(at, "/v1/completions", &json!({"prompt": "x"}))
        .await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(parsed(&body)["model"], "a\"b");
    let (status, body) = probe.send(Method::GET, at, "/nowhere", "").await;
    assert_eq!((status, body.as_str()), (404, r#"{"detail":"Not Found"}"#));
    assert_eq!(probe.send(Method::GET, at, CHAT, "").await.0, 405);
}

#[tokio::test]
async fn an_sglang_engine_tells_about_itself() {
    let (probe, prefill, decode) = sglang_pair().await;
    for path in ["/server_info", "/get_server_info"] {
        let info = parsed(&probe.get(prefill.address, path).await);
        let port = prefill.bootstrap.expect("a bootstrap server").port();
        assert_eq!(info["disaggregation_bootstrap_port"], port);
        assert_eq!(info["disaggregation_mode"], "prefill");
        assert_eq!(info["dp_size"], 1);
    }
    let info = parsed(&probe.get(decode.address, "/server_info").await);
    assert_eq!(info["disaggregation_mode"], "decode");
    assert!(decode.bootstrap.is_none());
    let metrics = probe.get(prefill.address, "/metrics").await;
    let samples: Vec<&str> = metrics
        .lines()
        .filter(|line| !line.starts_with('#') && !line.starts_with("process_"))
        .collect();
    let want = [
        r#"sglang:num_running_reqs{model_name="sim"} 0.0"#,
        r#"sglang:num_queue_reqs{model_name="sim"} 0.0"#,
        r#"sglang:token_usage{model_name="sim"} 0.0"#,
        r#"sglang:cache_config_info{model_name="sim",page_size="16",num_pages="4000"} 1.0"#,
    ];
    assert_eq!(samples, want);
    let vllm = start(quick(Role::Prefill)).await;
    for path in ["/server_info", "/abort_request"] {
        let (status, _) = probe.send(Method::POST, vllm.address, path, "{}").await;
        assert_eq!(status, 404, "{path}");
    }
    let (status, body) = probe
        .post(
            prefill.address,
            CHAT,
            &json!({"model": "other", "messages": [{"role": "user"}]}),
        )
        .await;
    assert_eq!(status, 404);
    assert_eq!(parsed(&body)["object"], "error", "flat: {body}");
}

#[tokio::test]
async fn health_can_be_made_to_fail_and_to_dawdle() {
    let probe = Probe::new();
    let engine = start(quick(Role::Decode)).await;
    let at = engine.address;
    let health = async || probe.send(Method::GET, at, "/health", "").await.0;
    let set = async |wanted: Value| probe.post(at, "/__health", &wanted).await.0;
    assert_eq!(health().await, 200);
    assert_eq!(set(json!({"status": 503})).await, 200);
    assert_eq!(health().await, 503);
    assert_eq!(set(json!({"delay_ms": 30})).await, 200);
    let sent = Instant::now();
    assert_eq!(health().await, 200);
    assert!(sent.elapsed() >= Duration::from_millis(30));
    for bad in [json!({"status": 99}), json!({"state": 503}), json!(3)] {
        assert_eq!(set(bad).await, 400);
    }
    assert_eq!(set(json!({})).await, 200);
    assert_eq!(health().await, 200);
}

#[tokio::test]
async fn requests_are_kept_as_they_came_and_the_id_comes_back() {
    let probe = Probe::new();
    let engine = start(quick(Role::Aggregated)).await;
    let mut stream = TcpStream::connect(engine.address).await.expect("connects");
    let body = chat("hello").to_string();
    let mut request = format!(
        "POST {CHAT}?x=1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\
         trailer: x-t\r\nX-Request-Id: "
    )
    .into_bytes();
    request.extend_from_slice(b"\xff\x80");
    request.extend_from_slice(
        format!("\r\n\r\n{:x}\r\n{body}\r\n0\r\nx-t: 1\r\n\r\n", body.len()).as_bytes(),
    );
    stream.write_all(&request).await.expect("writes");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("reads");
    assert!(answer.starts_with(b"HTTP/1.1 200"));
    let echo = b"x-request-id: \xff\x80\r\n";
    assert!(answer.windows(echo.len()).any(|window| window == echo));

    for _ in 0..64 {
        probe.post(engine.address, CHAT, &json!({})).await;
    }
    let kept = parsed(&probe.get(engine.address, "/__requests").await);
    assert_eq!(kept.as_array().map(Vec::len), Some(64));
    let (status, _) = probe
        .send(Method::POST, engine.address, "/v1/completions?y", &body)
        .await;
    assert_eq!(status, 400);
    let kept = parsed(&probe.get(engine.address, "/__requests").await);
    let last = &kept[63];
    assert_eq!(last["path"], "/v1/completions?y");
    assert_eq!(last["method"], "POST");
    assert_eq!(last["body"], body.as_str());
    assert_eq!(last["body_bytes"], body.len());
}

#[tokio::test]
async fn a_stopped_engine_resets_its_connections_and_frees_its_port() {
    let probe = Probe::new();
    let engine = start(EngineConfig {
        token_ms: 60_000.0,
        ..quick(Role::Aggregated)
    })
    .await;
    let mut open = TcpStream::connect(engine.address).await.expect("connects");
    let body = chat("hello").to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    open.write_all(head.as_bytes()).await.expect("writes");
    probe.until(&engine, "running", 1).await;
    let listen = engine.address;
    engine.stop().await;
    let error = open.read(&mut [0; 64]).await.expect_err("a reset");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(TcpStream::connect(listen).await.is_err());
    let again = EngineConfig {
        listen,
        ..quick(Role::Aggregated)
    };
    assert_eq!(start(again.clone()).await.address, listen);
    let taken = start(EngineConfig {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        ..again.clone()
    })
    .await;
    let refused = Engine::start(EngineConfig {
        listen: taken.address,
        ..again
    });
    assert!(matches!(
        refused.await.map(|_| ()),
        Err(EngineError::Listen { .. })
    ));
}

#[tokio::test]
async fn absurd_settings_are_refused() {
    let good = || quick(Role::Decode);
    let absurd = [
        EngineConfig {
            speedup: 0.0,
            ..good()
        },
        EngineConfig {
            prefill_rate: f64::NAN,
            ..good()
        },
        EngineConfig {
            kv_blocks: 0,
            ..good()
        },
        EngineConfig {
            block_tokens: 0,
            ..good()
        },
        EngineConfig {
            token_ms: -1.0,
            ..good()
        },
        EngineConfig {
            lease: Duration::MAX,
            ..good()
        },
        EngineConfig {
            partner_timeout: Duration::MAX,
            ..good()
        },
        EngineConfig {
            dp_size: 0,
            ..good()
        },
    ];
    for config in absurd {
        assert!(Engine::start(config).await.is_err());
    }
}
