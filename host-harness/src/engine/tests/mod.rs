//! Tests of engines over real sockets: the hand-off, its misuse, and the clients' view.

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

mod batches;
mod crowd;
mod faults;
mod handoff;
mod markers;
mod mooncake;
mod prefixes;
mod rooms;
mod sidecar;
mod surface;
mod trtllm;

use super::{Dialect, Engine, EngineConfig, EngineError, Role};

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

/// An engine that speaks SGLang's protocol.
fn sglang(role: Role) -> EngineConfig {
    EngineConfig {
        dialect: Dialect::Sglang,
        ..quick(role)
    }
}

async fn sglang_pair() -> (Probe, Engine, Engine) {
    let prefill = start(sglang(Role::Prefill)).await;
    let decode = start(sglang(Role::Decode)).await;
    (Probe::new(), prefill, decode)
}

/// Either leg of an SGLang request that meets at this prefill engine.
fn room_leg(prefill: &Engine, room: u64, prompt: &str) -> Value {
    let at = prefill.bootstrap.expect("a bootstrap server");
    let mut leg = chat(prompt);
    leg["bootstrap_host"] = json!(at.ip().to_string());
    leg["bootstrap_port"] = json!(at.port());
    leg["bootstrap_room"] = json!(room);
    leg
}

fn with(leg: &Value, field: &str, value: Value) -> Value {
    let mut leg = leg.clone();
    leg[field] = value;
    leg
}

/// The received part of an answer that is broken off.
struct Broken {
    /// `None` without even a head.
    status: Option<StatusCode>,
    text: String,
}

impl Probe {
    /// Sends a request whose answer will be broken off, and reads the received part.
    async fn broken(&self, to: SocketAddr, body: &Value) -> Broken {
        let request = Request::post(format!("http://{to}{CHAT}"))
            .body(Full::from(body.to_string()))
            .expect("a request");
        let mut text = String::new();
        let Ok(mut answer) = self.client.request(request).await else {
            return Broken { status: None, text };
        };
        loop {
            match answer.frame().await {
                Some(Ok(frame)) => {
                    let data = frame.into_data().expect("data");
                    text.push_str(std::str::from_utf8(&data).expect("text"));
                }
                Some(Err(_)) => break,
                None => panic!("not broken off: {text}"),
            }
        }
        let status = Some(answer.status());
        Broken { status, text }
    }
}

/// Output tokens in an answer's text, as the engine writes them: "token0", " token1", …
fn tokens(text: &str) -> usize {
    let words = text.split(['"', ' ']);
    let numbers = words.filter_map(|word| word.strip_prefix("token"));
    numbers
        .filter(|number| number.parse::<u64>().is_ok())
        .count()
}

/// The `data:` of each event.
fn events(stream: &str) -> Vec<&str> {
    stream
        .split_terminator("\n\n")
        .map(|event| event.strip_prefix("data: ").expect(event))
        .collect()
}
