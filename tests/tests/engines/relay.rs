//! A prefill worker that is a real engine behind a hand of ours: what it hands over can be altered, or be late.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use pd_router_e2e::client::{self, Ask};
use pd_router_e2e::vllm::MODEL;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// What is done to what the engine hands over.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// It is said to be of an engine whose side channel is at a port where nothing listens, each time.
    Unreachable,
    /// It is said to be of another engine than is found there, this many times.
    OtherEngine(usize),
    /// The answer comes so much later, this many times.
    Late(Duration, usize),
}

/// A relay in front of a prefill engine; ends when dropped.
pub struct Relay {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    address: SocketAddr,
    engine: SocketAddr,
    fault: Fault,
    legs: AtomicUsize,
}

impl Relay {
    pub async fn start(engine: SocketAddr, fault: Fault) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let legs = AtomicUsize::new(0);
        let shared = Arc::new(Shared {
            address,
            engine,
            fault,
            legs,
        });
        let task = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Relay { shared, task }
    }

    /// It as a configuration lists it.
    pub fn listed(&self) -> Value {
        json!({
            "name": "relay",
            "address": self.shared.address.to_string(),
            "role": "prefill",
            "model": MODEL,
        })
    }

    /// Requests for generation that it has had.
    pub fn legs(&self) -> usize {
        self.shared.legs.load(Ordering::Relaxed)
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
            async move { Ok::<_, Infallible>(pass(&shared, request).await) }
        });
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        tokio::spawn(connection);
    }
}

async fn pass(shared: &Shared, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let path = request.uri().path().to_owned();
    let is_post = request.method() == hyper::Method::POST;
    let body = request.into_body().collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let ask = if is_post {
        Ask::post(&path, body)
    } else {
        Ask::get(&path)
    };
    let Ok(reply) = client::try_send(shared.engine, ask).await else {
        return Response::builder()
            .status(502)
            .body(Full::default())
            .expect("a response");
    };
    let answer = match serde_json::from_slice(&reply.body) {
        Ok(answer) if is_post => Bytes::from(altered(shared, answer).await.to_string()),
        _ => reply.body,
    };
    let response = Response::builder()
        .status(reply.status)
        .header(CONTENT_TYPE, "application/json");
    response.body(Full::new(answer)).expect("a response")
}

async fn altered(shared: &Shared, mut answer: Value) -> Value {
    let leg = shared.legs.fetch_add(1, Ordering::Relaxed);
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
        Fault::OtherEngine(_) | Fault::Late(..) => {}
    }
    answer
}
