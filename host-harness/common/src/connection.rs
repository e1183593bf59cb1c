//! Owns a client's connection, HTTP/1.1 or HTTP/2, over which requests are sent one by one, and why there may be no answer.

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, Response, Uri, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The port is closed, or the other side does not speak HTTP.
    #[error("no connection: {0}")]
    NoConnection(String),
    /// The connection ended before the answer began.
    #[error("no response: {0}")]
    NoAnswer(String),
    /// The answer began and did not end.
    #[error("the answer breaks off: {0}")]
    BreaksOff(String),
    /// Nothing of the sort within this limit.
    #[error("no answer within {0:?}")]
    TooLate(Duration),
}

/// An error with its causes: hyper's own message says little.
pub fn in_words(error: impl Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(deeper) = cause {
        words = format!("{words}: {deeper}");
        cause = deeper.source();
    }
    words
}

impl Failure {
    /// The failure of a connection that this error prevents.
    pub fn no_connection(error: impl Error) -> Self {
        Self::NoConnection(in_words(error))
    }

    fn no_answer(error: impl Error) -> Self {
        Self::NoAnswer(in_words(error))
    }

    /// The failure of an answer that this error ends.
    pub fn breaks_off(error: impl Error) -> Self {
        Self::BreaksOff(in_words(error))
    }
}

/// `POST path` with this JSON, to a server at this address.
pub fn post(path: &'static str, to: SocketAddr, json: Bytes) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(json));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_static(path);
    let headers = request.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    // An address is always a valid header value.
    if let Ok(host) = HeaderValue::from_str(&to.to_string()) {
        headers.insert(HOST, host);
    }
    request
}

/// A connection, kept for many requests.
pub struct Connection(Sender);

enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

impl Connection {
    /// An HTTP/1.1 connection.
    ///
    /// # Errors
    /// When the port is closed.
    pub async fn open(to: SocketAddr) -> Result<Self, Failure> {
        Self::over(connect(to).await?).await
    }

    /// An HTTP/1.1 connection over this stream.
    ///
    /// # Errors
    /// When the stream is closed.
    pub async fn over(stream: TcpStream) -> Result<Self, Failure> {
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (sender, connection) = handshake.map_err(Failure::no_connection)?;
        // A failure is that of the request in flight.
        tokio::spawn(connection);
        Ok(Self(Sender::Http1(sender)))
    }

    /// An HTTP/2 connection in clear text with prior knowledge.
    ///
    /// # Errors
    /// When the port is closed or the other side does not speak HTTP/2.
    pub async fn open_http2(to: SocketAddr) -> Result<Self, Failure> {
        let io = TokioIo::new(connect(to).await?);
        let handshake = http2::handshake(TokioExecutor::new(), io).await;
        let (sender, connection) = handshake.map_err(Failure::no_connection)?;
        tokio::spawn(connection);
        Ok(Self(Sender::Http2(sender)))
    }

    /// Another handle of the same connection, for concurrent requests; `None` where HTTP/1.1 allows none.
    pub fn share(&self) -> Option<Self> {
        match &self.0 {
            Sender::Http1(_) => None,
            Sender::Http2(sender) => Some(Self(Sender::Http2(sender.clone()))),
        }
    }

    /// Its version of HTTP.
    pub fn version(&self) -> Version {
        match &self.0 {
            Sender::Http1(_) => Version::HTTP_11,
            Sender::Http2(_) => Version::HTTP_2,
        }
    }

    /// Whether no further request can be sent.
    pub fn is_closed(&self) -> bool {
        match &self.0 {
            Sender::Http1(sender) => sender.is_closed(),
            Sender::Http2(sender) => sender.is_closed(),
        }
    }

    /// Sends one request; returns the answer as soon as it has begun.
    ///
    /// # Errors
    /// When the connection ends before.
    pub async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, Failure> {
        let response = match &mut self.0 {
            Sender::Http1(sender) => {
                sender.ready().await.map_err(Failure::no_answer)?;
                sender.send_request(request).await
            }
            Sender::Http2(sender) => sender.send_request(request).await,
        };
        response.map_err(Failure::no_answer)
    }

    /// Sends one request; returns the answer when it has ended.
    ///
    /// # Errors
    /// When the connection ends before.
    pub async fn exchange(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Bytes>, Failure> {
        let (head, body) = self.send(request).await?.into_parts();
        let body = body.collect().await.map_err(Failure::breaks_off)?;
        Ok(Response::from_parts(head, body.to_bytes()))
    }
}

async fn connect(to: SocketAddr) -> Result<TcpStream, Failure> {
    let stream = TcpStream::connect(to)
        .await
        .map_err(Failure::no_connection)?;
    stream.set_nodelay(true).map_err(Failure::no_connection)?;
    Ok(stream)
}
