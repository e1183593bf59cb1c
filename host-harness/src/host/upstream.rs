//! Owns the path to the workers: clusters, the strict `override_host` choice, pooled connections, retries, and the form of
//! failures.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::body::{Outgoing, ReplayBody};
use super::clusters::{Cluster, ClusterHost, Event};
use super::maps::Headers;
use super::state::LocalReply;

/// The header with the ordered list of hosts to which a request may go.
pub const DESTINATION: &[u8] = b"x-gateway-destination-endpoint";

/// As in the Envoy bootstrap.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Upper bound of Envoy's random wait before a retry, doubled by every retry.
const RETRY_BACKOFF_MS: u64 = 25;

/// Idle connections kept for each host.
const IDLE_LIMIT: usize = 256;

/// Headers that belong to one connection and are never passed on.
pub fn is_hop_by_hop(name: &[u8]) -> bool {
    matches!(
        name,
        b"connection"
            | b"keep-alive"
            | b"proxy-connection"
            | b"transfer-encoding"
            | b"te"
            | b"upgrade"
            | b"expect"
    )
}

/// Why a call cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallRefused {
    /// `:method`, `:path` or `:authority` is missing or invalid.
    Headers,
    /// The cluster has no host for the call.
    NoHost,
}

/// A request ready to be sent, as often as its retry rules allow.
#[derive(Clone, Debug)]
pub struct OutgoingRequest {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    hosts: Vec<Arc<ClusterHost>>,
    retries: Retries,
    /// Time limit of the complete request, if the plugin set one.
    pub timeout: Option<Duration>,
}

impl OutgoingRequest {
    /// A routed request. `None`: method, path or authority is missing or invalid.
    pub fn route(headers: &Headers, cluster: Option<&Cluster>) -> Option<OutgoingRequest> {
        let text = |name: &[u8]| headers.get(name).filter(|value| !value.is_empty());
        let authority = HeaderValue::from_bytes(text(b":authority")?).ok()?;
        let mut request = OutgoingRequest {
            method: Method::from_bytes(text(b":method")?).ok()?,
            uri: Uri::try_from(text(b":path")?).ok()?,
            headers: HeaderMap::new(),
            hosts: cluster.map_or_else(Vec::new, |cluster| destinations(headers, cluster)),
            retries: Retries::from(headers),
            timeout: timeout(headers),
        };
        request.headers.insert("host", authority);
        copy_headers(headers, &mut request.headers, |name| {
            name == b"host" || name == DESTINATION || name.starts_with(b"x-envoy-")
        });
        Some(request)
    }

    /// A call, which needs a host at once, as Envoy's calls do.
    pub fn call(headers: &Headers, cluster: &Cluster) -> Result<OutgoingRequest, CallRefused> {
        let request = OutgoingRequest::route(headers, Some(cluster)).ok_or(CallRefused::Headers)?;
        if request.hosts.is_empty() {
            return Err(CallRefused::NoHost);
        }
        Ok(request)
    }

    /// True if the plugin asked for retries.
    pub fn may_retry(&self) -> bool {
        self.retries.limit > 0
    }

    fn build(&self, body: &Outgoing) -> Request<ReplayBody> {
        let mut request = Request::new(body.replay());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        let bodiless = matches!(self.method, Method::GET | Method::HEAD | Method::CONNECT);
        let sized = self.headers.contains_key("content-length");
        if bodiless && !sized && !hyper::body::Body::is_end_stream(request.body()) {
            // hyper would silently drop the body of such a request.
            let chunked = HeaderValue::from_static("chunked");
            request.headers_mut().insert(TRANSFER_ENCODING, chunked);
        }
        request
    }
}

/// Copies the headers that may be passed on. A header from the plugin that HTTP cannot carry is left out and logged.
pub fn copy_headers(from: &Headers, to: &mut HeaderMap, skip: impl Fn(&[u8]) -> bool) {
    for (name, value) in from.iter() {
        if name.starts_with(b":") || is_hop_by_hop(name) || skip(name) {
            continue;
        }
        let header = HeaderName::from_bytes(name).ok();
        let Some((name, value)) = header.zip(HeaderValue::from_bytes(value).ok()) else {
            tracing::error!(name = %name.escape_ascii(), "a header that HTTP cannot carry is left out");
            continue;
        };
        to.append(name, value);
    }
}

/// The cluster's members in the order of the destination header.
fn destinations(headers: &Headers, cluster: &Cluster) -> Vec<Arc<ClusterHost>> {
    let list = headers.get(DESTINATION).unwrap_or_default();
    cluster.chosen(std::str::from_utf8(list).unwrap_or_default())
}

fn timeout(headers: &Headers) -> Option<Duration> {
    let text = headers.get(b"x-envoy-upstream-rq-timeout-ms")?;
    let milliseconds = std::str::from_utf8(text).ok()?.trim().parse().ok()?;
    (milliseconds > 0).then(|| Duration::from_millis(milliseconds))
}

/// Which failures are retried, and how often.
#[derive(Clone, Debug, Default)]
struct Retries {
    limit: u64,
    connect_failure: bool,
    reset: bool,
    gateway_error: bool,
    server_error: bool,
}

impl Retries {
    fn from(headers: &Headers) -> Retries {
        let text = |name| std::str::from_utf8(headers.get(name)?).ok();
        let Some(conditions) = text(b"x-envoy-retry-on") else {
            return Retries::default();
        };
        let wants = |condition| conditions.split(',').any(|it| it.trim() == condition);
        let limit = text(b"x-envoy-max-retries").and_then(|limit| limit.trim().parse().ok());
        let server_error = wants("5xx");
        let gateway_error = wants("gateway-error") || server_error;
        let reset = wants("reset") || gateway_error;
        Retries {
            limit: limit.unwrap_or(1),
            connect_failure: wants("connect-failure") || wants("reset-before-request") || reset,
            reset,
            gateway_error,
            server_error,
        }
    }

    fn covers(&self, outcome: &Result<Response<Incoming>, Failure>) -> bool {
        match outcome {
            Ok(response) => match response.status().as_u16() {
                502..=504 => self.gateway_error,
                500..=599 => self.server_error,
                _ => false,
            },
            Err(Failure::Connect { .. }) => self.connect_failure,
            Err(Failure::Reset) => self.reset,
            Err(Failure::NoHost | Failure::Timeout) => false,
        }
    }
}

/// The last host tried and the number of attempts, readable while the request runs.
#[derive(Debug, Default)]
pub struct Attempts {
    /// Number of hosts tried.
    pub count: Cell<u64>,
    last: RefCell<Option<Arc<ClusterHost>>>,
}

impl Attempts {
    /// The last host.
    pub fn last(&self) -> Option<SocketAddr> {
        Some(self.last.borrow().as_ref()?.address())
    }

    fn add(&self, host: &Arc<ClusterHost>) {
        self.count.set(self.count.get() + 1);
        *self.last.borrow_mut() = Some(Arc::clone(host));
    }

    /// Counts a timeout of the last host.
    pub fn timed_out(&self) -> Failure {
        if let Some(host) = &*self.last.borrow() {
            host.counts.note(Event::TimedOut);
        }
        Failure::Timeout
    }
}

/// Why there is no response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The destination list is absent, names no member of the cluster, or is used up.
    NoHost,
    /// No connection could be made.
    Connect {
        /// Envoy's name of the reason.
        reason: &'static str,
        /// The system's message, if any.
        cause: Option<String>,
    },
    /// The connection broke before response headers.
    Reset,
    /// The time limit passed.
    Timeout,
}

impl Failure {
    /// Envoy's reply to the failure, after this many attempts.
    pub fn reply(&self, attempts: u64) -> LocalReply {
        let (status, details, mut flags, body) = match self {
            Failure::NoHost => (
                503,
                "no_healthy_upstream".to_owned(),
                0x2,
                "no healthy upstream".to_owned(),
            ),
            Failure::Timeout => (
                504,
                "response_timeout".to_owned(),
                0x4,
                "upstream request timeout".to_owned(),
            ),
            Failure::Connect { reason, cause } => {
                let cause = cause.as_deref();
                (
                    503,
                    details(reason, cause),
                    0x20,
                    text(attempts, reason, cause),
                )
            }
            Failure::Reset => {
                let reason = "connection termination";
                (
                    503,
                    details(reason, None),
                    0x40,
                    text(attempts, reason, None),
                )
            }
        };
        if attempts > 1 {
            flags |= 0x8000;
        }
        LocalReply {
            status,
            details,
            flags,
            headers: Headers::default(),
            body: body.into(),
        }
    }
}

fn details(reason: &str, cause: Option<&str>) -> String {
    let cause = cause.map(|cause| format!("|{cause}")).unwrap_or_default();
    format!("upstream_reset_before_response_started{{{reason}{cause}}}").replace(' ', "_")
}

fn text(attempts: u64, reason: &str, cause: Option<&str>) -> String {
    let which = if attempts > 1 {
        "retried and the latest reset reason"
    } else {
        "reset reason"
    };
    let cause = cause.map(|cause| format!(", transport failure reason: {cause}"));
    format!(
        "upstream connect error or disconnect/reset before headers. {which}: {reason}{}",
        cause.unwrap_or_default()
    )
}

/// One thread's connections to all hosts.
#[derive(Default)]
pub struct Upstreams {
    idle: RefCell<HashMap<SocketAddr, Vec<SendRequest<ReplayBody>>>>,
}

impl Upstreams {
    /// Sends the request, with retries by its rules, until there is a response or no host is left.
    pub async fn send(
        self: Rc<Self>,
        request: OutgoingRequest,
        body: Outgoing,
        attempts: Rc<Attempts>,
    ) -> Result<Response<Incoming>, Failure> {
        let Some(limit) = request.timeout else {
            return self.send_with_retries(&request, &body, &attempts).await;
        };
        let sending = self.send_with_retries(&request, &body, &attempts);
        let answered = tokio::time::timeout(limit, sending).await;
        answered.unwrap_or_else(|_| Err(attempts.timed_out()))
    }

    async fn send_with_retries(
        self: &Rc<Self>,
        request: &OutgoingRequest,
        body: &Outgoing,
        attempts: &Attempts,
    ) -> Result<Response<Incoming>, Failure> {
        let mut retries = 0;
        loop {
            let host = request
                .hosts
                .get(usize::try_from(retries).unwrap_or(usize::MAX));
            let host = host.ok_or(Failure::NoHost)?;
            attempts.add(host);
            let outcome = self.attempt(host, request, body).await;
            if let Some(event) = became_of(&outcome) {
                host.counts.note(event);
            }
            let again = retries < request.retries.limit
                && request.retries.covers(&outcome)
                && body.can_replay();
            if !again {
                body.forget_sent();
                return outcome;
            }
            let backoff = RETRY_BACKOFF_MS << retries.min(4);
            let backoff = rand::random_range(0..backoff);
            tokio::time::sleep(Duration::from_millis(backoff)).await;
            retries += 1;
        }
    }

    async fn attempt(
        self: &Rc<Self>,
        member: &ClusterHost,
        request: &OutgoingRequest,
        body: &Outgoing,
    ) -> Result<Response<Incoming>, Failure> {
        let host = member.address();
        while let Some(mut sender) = self.take_idle(host) {
            match sender.try_send_request(request.build(body)).await {
                Ok(response) => {
                    member.counts.note(Event::Sent);
                    keep(self, host, sender);
                    return Ok(response);
                }
                // If the host had closed the idle connection and nothing was sent, this request has not failed.
                Err(mut error) => {
                    if error.take_message().is_none() {
                        member.counts.note(Event::Sent);
                        return Err(Failure::Reset);
                    }
                }
            }
        }
        member.counts.note(Event::Connecting);
        let mut sender = connect(host).await?;
        member.counts.note(Event::Sent);
        match sender.send_request(request.build(body)).await {
            Ok(response) => {
                keep(self, host, sender);
                Ok(response)
            }
            Err(_) => Err(Failure::Reset),
        }
    }

    fn take_idle(&self, host: SocketAddr) -> Option<SendRequest<ReplayBody>> {
        let mut idle = self.idle.borrow_mut();
        let senders = idle.get_mut(&host)?;
        while let Some(sender) = senders.pop() {
            if sender.is_ready() && !sender.is_closed() {
                return Some(sender);
            }
        }
        None
    }
}

fn became_of(outcome: &Result<Response<Incoming>, Failure>) -> Option<Event> {
    Some(match outcome {
        Ok(response) => Event::Answered(response.status().as_u16()),
        Err(Failure::Connect { .. }) => Event::ConnectFailed,
        Err(Failure::Reset) => Event::Reset,
        // No host was tried, or the timeout is counted where the time is kept.
        Err(Failure::NoHost | Failure::Timeout) => return None,
    })
}

/// Returns the connection to the pool once the response was read to its end; a closing one is dropped.
fn keep(upstreams: &Rc<Upstreams>, host: SocketAddr, mut sender: SendRequest<ReplayBody>) {
    let upstreams = Rc::clone(upstreams);
    tokio::task::spawn_local(async move {
        if sender.ready().await.is_err() {
            return;
        }
        let mut idle = upstreams.idle.borrow_mut();
        let senders = idle.entry(host).or_default();
        senders.retain(|sender| !sender.is_closed());
        if senders.len() < IDLE_LIMIT {
            senders.push(sender);
        }
    });
}

async fn connect(host: SocketAddr) -> Result<SendRequest<ReplayBody>, Failure> {
    let connecting = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(host)).await;
    let stream = match connecting {
        Err(_) => {
            return Err(Failure::Connect {
                reason: "connection timeout",
                cause: None,
            });
        }
        Ok(Err(error)) => return Err(refused(&error)),
        Ok(Ok(stream)) => stream,
    };
    stream.set_nodelay(true).map_err(|error| refused(&error))?;
    let (sender, connection) = handshake(TokioIo::new(stream))
        .await
        .map_err(|_| Failure::Reset)?;
    tokio::task::spawn_local(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%host, %error, "an upstream connection ended");
        }
    });
    Ok(sender)
}

fn refused(error: &std::io::Error) -> Failure {
    let cause = match error.kind() {
        std::io::ErrorKind::ConnectionRefused => "Connection refused".to_owned(),
        std::io::ErrorKind::ConnectionReset => "Connection reset by peer".to_owned(),
        _ => error.to_string(),
    };
    Failure::Connect {
        reason: "remote connection failure",
        cause: Some(format!("delayed connect error: {cause}")),
    }
}
