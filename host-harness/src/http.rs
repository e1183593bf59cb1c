//! Owns the small requests of the tools: commands and queries to engines, to the gateway and to other routers. Each has its own
//! connection, since these servers may restart at any time.

use std::fmt::Display;
use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use pd_harness_common::connection::Connection;
use serde::de::DeserializeOwned;

/// A client that makes connections as they are needed.
pub type Client = legacy::Client<HttpConnector, Full<Bytes>>;

/// A client that keeps connections for later requests.
pub fn keeping_client() -> Client {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    legacy::Client::builder(TokioExecutor::new()).build(connector)
}

/// Why a command or query failed.
#[derive(Debug, thiserror::Error)]
#[error("{method} http://{address}{path}: {why}")]
pub struct HttpError {
    method: Method,
    address: SocketAddr,
    path: String,
    why: String,
}

impl HttpError {
    /// The failure of a query.
    pub fn of_get(address: SocketAddr, path: &str, why: impl Display) -> Self {
        Self {
            method: Method::GET,
            address,
            path: path.to_owned(),
            why: why.to_string(),
        }
    }
}

/// The content of a page.
///
/// # Errors
/// When there is no page, or its status is not 200.
pub async fn get(address: SocketAddr, path: &str) -> Result<Bytes, HttpError> {
    send(Method::GET, address, path, String::new(), None).await
}

/// A page of JSON.
///
/// # Errors
/// When there is no such page, or its status is not 200.
pub async fn get_json<T: DeserializeOwned>(
    address: SocketAddr,
    path: &str,
) -> Result<T, HttpError> {
    let page = get(address, path).await?;
    serde_json::from_slice(&page).map_err(|error| HttpError::of_get(address, path, error))
}

/// Sends JSON, or an empty body, with this bearer token; returns the answer's content.
///
/// # Errors
/// When the answer is not 200.
pub async fn send(
    method: Method,
    address: SocketAddr,
    path: &str,
    json: String,
    token: Option<&str>,
) -> Result<Bytes, HttpError> {
    let failed = |why: String| HttpError {
        method: method.clone(),
        ..HttpError::of_get(address, path, why)
    };
    let mut request = Request::builder()
        .method(method.clone())
        .uri(path)
        .header(HOST, address.to_string())
        .header(CONTENT_TYPE, "application/json");
    if let Some(token) = token {
        request = request.header(AUTHORIZATION, format!("Bearer {token}"));
    }
    let request = request
        .body(Full::from(json))
        .map_err(|error| failed(error.to_string()))?;
    let answer = async { Connection::open(address).await?.exchange(request).await };
    let answer: Response<Bytes> = answer.await.map_err(|error| failed(error.to_string()))?;
    let (head, body) = answer.into_parts();
    if head.status != StatusCode::OK {
        let body = String::from_utf8_lossy(&body);
        return Err(failed(format!("{} {body}", head.status)));
    }
    Ok(body)
}
