//! Owns the admin listener: readiness, metrics and clusters, under Envoy's paths, and the plugin's steps per event.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

use super::state::Process;

/// Serves for as long as the thread lives.
pub async fn serve(listener: TcpListener, process: Arc<Process>) {
    loop {
        let Ok((connection, _)) = listener.accept().await else {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            continue;
        };
        let process = Arc::clone(&process);
        tokio::task::spawn_local(async move {
            let service = service_fn(move |request| {
                let response = answer(&request, &process);
                async { Ok::<_, Infallible>(response) }
            });
            let server = hyper::server::conn::http1::Builder::new();
            if let Err(error) = server
                .serve_connection(TokioIo::new(connection), service)
                .await
            {
                tracing::debug!(%error, "an admin connection ended");
            }
        });
    }
}

fn answer(request: &Request<Incoming>, process: &Process) -> Response<Full<Bytes>> {
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/ready") => text(StatusCode::OK, "LIVE\n".to_owned()),
        (&Method::GET, "/stats/prometheus") => text(StatusCode::OK, process.metrics.prometheus()),
        // Always JSON, the one format of this host, for any `format` parameter.
        (&Method::GET, "/clusters") => json(process.clusters.to_json().to_string()),
        (&Method::GET, "/steps") => json(serde_json::json!(process.steps.taken()).to_string()),
        (&Method::POST, "/steps/reset") => {
            process.steps.reset();
            text(StatusCode::OK, "OK\n".to_owned())
        }
        _ => text(StatusCode::NOT_FOUND, "not found\n".to_owned()),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    page(status, "text/plain; charset=UTF-8", body)
}

fn json(body: String) -> Response<Full<Bytes>> {
    page(StatusCode::OK, "application/json", body)
}

fn page(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
