//! Owns a worker whose answers the test gives byte for byte, and which records its requests.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

use crate::engines::{MODEL, RecordedRequest, Role};

/// Pause between two pieces of an answer, so that each is sent separately.
const PAUSE: Duration = Duration::from_millis(20);

/// A scripted answer to one request.
#[derive(Clone, Debug)]
pub struct Answer {
    status: u16,
    content_type: &'static str,
    headers: Vec<(&'static str, &'static str)>,
    pieces: Vec<Bytes>,
    trailers: Vec<(&'static str, &'static str)>,
}

impl Answer {
    /// 200 with this JSON.
    pub fn json(text: impl Into<Bytes>) -> Answer {
        Answer {
            status: 200,
            content_type: "application/json",
            headers: Vec::new(),
            pieces: vec![text.into()],
            trailers: Vec::new(),
        }
    }

    /// 200 with JSON of these bytes, each piece sent separately.
    pub fn json_in_pieces(pieces: impl IntoIterator<Item = String>) -> Answer {
        Answer {
            content_type: "application/json",
            ..Answer::stream(pieces)
        }
    }

    /// 200 and a stream of these bytes, each piece sent separately.
    pub fn stream(pieces: impl IntoIterator<Item = String>) -> Answer {
        Answer::in_pieces(pieces.into_iter().map(Bytes::from))
    }

    /// The same for bytes that are no text.
    pub fn stream_of_bytes<'b>(pieces: impl IntoIterator<Item = &'b [u8]>) -> Answer {
        Answer::in_pieces(pieces.into_iter().map(Bytes::copy_from_slice))
    }

    fn in_pieces(pieces: impl Iterator<Item = Bytes>) -> Answer {
        Answer {
            status: 200,
            content_type: "text/event-stream",
            headers: Vec::new(),
            pieces: pieces.collect(),
            trailers: Vec::new(),
        }
    }

    /// Sets the status.
    pub fn status(mut self, status: u16) -> Answer {
        self.status = status;
        self
    }

    /// Adds a header.
    pub fn header(mut self, name: &'static str, value: &'static str) -> Answer {
        self.headers.push((name, value));
        self
    }

    /// Adds a trailer; over HTTP/1, it is sent only if the answer's headers announce it.
    pub fn trailer(mut self, name: &'static str, value: &'static str) -> Answer {
        self.trailers.push((name, value));
        self
    }
}

type Script = dyn Fn(&RecordedRequest) -> Answer + Send + Sync;

/// The only HTTP version that a scripted worker speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpVersion {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2 in clear text with prior knowledge.
    Http2,
}

#[derive(Clone)]
struct ScriptService {
    script: Arc<Script>,
    got: Arc<Mutex<Vec<RecordedRequest>>>,
}

/// A scripted worker.
pub struct ScriptedWorker {
    /// Address of the worker.
    pub address: SocketAddr,
    service: ScriptService,
    serving: JoinHandle<()>,
}

impl ScriptedWorker {
    /// Starts a worker with this script.
    pub async fn start(
        script: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
    ) -> ScriptedWorker {
        ScriptedWorker::start_at(Ipv4Addr::LOCALHOST.into(), HttpVersion::Http1, script).await
    }

    /// Starts a worker on a free port of this host.
    pub async fn start_at(
        host: IpAddr,
        version: HttpVersion,
        script: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
    ) -> ScriptedWorker {
        ScriptedWorker::start_on(SocketAddr::new(host, 0), version, script).await
    }

    /// The same at this address, where port 0 is a free one.
    pub async fn start_on(
        address: SocketAddr,
        version: HttpVersion,
        script: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
    ) -> ScriptedWorker {
        let listener = TcpListener::bind(address).await;
        let listener = listener.unwrap_or_else(|error| panic!("no listener on {address}: {error}"));
        let address = listener.local_addr();
        let service = ScriptService {
            script: Arc::new(script),
            got: Arc::default(),
        };
        ScriptedWorker {
            address: address.unwrap_or_else(|error| panic!("no address: {error}")),
            serving: tokio::spawn(serve(listener, version, service.clone())),
            service,
        }
    }

    /// Ends the worker and its connections, and waits until its address is free.
    pub async fn close(mut self) {
        self.serving.abort();
        // The task was aborted: its end is an error.
        let _ = (&mut self.serving).await;
    }

    /// All received requests, oldest first.
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.service.got().clone()
    }

    /// The last received request.
    #[track_caller]
    pub fn last(&self) -> RecordedRequest {
        let last = self.service.got().last().cloned();
        last.unwrap_or_else(|| panic!("the worker got nothing"))
    }

    /// The worker's entry in a configuration.
    pub fn listed(&self, role: Role) -> Value {
        json!({
            "address": self.address.to_string(),
            "role": role.as_str(),
            "model": MODEL,
        })
    }
}

impl Drop for ScriptedWorker {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl ScriptService {
    fn got(&self) -> MutexGuard<'_, Vec<RecordedRequest>> {
        self.got.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(
        self,
        request: Request<Incoming>,
    ) -> Result<Response<http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>>, hyper::Error>
    {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let header = |(name, value): (&HeaderName, &HeaderValue)| {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            (name.to_string(), value)
        };
        let recorded = RecordedRequest {
            method: head.method.to_string(),
            path: head.uri.to_string(),
            headers: head.headers.iter().map(header).collect(),
            body_bytes: body.len(),
            body: String::from_utf8(body.to_vec()).ok(),
        };
        let answer = (self.script)(&recorded);
        self.got().push(recorded);
        Ok(written(answer))
    }
}

fn written(
    answer: Answer,
) -> Response<http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>> {
    let trailers = (!answer.trailers.is_empty()).then(|| {
        let fields = answer.trailers.iter().map(|(name, value)| {
            let name = HeaderName::from_static(name);
            (name, HeaderValue::from_static(value))
        });
        Frame::trailers(fields.collect())
    });
    let data = answer.pieces.into_iter().map(Frame::data);
    let frames = data.chain(trailers);
    let pieces = stream::unfold(frames, |mut frames| async {
        let frame = frames.next()?;
        tokio::time::sleep(PAUSE).await;
        Some((Ok(frame), frames))
    });
    let mut response = Response::new(StreamBody::new(pieces).boxed_unsync());
    *response.status_mut() = StatusCode::from_u16(answer.status).unwrap_or_default();
    let content_type = HeaderValue::from_static(answer.content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    for (name, value) in answer.headers {
        let value = HeaderValue::from_static(value);
        response.headers_mut().append(name, value);
    }
    response
}

async fn serve(listener: TcpListener, version: HttpVersion, service: ScriptService) {
    // Dropped with this task, and all connections with it.
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let service = service.clone();
        let answer = service_fn(move |request| service.clone().answer(request));
        let stream = TokioIo::new(stream);
        // A gateway may break a connection.
        connections.spawn(async move {
            match version {
                HttpVersion::Http1 => http1::Builder::new()
                    .serve_connection(stream, answer)
                    .await
                    .unwrap_or_default(),
                HttpVersion::Http2 => http2::Builder::new(TokioExecutor::new())
                    .serve_connection(stream, answer)
                    .await
                    .unwrap_or_default(),
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Ask, send};

    #[tokio::test]
    async fn it_says_its_words_and_keeps_what_it_got() {
        let worker =
            ScriptedWorker::start(|got| Answer::json(format!("{{\"path\":\"{}\"}}", got.path)));
        let worker = worker.await;
        let reply = send(worker.address, Ask::post("/a?b=1", "{}").header("x-y", "z")).await;
        assert_eq!(reply.expect(200).json(), json!({"path": "/a?b=1"}));
        let got = worker.last();
        assert_eq!((got.text(), got.values("x-y")), ("{}", vec!["z"]));
        assert_eq!(worker.requests().len(), 1);
    }
}
