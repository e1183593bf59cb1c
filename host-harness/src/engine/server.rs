//! Owns the engine's HTTP/1.1 server: paths, connections, and the end of all of them at once.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::header::{ALLOW, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Role;
use super::body::{self, Body, BrokenOff};
use super::bootstrap;
use super::dialect::{Dialect, mooncake};
use super::generate::{self, LONGEST_BODY};
use super::node::EngineContext;
use super::pull;
use super::request::Endpoint;
use super::tokens;
use super::wire::{Caller, ConnectionState};

/// Pause after a failed accept (out of file descriptors, say), to avoid a tight loop.
const AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(10);

/// The service at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerKind {
    /// The engine's API.
    Api,
    /// A prefill engine's bootstrap server.
    Bootstrap,
}

/// Serves until the sender of `killed` is dropped; then resets open connections, as the end of a process would.
pub async fn serve(
    listener: TcpListener,
    kind: ListenerKind,
    node: Rc<EngineContext>,
    mut killed: watch::Receiver<()>,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            _ = killed.changed() => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn_local(connection(stream, kind, Rc::clone(&node), killed.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
                }
            },
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn connection(
    stream: TcpStream,
    kind: ListenerKind,
    node: Rc<EngineContext>,
    mut killed: watch::Receiver<()>,
) {
    let Ok(local) = stream.local_addr() else {
        return;
    };
    let _ = stream.set_nodelay(true);
    let wire = Rc::new(ConnectionState::default());
    let service = service_fn(|request| {
        let (node, using) = (Rc::clone(&node), wire.begin());
        let caller = Caller {
            local,
            connection: using.connection,
        };
        async move {
            let answer = match kind {
                ListenerKind::Api => route(node, caller, request).await?,
                ListenerKind::Bootstrap => meet(node, request).await,
            };
            Ok::<_, BrokenOff>(answer.map(|body| using.answer(body)))
        }
    });
    let mut connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // An error here means that the client has left, or that an answer was broken off; the requests' own ends are counted
        // elsewhere.
        _ = &mut connection => {}
        // As an engine with an idle timeout: a request that arrives meanwhile meets a closed connection.
        () = wire.idle_too_long(&node.faults) => {}
        _ = killed.changed() => {
            let stream = connection.into_parts().io.into_inner();
            let _ = stream.set_zero_linger();
        }
    }
}

/// Serves the API; an error breaks the connection without an answer.
async fn route(
    node: Rc<EngineContext>,
    caller: Caller,
    request: Request<Incoming>,
) -> Result<Response<Body>, BrokenOff> {
    let request_id = request.headers().get("x-request-id").cloned();
    let mut response = dispatch(node, caller, request).await?;
    if let Some(request_id) = request_id {
        response.headers_mut().insert("x-request-id", request_id);
    }
    Ok(response)
}

async fn dispatch(
    node: Rc<EngineContext>,
    caller: Caller,
    request: Request<Incoming>,
) -> Result<Response<Body>, BrokenOff> {
    let path = request.uri().path();
    let endpoint = Endpoint::at(path).filter(|endpoint| node.config.dialect.serves(*endpoint));
    if let Some(endpoint) = endpoint {
        if request.method() != Method::POST {
            return Ok(not_allowed("POST"));
        }
        let Some(ready) = &node.ready else {
            return generate::serve(node, endpoint, caller, request).await;
        };
        let answer = ready.serve(endpoint, request).await;
        return Ok(answer.unwrap_or_else(|refusal| refusal.response(node.config.dialect)));
    }
    Ok(match (request.method(), path) {
        (&Method::GET, "/health") => node.health.answer().await,
        (&Method::GET, "/v1/models") => body::json(StatusCode::OK, node.models().into()),
        (&Method::GET, "/metrics") if node.faults.hangs_metrics() => std::future::pending().await,
        (&Method::GET, "/metrics") => metrics(&node),
        (&Method::GET, "/__state") => judged(serde_json::to_vec(&node.state())),
        (&Method::GET, "/__requests") => judged(node.recorder.to_json()),
        (&Method::POST, "/__health") => match content(request).await {
            Some(content) => node.health.set(&content),
            None => bad_request(),
        },
        (&Method::POST, "/__fault") => match content(request).await {
            Some(content) => node.faults.add(&content),
            None => bad_request(),
        },
        (_, "/health" | "/v1/models") => not_allowed("GET"),
        (&Method::GET, "/__fault") => node.faults.list(),
        (&Method::DELETE, "/__fault") => node.faults.clear(),
        _ => match node.config.dialect {
            Dialect::Trtllm => only_trtllm(&node, request).await,
            Dialect::Vllm | Dialect::Llmd | Dialect::Mooncake => only_vllm(&node, request).await,
            Dialect::Sglang => only_sglang(&node, request).await,
        },
    })
}

async fn only_vllm(node: &EngineContext, request: Request<Incoming>) -> Response<Body> {
    match (request.method(), request.uri().path()) {
        (&Method::POST, pull::PATH) if node.pulled_from() => match content(request).await {
            Some(content) => pull::answer(&node.engine_id, &node.kv, &content),
            None => bad_request(),
        },
        (&Method::GET, "/version") => body::json(StatusCode::OK, tokens::version().into()),
        (_, "/version") => not_allowed("GET"),
        (&Method::POST, path) => match tokens::TokenQuery::at(path) {
            Some(question) => match content(request).await {
                Some(content) => question.answer(node, &content),
                None => bad_request(),
            },
            None => not_found(),
        },
        _ => not_found(),
    }
}

async fn only_trtllm(node: &EngineContext, request: Request<Incoming>) -> Response<Body> {
    match (request.method(), request.uri().path()) {
        (&Method::POST, bootstrap::PATH) if node.config.role == Role::Prefill => {
            match content(request).await {
                Some(content) => bootstrap::answer(node, &content).await,
                None => bad_request(),
            }
        }
        (&Method::GET, "/prometheus/metrics") => metrics(node),
        _ => not_found(),
    }
}

async fn only_sglang(node: &EngineContext, request: Request<Incoming>) -> Response<Body> {
    match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/health_generate") => node.health.answer().await,
        (&Method::GET, "/get_server_info" | "/server_info") => {
            body::json(StatusCode::OK, node.server_info().into())
        }
        (&Method::GET, "/get_model_info" | "/model_info") => {
            body::json(StatusCode::OK, node.model_info().into())
        }
        (&Method::POST, "/abort_request") => {
            let content = content(request).await.unwrap_or_default();
            match serde_json::from_slice(&content) {
                Ok(which) => {
                    node.abort(&which);
                    body::whole(StatusCode::OK, "application/json", Bytes::new())
                }
                Err(_) => bad_request(),
            }
        }
        _ => not_found(),
    }
}

/// Serves a prefill engine's bootstrap server.
async fn meet(node: Rc<EngineContext>, request: Request<Incoming>) -> Response<Body> {
    match (request.method(), request.uri().path()) {
        (&Method::POST, bootstrap::PATH) => match content(request).await {
            Some(content) => bootstrap::answer(&node, &content).await,
            None => bad_request(),
        },
        (&Method::GET, mooncake::QUERY) if node.config.dialect == Dialect::Mooncake => {
            let ranks = mooncake::ranks(&node.engine_id, node.config.dp_size);
            body::json(StatusCode::OK, ranks.into())
        }
        (&Method::GET, "/health") => {
            body::whole(StatusCode::OK, "text/plain", Bytes::from_static(b"OK"))
        }
        _ => not_found(),
    }
}

async fn content(request: Request<Incoming>) -> Option<Bytes> {
    let content = Limited::new(request.into_body(), LONGEST_BODY).collect();
    content.await.ok().map(|content| content.to_bytes())
}

fn metrics(node: &EngineContext) -> Response<Body> {
    let kind = match node.config.dialect.is_vllm() {
        true => "text/plain; version=1.0.0; charset=utf-8",
        false => "text/plain; version=0.0.4; charset=utf-8",
    };
    body::whole(StatusCode::OK, kind, node.metrics().into())
}

fn judged(json: Result<Vec<u8>, serde_json::Error>) -> Response<Body> {
    match json {
        Ok(json) => body::json(StatusCode::OK, json.into()),
        Err(_) => detail(StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error"),
    }
}

fn detail(status: StatusCode, words: &str) -> Response<Body> {
    body::json(status, format!(r#"{{"detail":"{words}"}}"#).into())
}

fn not_allowed(allowed: &'static str) -> Response<Body> {
    let mut response = detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
    let allowed = HeaderValue::from_static(allowed);
    response.headers_mut().insert(ALLOW, allowed);
    response
}

fn not_found() -> Response<Body> {
    detail(StatusCode::NOT_FOUND, "Not Found")
}

fn bad_request() -> Response<Body> {
    detail(StatusCode::BAD_REQUEST, "Bad Request")
}
