//! Owns clients that send requests without end, and the tally of their outcomes: answers, retryable refusals, failures.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::client::{Ask, Connection, Failure, Reply};
use crate::wait::{GENEROUS, eventually};

/// Pause between two requests of one client.
const PAUSE: Duration = Duration::from_millis(20);

/// Pause before a refused request is sent again. Shorter than the gateway asks for, so that recovery is noticed soon.
const PAUSE_WHEN_PUT_OFF: Duration = Duration::from_millis(100);

/// Tokens of an answer to [`Ask::chat`].
const TOKENS: u64 = 4;

/// A decode engine's message when it cannot reach the prefill engine that its hand-off names.
const PARTNER_DIED: &str = "NIXL handshake failed";

/// The outcomes of all clients.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Requests sent.
    pub sent: u64,
    /// Requests with a complete and right answer.
    pub answered: u64,
    /// 503 with `retry-after`, by code.
    pub put_off: BTreeMap<String, u64>,
    /// 404 for a model without workers.
    pub unknown: u64,
    /// 500 from a decode engine whose prefill engine died before its blocks were pulled.
    pub lost: u64,
    /// Answers that broke after their head had come, passed on or not.
    pub torn: u64,
    /// Complete answers by the decode worker that the gateway names.
    pub by_decode: BTreeMap<String, u64>,
    /// Everything else, which is wrong in any case.
    pub wrong: Vec<String>,
}

impl Tally {
    /// Sum of all retryable refusals.
    pub fn put_off_total(&self) -> u64 {
        self.put_off.values().sum()
    }
}

/// Clients in a loop, until stopped.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    tally: Arc<Mutex<Tally>>,
    clients: Vec<JoinHandle<()>>,
}

impl Traffic {
    /// Starts this many clients, half of which ask for streams.
    pub fn start(gateway: SocketAddr, clients: usize) -> Traffic {
        let stop = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Mutex::new(Tally::default()));
        let clients = (0..clients).map(|number| {
            let client = Client {
                gateway,
                connection: None,
                tally: Arc::clone(&tally),
            };
            tokio::spawn(client.send_until(Arc::clone(&stop), number))
        });
        Traffic {
            clients: clients.collect(),
            stop,
            tally,
        }
    }

    /// The tally so far.
    pub fn tally(&self) -> Tally {
        lock(&self.tally).clone()
    }

    /// Waits until each of these decode workers has answered once more.
    pub async fn until_answered_by(&self, decodes: &[String]) {
        let before = self.tally().by_decode;
        let wanted: BTreeSet<&String> = decodes.iter().collect();
        eventually("all decode workers answer", GENEROUS, || async {
            let now = self.tally();
            let more = |name: &&&String| now.by_decode.get(**name) > before.get(**name);
            let seen: BTreeSet<&String> = wanted.iter().filter(more).copied().collect();
            if seen == wanted {
                return Ok(());
            }
            Err(format!("only {seen:?} of {wanted:?}; {now:?}"))
        })
        .await;
    }

    /// Waits for this many further complete answers.
    pub async fn until_answered(&self, requests: u64) {
        let before = self.tally().answered;
        eventually("requests are answered", GENEROUS, || async {
            let now = self.tally();
            match now.answered >= before + requests {
                true => Ok(()),
                false => Err(format!("{requests} after {before}: {now:?}")),
            }
        })
        .await;
    }

    /// Waits for another retryable refusal.
    pub async fn until_put_off(&self) {
        let before = self.tally().put_off_total();
        eventually("requests are put off", GENEROUS, || async {
            let now = self.tally();
            if now.put_off_total() > before {
                return Ok(());
            }
            Err(format!("{now:?}"))
        })
        .await;
    }

    /// Lets every client finish its request and returns the tally. Fails if any outcome was wrong; a loss with a killed prefill
    /// engine is not.
    pub async fn stop(mut self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            client
                .await
                .unwrap_or_else(|error| panic!("a client failed: {error}"));
        }
        let tally = self.tally();
        assert!(tally.wrong.is_empty(), "{tally:?}");
        tally
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        for client in &self.clients {
            client.abort();
        }
    }
}

struct Client {
    gateway: SocketAddr,
    connection: Option<Connection>,
    tally: Arc<Mutex<Tally>>,
}

impl Client {
    async fn send_until(mut self, stop: Arc<AtomicBool>, number: usize) {
        let streamed = number % 2 == 1;
        let prompt = format!("question of client {number}");
        let ask = match streamed {
            false => Ask::chat(&prompt),
            true => Ask::chat_stream(&prompt),
        };
        while !stop.load(Ordering::Relaxed) {
            lock(&self.tally).sent += 1;
            let outcome = self.exchange(ask.clone()).await;
            let complete = matches!(&outcome, Ok(reply) if reply.status == 200);
            note(&mut lock(&self.tally), outcome);
            sleep(if complete { PAUSE } else { PAUSE_WHEN_PUT_OFF }).await;
        }
    }

    async fn exchange(&mut self, ask: Ask) -> Result<Reply, Failure> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => Connection::open(self.gateway).await?,
        };
        let reply = connection.send(ask).await?;
        let closes = reply.header("connection") == Some("close");
        self.connection = (!closes).then_some(connection);
        Ok(reply)
    }
}

fn note(tally: &mut Tally, outcome: Result<Reply, Failure>) {
    let reply = match outcome {
        Ok(reply) => reply,
        Err(Failure::BreaksOff(_)) => {
            tally.torn += 1;
            return;
        }
        Err(failure) => {
            tally.wrong.push(failure.to_string());
            return;
        }
    };
    if breaks_off(&reply) {
        tally.torn += 1;
        return;
    }
    let code = put_off_code(&reply);
    match (reply.status, code) {
        (200 | 500, _) if is_lost(&reply) => tally.lost += 1,
        (200, _) => match fault(&reply) {
            None => {
                tally.answered += 1;
                let decode = reply.header("x-pd-router-decode").unwrap_or_default();
                *tally.by_decode.entry(decode.to_owned()).or_default() += 1;
            }
            Some(fault) => tally.wrong.push(fault),
        },
        (503, Some(code)) => *tally.put_off.entry(code).or_default() += 1,
        (404, _) => tally.unknown += 1,
        _ => tally.wrong.push(format!("{reply:?}")),
    }
}

/// Whether the engine reports, by its status or in a stream before the first token, that the KV could not be fetched.
fn is_lost(reply: &Reply) -> bool {
    let text = reply.text();
    let comes_first = reply.status == 500 || streamed_tokens(&text) == Some(0);
    comes_first && text.contains(PARTNER_DIED)
}

/// Whether the gateway reports that an answer broke before any of it was passed on.
fn breaks_off(reply: &Reply) -> bool {
    let body: Result<Value, _> = serde_json::from_slice(&reply.body);
    reply.status >= 500 && body.is_ok_and(|body| body["error"]["code"] == "broken_off")
}

/// The code of an answer that asks to retry, in the gateway's own shape.
fn put_off_code(reply: &Reply) -> Option<String> {
    reply.header("retry-after")?.parse::<u64>().ok()?;
    let body: Value = serde_json::from_slice(&reply.body).ok()?;
    Some(body["error"]["code"].as_str()?.to_owned())
}

/// What is wrong with an answer of status 200.
fn fault(reply: &Reply) -> Option<String> {
    let content = reply.header("content-type").unwrap_or_default();
    let complete = match content.starts_with("text/event-stream") {
        true => streamed_tokens(&reply.text()) == Some(TOKENS),
        false => completion_tokens(&reply.body) == Some(TOKENS),
    };
    (!complete).then(|| format!("not the complete answer: {reply:?}"))
}

fn completion_tokens(body: &[u8]) -> Option<u64> {
    let body: Value = serde_json::from_slice(body).ok()?;
    let text = body["choices"][0]["message"]["content"].as_str()?;
    (!text.is_empty()).then_some(())?;
    body["usage"]["completion_tokens"].as_u64()
}

/// The events with text of a stream that ends with `[DONE]`.
fn streamed_tokens(stream: &str) -> Option<u64> {
    let mut events = crate::sse::data(stream);
    (events.pop()? == "[DONE]").then_some(())?;
    let mut tokens = 0;
    for event in events {
        let event: Value = serde_json::from_str(&event).ok()?;
        let text = event["choices"][0]["delta"]["content"].as_str();
        tokens += u64::from(text.is_some_and(|text| !text.is_empty()));
    }
    Some(tokens)
}

fn lock(tally: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(status: u16, headers: &[(&'static str, &'static str)], body: &str) -> Reply {
        let mut map = hyper::HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, hyper::header::HeaderValue::from_static(value));
        }
        Reply {
            status,
            headers: map,
            body: body.to_owned().into(),
        }
    }

    fn noted(outcome: Result<Reply, Failure>) -> Tally {
        let mut tally = Tally::default();
        note(&mut tally, outcome);
        tally
    }

    #[test]
    fn a_whole_answer_counts_for_its_worker() {
        let body =
            r#"{"choices":[{"message":{"content":"a b c d"}}],"usage":{"completion_tokens":4}}"#;
        let tally = noted(Ok(reply(200, &[("x-pd-router-decode", "d1")], body)));
        assert_eq!((tally.answered, tally.by_decode["d1"]), (1, 1));
    }

    #[test]
    fn a_stream_without_its_end_is_wrong() {
        let sse = [("content-type", "text/event-stream")];
        let event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        let complete = format!("{}data: [DONE]\n\n", event.repeat(4));
        assert_eq!(noted(Ok(reply(200, &sse, &complete))).answered, 1);
        assert_eq!(noted(Ok(reply(200, &sse, &event.repeat(4)))).wrong.len(), 1);
    }

    #[test]
    fn only_an_answer_that_says_when_is_put_off() {
        let body = r#"{"error":{"code":"no_decode_worker"}}"#;
        let tally = noted(Ok(reply(503, &[("retry-after", "1")], body)));
        assert_eq!(tally.put_off["no_decode_worker"], 1);
        assert_eq!(noted(Ok(reply(503, &[], body))).wrong.len(), 1);
        assert_eq!(
            noted(Ok(reply(500, &[("retry-after", "1")], body)))
                .wrong
                .len(),
            1
        );
    }

    #[test]
    fn a_torn_answer_is_torn_and_a_missing_one_wrong() {
        assert_eq!(noted(Err(Failure::BreaksOff(String::new()))).torn, 1);
        let body = r#"{"error":{"code":"broken_off"}}"#;
        assert_eq!(noted(Ok(reply(502, &[], body))).torn, 1);
        assert_eq!(noted(Err(Failure::NoAnswer(String::new()))).wrong.len(), 1);
    }
}
