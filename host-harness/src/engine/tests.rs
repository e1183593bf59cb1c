//! Engines over real sockets: the hand-off, its misuse, and what clients see.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use super::{Engine, EngineConfig, EngineError, Role};

const CHAT: &str = "/v1/chat/completions";
/// Long enough for a loaded machine, short enough for a person.
const SOON: Duration = Duration::from_secs(10);

struct Probe {
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Probe {
    fn new() -> Self {
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { client }
    }

    async fn raw(&self, request: Request<Full<Bytes>>) -> (Response<()>, Bytes) {
        let (head, body) = self
            .client
            .request(request)
            .await
            .expect("an answer")
            .into_parts();
        let body = body.collect().await.expect("a whole body").to_bytes();
        (Response::from_parts(head, ()), body)
    }

    async fn send(&self, method: Method, to: SocketAddr, path: &str, body: &str) -> (u16, String) {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{to}{path}"))
            .body(Full::from(body.to_owned()))
            .expect("a request");
        let (head, body) = self.raw(request).await;
        let text = String::from_utf8(body.to_vec()).expect("text");
        (head.status().as_u16(), text)
    }

    async fn post(&self, to: SocketAddr, path: &str, body: &Value) -> (u16, String) {
        self.send(Method::POST, to, path, &body.to_string()).await
    }

    async fn get(&self, to: SocketAddr, path: &str) -> String {
        let (status, body) = self.send(Method::GET, to, path, "").await;
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    async fn state(&self, of: SocketAddr) -> Value {
        parsed(&self.get(of, "/__state").await)
    }

    /// Runs a prefill leg; returns the hand-off.
    async fn prefill(&self, engine: &Engine, prompt: &str) -> Value {
        let (status, body) = self.post(engine.address, CHAT, &prefill_leg(prompt)).await;
        assert_eq!(status, 200, "{body}");
        parsed(&body)["kv_transfer_params"].take()
    }

    /// Waits until the engine's state has this value.
    async fn until(&self, engine: &Engine, field: &str, value: u64) {
        let end = Instant::now() + SOON;
        loop {
            let state = self.state(engine.address).await;
            if state[field] == value {
                return;
            }
            assert!(Instant::now() < end, "{field} never was {value}: {state}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).expect(text)
}

fn chat(prompt: &str) -> Value {
    json!({"model": "sim", "messages": [{"role": "user", "content": prompt}], "max_tokens": 3})
}

fn prefill_leg(prompt: &str) -> Value {
    let mut leg = chat(prompt);
    leg["max_tokens"] = json!(1);
    leg["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false,
        "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null});
    leg
}

fn decode_leg(prompt: &str, handoff: &Value) -> Value {
    let mut leg = chat(prompt);
    leg["kv_transfer_params"] = handoff.clone();
    leg
}

fn quick(role: Role) -> EngineConfig {
    EngineConfig {
        speedup: 20.0,
        ..EngineConfig::new(role)
    }
}

async fn start(config: EngineConfig) -> Engine {
    Engine::start(config).await.expect("an engine")
}

async fn pair() -> (Probe, Engine, Engine) {
    let prefill = start(quick(Role::Prefill)).await;
    let decode = start(quick(Role::Decode)).await;
    (Probe::new(), prefill, decode)
}

/// The `data:` of each event.
fn events(stream: &str) -> Vec<&str> {
    stream
        .split_terminator("\n\n")
        .map(|event| event.strip_prefix("data: ").expect(event))
        .collect()
}

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
            "prompt_tokens_details": {"cached_tokens": 39}})
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
        (with("stream_options", json!({})), 400),
        (with("min_tokens", json!(2)), 400),
        (with("max_tokens", json!(0)), 400),
        (with("model", Value::Null), 400),
        (with("messages", Value::Null), 400),
        (with("messages", json!([])), 400),
        (with("model", json!("other")), 404),
        (prefill_leg(&"x".repeat(4 * 16 * 4000 + 1)), 400),
    ];
    for (leg, want) in &invalid {
        let (status, body) = probe.post(prefill.address, CHAT, leg).await;
        assert_eq!(status, *want, "{body}");
        let error = &parsed(&body)["error"];
        assert_eq!(error["code"], *want);
        assert_eq!(error["param"], Value::Null);
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
        .filter(|line| !line.starts_with('#'))
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
            format!(r#"vllm:cache_config_info{labels},block_size="16",num_gpu_blocks="4000"}}"#),
            1.0,
        ),
    ];
    let want: Vec<(&str, f64)> = want.iter().map(|(name, value)| (&**name, *value)).collect();
    assert_eq!(samples, want);
    let (status, body) = probe.send(Method::GET, at, "/nowhere", "").await;
    assert_eq!((status, body.as_str()), (404, r#"{"detail":"Not Found"}"#));
    assert_eq!(probe.send(Method::GET, at, CHAT, "").await.0, 405);
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
    ];
    for config in absurd {
        assert!(Engine::start(config).await.is_err());
    }
}
