//! Owns the small requests of chaos: commands and status queries to engines, and status queries to the gateway.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::AUTHORIZATION;
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Why a command or query failed.
#[derive(Debug, thiserror::Error)]
#[error("{method} http://{address}{path}: {why}")]
pub struct HttpError {
    method: Method,
    address: SocketAddr,
    path: &'static str,
    why: String,
}

/// A client for engines that may restart at any time: no connection is kept.
#[derive(Clone, Debug)]
pub struct Http(Client<HttpConnector, Full<Bytes>>);

impl Http {
    /// A client without connections.
    pub fn new() -> Self {
        let mut builder = Client::builder(TokioExecutor::new());
        Self(builder.pool_max_idle_per_host(0).build_http())
    }

    /// Text of a page.
    ///
    /// # Errors
    /// When there is no page, or its status is not 200.
    pub async fn get(&self, address: SocketAddr, path: &'static str) -> Result<String, HttpError> {
        let page = self.send(Method::GET, address, path, Bytes::new()).await?;
        Ok(String::from_utf8_lossy(&page).into_owned())
    }

    /// JSON of a page.
    ///
    /// # Errors
    /// When there is no page, or its status is not 200.
    pub async fn get_json(
        &self,
        address: SocketAddr,
        path: &'static str,
    ) -> Result<Value, HttpError> {
        let page = self.send(Method::GET, address, path, Bytes::new()).await?;
        serde_json::from_slice(&page).map_err(|error| HttpError {
            method: Method::GET,
            address,
            path,
            why: error.to_string(),
        })
    }

    /// Posts JSON.
    ///
    /// # Errors
    /// When the answer is not 200.
    pub async fn post(
        &self,
        address: SocketAddr,
        path: &'static str,
        json: &Value,
    ) -> Result<(), HttpError> {
        let body = Bytes::from(json.to_string());
        self.send(Method::POST, address, path, body).await.map(drop)
    }

    /// Sends JSON with this token.
    ///
    /// # Errors
    /// When the answer is not 200.
    pub async fn send_as(
        &self,
        method: Method,
        address: SocketAddr,
        path: &'static str,
        json: &Value,
        token: &str,
    ) -> Result<(), HttpError> {
        let body = Bytes::from(json.to_string());
        let token = Some(format!("Bearer {token}"));
        self.exchange(method, address, path, body, token)
            .await
            .map(drop)
    }

    /// Sends a DELETE for the path.
    ///
    /// # Errors
    /// When the answer is not 200.
    pub async fn delete(&self, address: SocketAddr, path: &'static str) -> Result<(), HttpError> {
        self.send(Method::DELETE, address, path, Bytes::new())
            .await
            .map(drop)
    }

    async fn send(
        &self,
        method: Method,
        address: SocketAddr,
        path: &'static str,
        body: Bytes,
    ) -> Result<Bytes, HttpError> {
        self.exchange(method, address, path, body, None).await
    }

    async fn exchange(
        &self,
        method: Method,
        address: SocketAddr,
        path: &'static str,
        body: Bytes,
        authorization: Option<String>,
    ) -> Result<Bytes, HttpError> {
        let failed = |why: String| HttpError {
            method: method.clone(),
            address,
            path,
            why,
        };
        let mut request = Request::builder()
            .method(method.clone())
            .uri(format!("http://{address}{path}"));
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request
            .body(Full::new(body))
            .map_err(|error| failed(error.to_string()))?;
        let response = self.0.request(request).await;
        let response = response.map_err(|error| failed(error.to_string()))?;
        let status = response.status();
        let body = response.into_body().collect().await;
        let body = body.map_err(|error| failed(error.to_string()))?.to_bytes();
        if status != StatusCode::OK {
            return Err(failed(format!(
                "{status} {}",
                String::from_utf8_lossy(&body)
            )));
        }
        Ok(body)
    }
}
