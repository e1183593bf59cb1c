//! Owns a well-behaved client: one request and its complete answer, over HTTP/1.1 or HTTP/2, new or kept connections.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Version};
use pd_harness_common::connection;
pub use pd_harness_common::connection::Failure;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::engines::MODEL;
use crate::sse;

/// Default limit of the wait for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A request to send.
#[derive(Clone, Debug)]
pub struct Ask {
    method: Method,
    path: String,
    authority: Option<String>,
    headers: HeaderMap,
    body: Bytes,
    limit: Duration,
}

impl Ask {
    /// `GET path`, without a body.
    pub fn get(path: &str) -> Ask {
        Ask::new(Method::GET, path, Bytes::new())
    }

    /// `DELETE path`, without a body.
    pub fn delete(path: &str) -> Ask {
        Ask::new(Method::DELETE, path, Bytes::new())
    }

    /// `DELETE path` with this JSON as its body.
    pub fn delete_with(path: &str, body: &Value) -> Ask {
        let body = Bytes::from(body.to_string());
        Ask::new(Method::DELETE, path, body).header("content-type", "application/json")
    }

    /// `POST path` with a JSON body of these bytes.
    pub fn post(path: &str, body: impl Into<Bytes>) -> Ask {
        Ask::new(Method::POST, path, body.into()).header("content-type", "application/json")
    }

    /// A chat request for a short answer.
    pub fn chat(content: &str) -> Ask {
        Ask::post("/v1/chat/completions", chat_body(content).to_string())
    }

    /// A chat request for a short streamed answer.
    pub fn chat_stream(content: &str) -> Ask {
        let mut body = chat_body(content);
        body["stream"] = json!(true);
        Ask::post("/v1/chat/completions", body.to_string())
    }

    /// Sets the authority, whatever server listens at the address.
    pub fn to(mut self, authority: &str) -> Ask {
        self.authority = Some(authority.to_owned());
        self
    }

    /// Adds a header.
    pub fn header(self, name: &str, value: &str) -> Ask {
        self.header_bytes(name, value.as_bytes())
    }

    /// Sets the limit of the wait for the answer.
    pub fn within(mut self, limit: Duration) -> Ask {
        self.limit = limit;
        self
    }

    /// With another content type.
    pub fn content_type(mut self, kind: &str) -> Ask {
        self.headers.remove(CONTENT_TYPE);
        self.header("content-type", kind)
    }

    /// Adds a header with arbitrary bytes.
    pub fn header_bytes(mut self, name: &str, value: &[u8]) -> Ask {
        let (Ok(name), Ok(value)) = (
            HeaderName::from_bytes(name.as_bytes()),
            HeaderValue::from_bytes(value),
        ) else {
            panic!("the client cannot send the header {name}: {value:?}");
        };
        self.headers.append(name, value);
        self
    }

    fn new(method: Method, path: &str, body: Bytes) -> Ask {
        Ask {
            method,
            path: path.to_owned(),
            authority: None,
            headers: HeaderMap::new(),
            body,
            limit: ANSWER_LIMIT,
        }
    }

    fn http1(self, host: SocketAddr) -> Request<Full<Bytes>> {
        let host = self.authority.clone().unwrap_or(host.to_string());
        let mut request = self.request("");
        if let Ok(host) = HeaderValue::from_str(&host) {
            request.headers_mut().insert(HOST, host);
        }
        request
    }

    fn http2(self, host: SocketAddr) -> Request<Full<Bytes>> {
        let host = self.authority.clone().unwrap_or(host.to_string());
        self.request(&format!("http://{host}"))
    }

    fn request(self, base: &str) -> Request<Full<Bytes>> {
        let uri = format!("{base}{}", self.path);
        let request = Request::builder().method(self.method).uri(&uri);
        let mut request = request
            .body(Full::new(self.body))
            .unwrap_or_else(|error| panic!("the client cannot ask for {uri}: {error}"));
        *request.headers_mut() = self.headers;
        request
    }
}

/// The body of a chat request for four tokens.
pub fn chat_body(content: &str) -> Value {
    json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
    })
}

/// A complete answer.
#[derive(Clone, Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

/// The two workers that the gateway reports to have selected.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pair {
    /// `x-pd-router-prefill`.
    pub prefill: String,
    /// `x-pd-router-decode`.
    pub decode: String,
}

impl Reply {
    /// The reply itself; fails if the status differs.
    #[track_caller]
    pub fn expect(self, status: u16) -> Reply {
        assert_eq!(self.status, status, "the answer is {}", self.text());
        self
    }

    /// The header's value if there is exactly one.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).iter();
        let value = values.next()?;
        assert!(values.next().is_none(), "two values of {name}: {self:?}");
        value.to_str().ok()
    }

    /// The two workers named in the response headers.
    #[track_caller]
    pub fn pair(&self) -> Pair {
        let named = |name| {
            self.header(name)
                .unwrap_or_else(|| panic!("the answer lacks {name}: {:?}", self.headers))
                .to_owned()
        };
        Pair {
            prefill: named("x-pd-router-prefill"),
            decode: named("x-pd-router-decode"),
        }
    }

    /// The body as text.
    pub fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.body)
    }

    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!(
                "the answer ({}) is not JSON ({error}): {}",
                self.status,
                self.text()
            )
        })
    }

    /// The events of a stream, which must end with `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        assert!(
            self.header("content-type")
                .is_some_and(|value| value.starts_with("text/event-stream")),
            "not a stream: {self:?}"
        );
        sse::json_until_done(&self.text())
    }

    /// The reply itself; fails unless it is a complete chat answer, unstreamed or streamed, of `tokens` tokens.
    #[track_caller]
    pub fn expect_tokens(self, tokens: u64) -> Reply {
        let reply = self.expect(200);
        let content = reply.header("content-type").unwrap_or_default();
        if !content.starts_with("text/event-stream") {
            let answer = reply.json();
            assert_eq!(answer["usage"]["completion_tokens"], tokens, "{answer}");
            return reply;
        }
        let has_text = |event: &&Value| {
            let text = event["choices"][0]["delta"]["content"].as_str();
            text.is_some_and(|text| !text.is_empty())
        };
        let events = reply.events();
        let seen = events.iter().filter(has_text).count() as u64;
        assert_eq!(seen, tokens, "{events:?}");
        reply
    }

    /// The message of pd-router's own error with this status and code; fails if they differ.
    #[track_caller]
    pub fn expect_code(&self, status: u16, code: &str) -> String {
        let message = self.expect_error(status);
        assert_eq!(self.json()["error"]["code"], code, "{}", self.text());
        message
    }

    /// The message of pd-router's own error; fails if its status or shape differs.
    #[track_caller]
    pub fn expect_error(&self, status: u16) -> String {
        assert_eq!(self.status, status, "the answer is {}", self.text());
        assert_eq!(
            self.header("content-type"),
            Some("application/json"),
            "{self:?}"
        );
        let body = self.json();
        let error = &body["error"];
        for member in ["message", "type", "param", "code"] {
            assert!(error.get(member).is_some(), "no {member} in {body}");
        }
        error["message"]
            .as_str()
            .unwrap_or_else(|| panic!("the message is no text: {body}"))
            .to_owned()
    }
}

/// Sends one request over its own connection; fails without an answer.
pub async fn send(to: SocketAddr, ask: Ask) -> Reply {
    let what = format!("{} {}", ask.method, ask.path);
    try_send(to, ask)
        .await
        .unwrap_or_else(|failure| panic!("no answer from {to} to {what}: {failure}"))
}

/// Sends one request over its own connection.
///
/// # Errors
/// When there is no answer.
pub async fn try_send(to: SocketAddr, ask: Ask) -> Result<Reply, Failure> {
    let mut connection = Connection::open(to).await?;
    connection.send(ask).await
}

/// Runs many clients at once, each over its own connection and each sending `ask` `each` times; fails if any gets no answer.
pub async fn crowd(to: SocketAddr, clients: usize, each: usize, ask: &Ask) -> Vec<Reply> {
    let one = |_| async move {
        let mut replies = Vec::new();
        let mut connection = Connection::open(to).await?;
        for _ in 0..each {
            replies.push(connection.send(ask.clone()).await?);
        }
        Ok::<_, Failure>(replies)
    };
    let outcomes = join_all((0..clients).map(one)).await;
    let replies = outcomes.into_iter().flat_map(|outcome| {
        outcome.unwrap_or_else(|failure| panic!("one of many clients got no answer: {failure}"))
    });
    replies.collect()
}

/// A connection kept for many requests.
pub struct Connection {
    to: SocketAddr,
    open: connection::Connection,
}

impl Connection {
    /// An HTTP/1.1 connection.
    ///
    /// # Errors
    /// When the port is closed.
    pub async fn open(to: SocketAddr) -> Result<Connection, Failure> {
        let open = connection::Connection::open(to).await?;
        Ok(Connection { to, open })
    }

    /// An HTTP/2 connection in clear text with prior knowledge.
    ///
    /// # Errors
    /// When the port is closed or the other side does not speak HTTP/2.
    pub async fn open_http2(to: SocketAddr) -> Result<Connection, Failure> {
        let open = connection::Connection::open_http2(to).await?;
        Ok(Connection { to, open })
    }

    /// Another handle of the same HTTP/2 connection, for concurrent requests.
    pub fn share(&self) -> Option<Connection> {
        let open = self.open.share()?;
        Some(Connection { to: self.to, open })
    }

    /// Sends one request and reads the complete answer.
    ///
    /// # Errors
    /// When there is no answer, or not in time.
    pub async fn send(&mut self, ask: Ask) -> Result<Reply, Failure> {
        let limit = ask.limit;
        let request = match self.open.version() {
            Version::HTTP_2 => ask.http2(self.to),
            _ => ask.http1(self.to),
        };
        let answer = timeout(limit, self.open.exchange(request)).await;
        let (head, body) = answer.map_err(|_| Failure::TooLate(limit))??.into_parts();
        Ok(Reply {
            status: head.status.as_u16(),
            headers: head.headers,
            body,
        })
    }
}
