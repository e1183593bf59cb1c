//! Owns a worker whose answers end with trailers, given byte for byte.

use std::net::{Ipv4Addr, SocketAddr};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::engines::{MODEL, Role};
use crate::raw;

/// A worker that answers every request with the same stream of events, followed by trailers.
pub struct TrailerWorker {
    /// Address of the worker.
    pub address: SocketAddr,
    serving: JoinHandle<()>,
}

impl TrailerWorker {
    /// Starts a worker with these events.
    pub async fn start(events: &str) -> TrailerWorker {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.unwrap_or_else(|error| panic!("no free port: {error}"));
        let address = listener.local_addr();
        TrailerWorker {
            address: address.unwrap_or_else(|error| panic!("no address: {error}")),
            serving: tokio::spawn(serve(listener, answer(events))),
        }
    }

    /// The worker's entry in a configuration.
    pub fn listed(&self, role: Role) -> Value {
        json!({"address": self.address.to_string(), "role": role.as_str(), "model": MODEL})
    }
}

impl Drop for TrailerWorker {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn answer(events: &str) -> Vec<u8> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntrailer: x-end\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut answer = head.as_bytes().to_vec();
    if !events.is_empty() {
        answer.extend(raw::chunk(events.as_bytes()));
    }
    answer.extend_from_slice(b"0\r\nx-end: 1\r\n\r\n");
    answer
}

async fn serve(listener: TcpListener, answer: Vec<u8>) {
    while let Ok((stream, _)) = listener.accept().await {
        let answer = answer.clone();
        // A gateway may break a connection.
        tokio::spawn(async move { converse(stream, &answer).await });
    }
}

async fn converse(mut stream: TcpStream, answer: &[u8]) -> Option<()> {
    let mut read = Vec::new();
    loop {
        let end = read.windows(4).position(|four| four == b"\r\n\r\n");
        let request = end.and_then(|end| {
            let length = end + 4 + content_length(&read[..end]);
            (read.len() >= length).then_some(length)
        });
        match request {
            Some(length) => {
                read.drain(..length);
                stream.write_all(answer).await.ok()?;
            }
            None if stream.read_buf(&mut read).await.ok()? == 0 => return None,
            None => {}
        }
    }
}

fn content_length(head: &[u8]) -> usize {
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length:"));
    length
        .and_then(|length| length.trim().parse().ok())
        .unwrap_or(0)
}
