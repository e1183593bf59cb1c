//! The engine's HTTP/1.1 server: paths, connections, and the end of all of them at once.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use super::Role;
use super::body::{self, Body};
use super::generate::{self, LONGEST_BODY};
use super::node::Node;
use super::pull;
use super::request::Endpoint;

/// Pause after a failed accept (out of file descriptors, say), so that it is not tried in a tight loop.
const AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(10);

/// Serves until `stopped` resolves; then resets what is open, as the end of a process would.
pub async fn serve(listener: TcpListener, node: Rc<Node>, stopped: oneshot::Receiver<()>) {
    let (kill, killed) = watch::channel(());
    let mut connections = JoinSet::new();
    let mut stopped = pin!(stopped);
    loop {
        tokio::select! {
            _ = &mut stopped => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn_local(connection(stream, Rc::clone(&node), killed.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
                }
            },
        }
    }
    drop(listener);
    drop(kill);
    while connections.join_next().await.is_some() {}
}

async fn connection(stream: TcpStream, node: Rc<Node>, mut killed: watch::Receiver<()>) {
    let Ok(local) = stream.local_addr() else {
        return;
    };
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let node = Rc::clone(&node);
        async move { Ok::<_, Infallible>(route(node, local, request).await) }
    });
    let mut connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // An error here is the client's leaving; the requests' own ends are counted elsewhere.
        _ = &mut connection => {}
        _ = killed.changed() => {
            let stream = connection.into_parts().io.into_inner();
            let _ = stream.set_zero_linger();
        }
    }
}

async fn route(node: Rc<Node>, local: SocketAddr, request: Request<Incoming>) -> Response<Body> {
    let request_id = request.headers().get("x-request-id").cloned();
    let mut response = dispatch(node, local, request).await;
    if let Some(request_id) = request_id {
        response.headers_mut().insert("x-request-id", request_id);
    }
    response
}

async fn dispatch(node: Rc<Node>, local: SocketAddr, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path();
    if let Some(endpoint) = Endpoint::at(path) {
        if request.method() != Method::POST {
            return detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
        }
        return generate::serve(node, endpoint, local, request).await;
    }
    match (request.method(), path) {
        (&Method::POST, pull::PATH) if node.config.role == Role::Prefill => {
            match Limited::new(request.into_body(), LONGEST_BODY)
                .collect()
                .await
            {
                Ok(content) => pull::answer(&node.engine_id, &node.kv, &content.to_bytes()),
                Err(_) => detail(StatusCode::BAD_REQUEST, "Bad Request"),
            }
        }
        (&Method::GET | &Method::HEAD, "/health") => {
            body::whole(StatusCode::OK, "application/json", Bytes::new())
        }
        (&Method::GET, "/v1/models") => body::json(StatusCode::OK, node.models().into()),
        (&Method::GET, "/metrics") => {
            let kind = "text/plain; version=0.0.4; charset=utf-8";
            body::whole(StatusCode::OK, kind, node.metrics().into())
        }
        (&Method::GET, "/__state") => judged(node.state()),
        (&Method::GET, "/__requests") => judged(node.recorder.to_json()),
        _ => detail(StatusCode::NOT_FOUND, "Not Found"),
    }
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
