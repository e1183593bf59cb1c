//! Owns the small requests of the tools: commands and queries to engines, to the gateway and to other routers.

use std::fmt::Display;
use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
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
    /// A page that was received, and is not what was asked for.
    pub fn unreadable(address: SocketAddr, path: &str, why: impl Display) -> Self {
        Self {
            method: Method::GET,
            address,
            path: path.to_owned(),
            why: why.to_string(),
        }
    }
}

/// A client for servers that may restart at any time: no connection is kept.
#[derive(Clone, Debug)]
pub struct Http(Client);

impl Http {
    /// A client without connections.
    pub fn new() -> Self {
        let mut builder = legacy::Client::builder(TokioExecutor::new());
        Self(builder.pool_max_idle_per_host(0).build_http())
    }

    /// The content of a page.
    ///
    /// # Errors
    /// When there is no page, or its status is not 200.
    pub async fn get(&self, address: SocketAddr, path: &str) -> Result<Bytes, HttpError> {
        self.send(Method::GET, address, path, String::new(), None)
            .await
    }

    /// A page of JSON.
    ///
    /// # Errors
    /// When there is no such page, or its status is not 200.
    pub async fn get_json<T: DeserializeOwned>(
        &self,
        address: SocketAddr,
        path: &str,
    ) -> Result<T, HttpError> {
        let page = self.get(address, path).await?;
        serde_json::from_slice(&page).map_err(|error| HttpError::unreadable(address, path, error))
    }

    /// Sends JSON, or an empty body, with this bearer token; returns the answer's content.
    ///
    /// # Errors
    /// When the answer is not 200.
    pub async fn send(
        &self,
        method: Method,
        address: SocketAddr,
        path: &str,
        json: String,
        token: Option<&str>,
    ) -> Result<Bytes, HttpError> {
        let failed = |why: String| HttpError {
            method: method.clone(),
            address,
            path: path.to_owned(),
            why,
        };
        let mut request = Request::builder()
            .method(method.clone())
            .uri(format!("http://{address}{path}"))
            .header(CONTENT_TYPE, "application/json");
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request
            .body(Full::from(json))
            .map_err(|error| failed(error.to_string()))?;
        let response = self.0.request(request).await;
        let response = response.map_err(|error| failed(error.to_string()))?;
        let status = response.status();
        let body = response.into_body().collect().await;
        let body = body.map_err(|error| failed(error.to_string()))?.to_bytes();
        if status != StatusCode::OK {
            let body = String::from_utf8_lossy(&body);
            return Err(failed(format!("{status} {body}")));
        }
        Ok(body)
    }
}
