//! A worker that is a real engine behind a relay: what a prefill engine hands over can be altered, cut or late, and what a
//! decode engine answers can be lost.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use pd_router_e2e::client::{self, Ask, Reply};
use pd_router_e2e::engines::Role;
use pd_router_e2e::vllm::{Engine, MODEL, PATIENCE};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::sleep;

const JSON: &str = "application/json";

/// What a relay does to a leg.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// Prefill's hand-off names a side channel where nothing listens, each time.
    Unreachable,
    /// Prefill's hand-off names another engine than is found there, this many times.
    OtherEngine(usize),
    /// Prefill's answer comes so much later, this many times.
    Late(Duration, usize),
    /// Half of prefill's answer is missing, this many times.
    Cut(usize),
    /// The engine has answered, and the connection breaks before the first byte of it, this many times.
    Loses(usize),
}

/// Ends the connection without an answer.
fn broken() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

/// A relay in front of an engine; ends when dropped.
pub struct Relay {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    name: String,
    role: Role,
    address: SocketAddr,
    engine: SocketAddr,
    fault: Fault,
    /// The hand-offs of the legs that it has had, in their order: those that a prefill engine made, or that a decode engine
    /// was sent.
    hand_offs: Mutex<Vec<Value>>,
}

impl Relay {
    pub async fn start(engine: &Engine, fault: Fault) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let shared = Arc::new(Shared {
            name: format!("relay-{}", engine.name),
            role: engine.role,
            address,
            engine: engine.address,
            fault,
            hand_offs: Mutex::default(),
        });
        let task = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Relay { shared, task }
    }

    /// It as a configuration lists it.
    pub fn listed(&self) -> Value {
        json!({
            "name": self.shared.name,
            "address": self.shared.address.to_string(),
            "role": self.shared.role.as_str(),
            "model": MODEL,
        })
    }

    /// Legs that it has had.
    pub fn legs(&self) -> usize {
        self.shared.all_hand_offs().len()
    }

    /// The requests of the prefill engines whose blocks its legs were to fetch, in their order.
    pub fn fetched(&self) -> Vec<String> {
        let id = |hand_off: &Value| hand_off["remote_request_id"].as_str().map(str::to_owned);
        let hand_offs = self.shared.all_hand_offs();
        let ids = hand_offs.iter().map(id);
        ids.collect::<Option<_>>()
            .unwrap_or_else(|| panic!("a leg without a hand-off: {hand_offs:?}"))
    }
}

impl Shared {
    fn all_hand_offs(&self) -> Vec<Value> {
        self.lock().clone()
    }

    /// Notes the hand-off of a leg, and says how many legs there were before it.
    fn note(&self, hand_off: &Value) -> usize {
        let mut all = self.lock();
        all.push(hand_off.clone());
        all.len() - 1
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Value>> {
        self.hand_offs
            .lock()
            .expect("no relay panics while it holds this")
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        let service = service_fn(move |request| {
            let shared = Arc::clone(&shared);
            async move { pass(&shared, request).await }
        });
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        tokio::spawn(connection);
    }
}

async fn pass(shared: &Shared, request: Request<Incoming>) -> io::Result<Response<Full<Bytes>>> {
    let path = request.uri().path().to_owned();
    if request.method() != Method::POST {
        let reply = forward(shared, Ask::get(&path)).await?;
        return Ok(response(reply.status, JSON, reply.body));
    }
    let body = request.into_body().collect().await.map_err(|_| broken())?;
    let body = body.to_bytes();
    match shared.role {
        Role::Decode => decode(shared, &path, body).await,
        Role::Prefill | Role::Aggregated => prefill(shared, &path, body).await,
    }
}

async fn prefill(shared: &Shared, path: &str, body: Bytes) -> io::Result<Response<Full<Bytes>>> {
    let reply = forward(shared, Ask::post(path, body)).await?;
    let mut answer = reply.json();
    let leg = shared.note(&answer["kv_transfer_params"]);
    let hand_off = &mut answer["kv_transfer_params"];
    match shared.fault {
        Fault::Unreachable => {
            hand_off["remote_engine_id"] = json!("an engine that cannot be reached");
            hand_off["remote_port"] = json!(1);
        }
        Fault::OtherEngine(times) if leg < times => {
            // Each time another one: vLLM waits longer and longer for one that has failed it.
            hand_off["remote_engine_id"] = json!(format!("not the engine of {}", shared.address));
        }
        Fault::Late(by, times) if leg < times => sleep(by).await,
        Fault::Cut(times) if leg < times => {
            let half = reply.body.slice(..reply.body.len() / 2);
            return Ok(response(reply.status, JSON, half));
        }
        _ => {}
    }
    Ok(response(reply.status, JSON, answer.to_string().into()))
}

async fn decode(shared: &Shared, path: &str, body: Bytes) -> io::Result<Response<Full<Bytes>>> {
    let asked: Value = serde_json::from_slice(&body).map_err(|_| broken())?;
    let leg = shared.note(&asked["kv_transfer_params"]);
    let reply = forward(shared, Ask::post(path, body)).await?;
    if matches!(shared.fault, Fault::Loses(times) if leg < times) {
        return Err(broken());
    }
    let kind = reply.header("content-type").unwrap_or(JSON).to_owned();
    Ok(response(reply.status, &kind, reply.body))
}

async fn forward(shared: &Shared, ask: Ask) -> io::Result<Reply> {
    client::try_send(shared.engine, ask.within(PATIENCE))
        .await
        .map_err(|_| broken())
}

fn response(status: u16, kind: &str, body: Bytes) -> Response<Full<Bytes>> {
    let response = Response::builder()
        .status(status)
        .header(CONTENT_TYPE, kind);
    response.body(Full::new(body)).expect("a response")
}
