//! Clients of one thread in a loop, and the outcomes of their requests.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pd_router_e2e::client::{Ask, Connection, Failure, Reply};
use pd_router_e2e::threads::Thread;
use pd_router_e2e::wait::{GENEROUS, eventually};
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// Pause between two requests of one client.
const PAUSE: Duration = Duration::from_millis(50);

/// Clients of one thread, half of which ask for streams.
pub struct Clients {
    stop: Arc<AtomicBool>,
    // Number of requests by outcome: a status, or an error.
    seen: Arc<Mutex<BTreeMap<String, u64>>>,
    clients: Vec<JoinHandle<()>>,
}

impl Clients {
    /// Starts this many clients with this kind of request.
    pub fn start(thread: &Thread, count: usize, ask: impl Fn(Ask) -> Ask) -> Clients {
        let mut clients = Clients {
            stop: Arc::default(),
            seen: Arc::default(),
            clients: Vec::new(),
        };
        for number in 0..count {
            let content = format!("question of client {number}");
            let plain = match number % 2 {
                0 => Ask::chat(&content),
                _ => Ask::chat_stream(&content),
            };
            let Ok(connection) = thread.handle() else {
                panic!("the thread has no connection");
            };
            let client = client(
                connection,
                ask(plain),
                Arc::clone(&clients.stop),
                Arc::clone(&clients.seen),
            );
            clients.clients.push(tokio::spawn(client));
        }
        clients
    }

    /// The outcomes so far.
    pub fn seen(&self) -> BTreeMap<String, u64> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.clone()
    }

    /// Waits until this many further requests have been answered with 200.
    pub async fn until_answered(&self, more: u64) {
        let answered = || self.seen().get("200").copied().unwrap_or_default();
        let before = answered();
        eventually("requests are answered", GENEROUS, || async move {
            match answered() >= before + more {
                true => Ok(()),
                false => Err(format!("{:?}", self.seen())),
            }
        })
        .await;
    }

    /// Waits until an outcome other than 200 has been seen.
    pub async fn until_something_else(&self) {
        eventually("not every request is answered well", GENEROUS, || async {
            let seen = self.seen();
            match seen.keys().any(|outcome| outcome != "200") {
                true => Ok(()),
                false => Err(format!("{seen:?}")),
            }
        })
        .await;
    }

    /// Lets every client finish its request and returns the outcomes.
    pub async fn stop(mut self) -> BTreeMap<String, u64> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            client
                .await
                .unwrap_or_else(|error| panic!("a client failed: {error}"));
        }
        self.seen()
    }

    /// The same; fails unless every outcome was 200.
    pub async fn stop_untouched(self) {
        let seen = self.stop().await;
        assert!(seen.contains_key("200") && seen.len() == 1, "{seen:?}");
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        for client in &self.clients {
            client.abort();
        }
    }
}

async fn client(
    mut connection: Connection,
    ask: Ask,
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<BTreeMap<String, u64>>>,
) {
    while !stop.load(Ordering::Relaxed) {
        let outcome = name(connection.send(ask.clone()).await);
        {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            *seen.entry(outcome).or_default() += 1;
        }
        sleep(PAUSE).await;
    }
}

/// The status of a complete answer, or the error.
fn name(outcome: Result<Reply, Failure>) -> String {
    let reply = match outcome {
        Ok(reply) => reply,
        Err(failure) => return failure.to_string(),
    };
    let text = reply.text();
    let whole = text.contains("[DONE]") || text.contains("\"usage\"");
    match (reply.status, whole) {
        (200, false) => format!("not whole: {reply:?}"),
        (200, true) => "200".to_owned(),
        (503, _) => "503".to_owned(),
        _ => format!("{reply:?}"),
    }
}
