//! Owns a served page: a small server with one document of JSON, which may change, and whose status and `ETag` are set.

use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, ETAG, HeaderValue, IF_NONE_MATCH};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::loopback::ANYWHERE;

/// A served page. Dropped, it is served no longer.
pub struct Page {
    /// Address of the server.
    pub address: SocketAddr,
    content: Arc<Mutex<Content>>,
    // Dropping the sender ends the server.
    open: Option<oneshot::Sender<()>>,
}

struct Content {
    path: &'static str,
    text: Bytes,
    status: StatusCode,
    tag: Tag,
    asked: u64,
    unchanged: u64,
}

/// Whether a page has an `ETag`; a request that carries the current one is answered with 304.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// It has one, which changes with the text.
    Some,
    /// It has none.
    None,
}

impl Page {
    /// Serves an empty page at this path, with a status of 200.
    ///
    /// # Errors
    /// When no port is available.
    pub fn start(path: &'static str, tag: Tag) -> io::Result<Self> {
        let content = Arc::new(Mutex::new(Content {
            path,
            text: Bytes::new(),
            status: StatusCode::OK,
            tag,
            asked: 0,
            unchanged: 0,
        }));
        let (address, open) = serve_apart(ANYWHERE, Arc::clone(&content))?;
        Ok(Self {
            address,
            content,
            open: Some(open),
        })
    }

    /// Replaces the text.
    pub fn publish(&self, text: impl Into<Bytes>) {
        self.content().text = text.into();
    }

    /// Sets the status.
    pub fn set_status(&self, status: StatusCode) {
        self.content().status = status;
    }

    /// Sets whether the page has an `ETag`.
    pub fn set_tag(&self, tag: Tag) {
        self.content().tag = tag;
    }

    /// Refuses connections from now on, and ends the open ones.
    pub fn close(&mut self) {
        self.open = None;
    }

    /// Serves the page at the same address again.
    ///
    /// # Errors
    /// When the port is not available, as while the earlier server is still ending.
    pub fn reopen(&mut self) -> io::Result<()> {
        let (_, open) = serve_apart(self.address, Arc::clone(&self.content))?;
        self.open = Some(open);
        Ok(())
    }

    /// Number of requests.
    pub fn asked(&self) -> u64 {
        self.content().asked
    }

    /// Number of 304 answers.
    pub fn unchanged(&self) -> u64 {
        self.content().unchanged
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        lock(&self.content)
    }
}

fn lock(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Content {
    fn answer(&mut self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if request.uri().path() != self.path {
            return json(StatusCode::NOT_FOUND, Bytes::new());
        }
        self.asked += 1;
        if self.status != StatusCode::OK || self.tag == Tag::None {
            return json(self.status, self.text.clone());
        }
        let tag = tag_of(&self.text);
        let known = request.headers().get(IF_NONE_MATCH);
        let mut response = match known.map(HeaderValue::as_bytes) == Some(tag.as_bytes()) {
            true => {
                self.unchanged += 1;
                json(StatusCode::NOT_MODIFIED, Bytes::new())
            }
            false => json(StatusCode::OK, self.text.clone()),
        };
        if let Ok(tag) = HeaderValue::from_str(&tag) {
            response.headers_mut().insert(ETAG, tag);
        }
        response
    }
}

fn tag_of(text: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("\"{:x}\"", hasher.finish())
}

fn json(status: StatusCode, text: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

/// Serves on a separate thread: the page may outlive the runtime that started it.
fn serve_apart(
    at: SocketAddr,
    content: Arc<Mutex<Content>>,
) -> io::Result<(SocketAddr, oneshot::Sender<()>)> {
    let listener = std::net::TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build()?;
    let (open, closed) = oneshot::channel();
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = serve(listener, content) => {}
                _ = closed => {}
            }
        });
    });
    Ok((address, open))
}

async fn serve(listener: std::net::TcpListener, content: Arc<Mutex<Content>>) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    while let Ok((stream, _)) = listener.accept().await {
        let content = Arc::clone(&content);
        let answer = service_fn(move |request| {
            let response = lock(&content).answer(&request);
            async move { Ok::<_, Infallible>(response) }
        });
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
        // A gateway that ends breaks its connections: no error here.
        tokio::spawn(async move { connection.await.unwrap_or_default() });
    }
    Ok(())
}
