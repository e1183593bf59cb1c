//! Owns the mapping of connections to a gateway's threads, found from each thread's report of its own bookings.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::client::{Ask, Connection, Failure, Reply, chat_body};
use crate::conversation::CHAT;
use crate::engines::with;
use crate::gateway::Gateway;
use crate::wait::{GENEROUS, eventually};

/// New connections for each thread. Spread at random, as Envoy spreads them, they miss one of two threads once in 10^9
/// times, and one of four once in 10^7 times.
const FOR_EACH: usize = 16;

/// A request in flight.
pub type PendingReply = JoinHandle<Result<Reply, Failure>>;

/// HTTP/2 connections served by one thread. Requests over them do not wait for each other.
pub struct Thread {
    connections: Vec<Connection>,
}

impl Thread {
    /// Starts a request; its answer is read to the end. Dropping the handle and aborting the task disconnects the client.
    pub fn ask(&self, ask: Ask) -> PendingReply {
        let connection = self.handle();
        tokio::spawn(async move { connection?.send(ask).await })
    }

    /// Sends a request; fails without an answer.
    pub async fn send(&self, ask: Ask) -> Reply {
        let reply = self.try_send(ask).await;
        reply.unwrap_or_else(|failure| panic!("no answer: {failure}"))
    }

    /// Sends a request.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn try_send(&self, ask: Ask) -> Result<Reply, Failure> {
        self.handle()?.send(ask).await
    }

    /// The thread's status page.
    pub async fn status(&self) -> Value {
        status(&self.connections[0]).await
    }

    /// Waits until the thread has `count` decodes of its own booked.
    pub async fn until_decodes(&self, count: u64) {
        until_decodes(&self.connections[0], count).await;
    }

    /// A connection to the thread for other uses.
    ///
    /// # Errors
    /// Never over HTTP/2.
    pub fn handle(&self) -> Result<Connection, Failure> {
        let shared = self.connections.first().and_then(Connection::share);
        shared.ok_or_else(|| Failure::NoConnection("no HTTP/2 connection".to_owned()))
    }
}

/// Number of new connections that meet all of so many threads.
pub fn enough(threads: usize) -> usize {
    FOR_EACH * threads
}

/// An endless stream.
pub fn endless(content: &str) -> Value {
    with(
        chat_body(content),
        json!({"stream": true, "max_tokens": 1_000_000}),
    )
}

/// A request for an endless stream. Needs engines with a slow token rate.
pub fn endless_ask(content: &str) -> Ask {
    Ask::post(CHAT, endless(content).to_string())
}

/// Connections to each of `threads` threads of a gateway without other clients. The gateway's status page must be enabled, and
/// its route must lead to its first pool.
pub async fn connections_by_thread(gateway: &Gateway, threads: usize) -> Vec<Thread> {
    let marker = endless_ask("which thread is this?");
    connections_by_marked_thread(gateway, threads, marker).await
}

/// The same; this request, for an endless stream, marks a thread.
pub async fn connections_by_marked_thread(
    gateway: &Gateway,
    threads: usize,
    marker: Ask,
) -> Vec<Thread> {
    let mut unknown = Vec::new();
    for _ in 0..enough(threads) {
        unknown.push(open(gateway.listen).await);
    }
    let mut found = Vec::new();
    while let Some(first) = unknown.pop() {
        let mut thread = Thread {
            connections: vec![first],
        };
        thread.until_decodes(0).await;
        let marker = thread.ask(marker.clone());
        thread.until_decodes(1).await;
        let mut others = Vec::new();
        for connection in unknown {
            match own_decodes(&status(&connection).await) {
                0 => others.push(connection),
                _ => thread.connections.push(connection),
            }
        }
        unknown = others;
        marker.abort();
        thread.until_decodes(0).await;
        found.push(thread);
    }
    assert_eq!(found.len(), threads, "threads that answer");
    found
}

async fn open(gateway: SocketAddr) -> Connection {
    let connection = Connection::open_http2(gateway).await;
    connection.unwrap_or_else(|failure| panic!("{failure}"))
}

async fn status(connection: &Connection) -> Value {
    let shared = connection.share();
    let mut shared = shared.unwrap_or_else(|| panic!("not an HTTP/2 connection"));
    let page = shared.send(Ask::get("/pd-router/status")).await;
    let page = page.unwrap_or_else(|failure| panic!("no status page: {failure}"));
    page.expect(200).json()
}

/// The decodes that the thread of this page has booked itself.
fn own_decodes(status: &Value) -> u64 {
    let decodes = status["pools"][0]["bookings"]["decodes"].as_u64();
    decodes.unwrap_or_else(|| panic!("no count of decodes in {status}"))
}

async fn until_decodes(connection: &Connection, count: u64) {
    let what = format!("{count} decodes are booked on one thread");
    eventually(&what, GENEROUS, || async {
        let page = status(connection).await;
        match own_decodes(&page) == count {
            true => Ok(()),
            false => Err(page.to_string()),
        }
    })
    .await;
}
