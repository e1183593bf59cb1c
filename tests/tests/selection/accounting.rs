//! Bookings while an answer arrives. The test plays the Dynamo frontend, so that it controls every chunk.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::chat_body;
use pd_router_e2e::engines::{MODEL, config, with};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::rig::CHAT;

/// Time in which a forwarded chunk would have reached the client.
const ROLE_IS_SEEN: Duration = Duration::from_millis(500);

/// A frontend that streams the test's chunks.
struct Frontend {
    address: SocketAddr,
    listener: TcpListener,
}

impl Frontend {
    async fn start() -> Frontend {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.unwrap_or_else(|error| panic!("no free port: {error}"));
        let address = listener.local_addr();
        Frontend {
            address: address.unwrap_or_else(|error| panic!("no address: {error}")),
            listener,
        }
    }

    /// Accepts a request and begins its answer.
    async fn answer(&self) -> Answer {
        let accepted = self.listener.accept().await;
        let (mut stream, _) = accepted.unwrap_or_else(|error| panic!("no connection: {error}"));
        read_request(&mut stream).await;
        let mut answer = Answer { stream };
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        answer.write(head.as_bytes()).await;
        answer
    }
}

/// Reads a head, and a body of the declared length.
async fn read_request(stream: &mut TcpStream) {
    let mut bytes = Vec::new();
    while !is_whole(&bytes) {
        let read = stream.read_buf(&mut bytes).await;
        assert!(read.is_ok_and(|read| read > 0), "the request breaks off");
    }
}

fn is_whole(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return false;
    };
    let lines = head.lines().filter_map(|line| line.split_once(':'));
    let declared = lines
        .filter(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .find_map(|(_, value)| value.trim().parse().ok());
    declared.is_some_and(|length: usize| body.len() >= length)
}

/// An answer in progress.
struct Answer {
    stream: TcpStream,
}

impl Answer {
    async fn write(&mut self, bytes: &[u8]) {
        let written = self.stream.write_all(bytes).await;
        written.unwrap_or_else(|error| panic!("the gateway takes no more: {error}"));
    }

    /// Sends one event in its own chunk.
    async fn event(&mut self, data: &str) {
        let event = format!("data: {data}\n\n");
        self.write(&raw::chunk(event.as_bytes())).await;
    }

    async fn delta(&mut self, delta: Value) {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": null});
        let event = json!({"object": "chat.completion.chunk", "model": MODEL, "choices": [choice]});
        self.event(&event.to_string()).await;
    }

    async fn end(mut self) {
        self.event("[DONE]").await;
        self.write(b"0\r\n\r\n").await;
    }
}

/// Waits until this many prefills and answers are booked.
async fn until_booked(gateway: &Gateway, prefills: u64, decodes: u64) {
    eventually("the bookings are right", GENEROUS, || async {
        let booked = gateway.status().await["bookings"].clone();
        if booked["prefills"] == prefills && booked["decodes"] == decodes {
            return Ok(());
        }
        Err(booked.to_string())
    })
    .await;
}

async fn decode_blocks(gateway: &Gateway) -> u64 {
    let status = gateway.status().await;
    let blocks = status["bookings"]["decode_blocks"].as_u64();
    blocks.unwrap_or_else(|| panic!("no blocks: {status}"))
}

pub async fn a_chunk_that_carries_only_a_role_ends_no_prefill_charge(proxy: Proxy) {
    let frontend = Frontend::start().await;
    let pool = json!({
        "protocol": "direct",
        "frontends": [frontend.address.to_string()],
        "discovery": {"static": {"workers": [
            {"role": "prefill", "model": MODEL, "id": 1},
            {"role": "decode", "model": MODEL, "id": 2},
        ]}},
    });
    let gateway = Gateway::start_on_one_thread(proxy, &config(pool), &[]).await;
    let mut client = Raw::connect(gateway.listen).await;
    let mut body = with(chat_body(&"hello ".repeat(100)), json!({"stream": true}));
    // The answer's length is unknown to the gateway.
    body.as_object_mut().map(|body| body.remove("max_tokens"));
    let request = raw::post(CHAT, &[], body.to_string().as_bytes());
    client.write(&request).await;
    let mut answer = frontend.answer().await;

    answer
        .delta(json!({"role": "assistant", "content": ""}))
        .await;
    // The client has nothing yet either: a chunk without text commits to no worker.
    tokio::time::sleep(ROLE_IS_SEEN).await;
    until_booked(&gateway, 1, 1).await;
    let prompt_blocks = decode_blocks(&gateway).await;
    answer.delta(json!({"content": "The"})).await;
    client.read_until("The", 1).await;
    assert!(
        client.seen().contains("assistant"),
        "the role comes with the first word"
    );
    until_booked(&gateway, 0, 1).await;
    for _ in 0..63 {
        answer.delta(json!({"content": " word"})).await;
    }
    client.read_until(" word", 63).await;
    let grown = decode_blocks(&gateway).await;
    assert_eq!(grown, prompt_blocks + 4, "64 tokens are four blocks more");
    answer.end().await;
    client.read_until("[DONE]", 1).await;
    until_booked(&gateway, 0, 0).await;
    gateway.assert_comes_to_rest().await;
}
