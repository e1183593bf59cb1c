//! Owns the client's connections: kept alive, and as many as are needed at once.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

const PATH: &str = "/v1/chat/completions";

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// No connection.
    #[error("cannot connect: {0}")]
    Connect(#[from] std::io::Error),
    /// The connection broke.
    #[error(transparent)]
    Broken(#[from] hyper::Error),
    /// The request cannot be encoded.
    #[error(transparent)]
    Request(#[from] hyper::http::Error),
    /// A page cannot be parsed.
    #[error("not read: {0}")]
    Page(serde_json::Error),
}

/// A connection for one request at a time.
pub type PooledConnection = SendRequest<Full<Bytes>>;

/// Connections to one address.
pub struct ConnectionPool {
    at: SocketAddr,
    idle: Mutex<Vec<PooledConnection>>,
}

impl ConnectionPool {
    /// A pool without connections.
    pub fn new(at: SocketAddr) -> Self {
        Self {
            at,
            idle: Mutex::default(),
        }
    }

    /// Sends a completion request over the most recently used connection or a new one. The connection returned with the answer
    /// goes to [`ConnectionPool::keep`] after the answer has been read.
    ///
    /// # Errors
    /// When there is no answer. A kept connection that turns out to be closed is no error: another one is used.
    pub async fn send(
        &self,
        body: Bytes,
    ) -> Result<(Response<Incoming>, PooledConnection), Unanswered> {
        while let Some(mut connection) = self.take() {
            if connection.ready().await.is_err() {
                continue;
            }
            let request = self.request(Method::POST, PATH, body.clone())?;
            match connection.try_send_request(request).await {
                Ok(response) => return Ok((response, connection)),
                // Closed before any of the request was sent.
                Err(error) if error.message().is_some() => {}
                Err(error) => return Err(error.into_error().into()),
            }
        }
        let mut connection = self.connect().await?;
        let request = self.request(Method::POST, PATH, body)?;
        Ok((connection.send_request(request).await?, connection))
    }

    /// Keeps a connection for the next request.
    pub fn keep(&self, connection: PooledConnection) {
        self.idle().push(connection);
    }

    /// A page, over its own connection.
    ///
    /// # Errors
    /// When the page cannot be fetched.
    pub async fn get(&self, path: &str) -> Result<Bytes, Unanswered> {
        let request = self.request(Method::GET, path, Bytes::new())?;
        let answer = self.connect().await?.send_request(request).await?;
        Ok(answer.into_body().collect().await?.to_bytes())
    }

    fn take(&self) -> Option<PooledConnection> {
        self.idle().pop()
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<PooledConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self) -> Result<PooledConnection, Unanswered> {
        let stream = TcpStream::connect(self.at).await?;
        stream.set_nodelay(true)?;
        let (connection, driver) = handshake(TokioIo::new(stream)).await?;
        // The connection's user sees its end.
        tokio::spawn(driver);
        Ok(connection)
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
        Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, self.at.to_string())
            .header(CONTENT_TYPE, "application/json")
            .body(Full::from(body))
    }
}
