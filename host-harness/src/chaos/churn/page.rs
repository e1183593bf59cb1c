//! Owns the document that a gateway polls: a small server with one page that has an `ETag`.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, ETAG, HeaderValue, IF_NONE_MATCH};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Path of the page.
pub const PATH: &str = "/workers";

/// A running server. Dropped, it accepts no more connections.
pub struct Page {
    /// Address of the server.
    pub address: SocketAddr,
    published: Arc<Mutex<Published>>,
    serving: JoinHandle<()>,
}

#[derive(Default)]
struct Published {
    text: Bytes,
    version: u64,
}

impl Page {
    /// Serves an empty page.
    ///
    /// # Errors
    /// When no port is available.
    pub async fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let published: Arc<Mutex<Published>> = Arc::default();
        Ok(Self {
            address: listener.local_addr()?,
            published: Arc::clone(&published),
            serving: tokio::spawn(serve(listener, published)),
        })
    }

    /// Replaces the page's text.
    pub fn publish(&self, text: String) {
        let mut published = self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        published.text = text.into();
        published.version += 1;
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(listener: TcpListener, published: Arc<Mutex<Published>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let published = Arc::clone(&published);
        let service = service_fn(move |request| {
            let answer = answer(
                &request,
                &published.lock().unwrap_or_else(PoisonError::into_inner),
            );
            async { Ok::<_, Infallible>(answer) }
        });
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        // A gateway that ends breaks its connections: no error here.
        tokio::spawn(async move { connection.await.unwrap_or_default() });
    }
}

fn answer(request: &Request<Incoming>, published: &Published) -> Response<Full<Bytes>> {
    let tag = format!("\"{}\"", published.version);
    let known = request.headers().get(IF_NONE_MATCH);
    let (status, text) = match known {
        _ if request.uri().path() != PATH => (StatusCode::NOT_FOUND, Bytes::new()),
        Some(known) if known.as_bytes() == tag.as_bytes() => {
            (StatusCode::NOT_MODIFIED, Bytes::new())
        }
        _ => (StatusCode::OK, published.text.clone()),
    };
    let mut response = Response::new(Full::new(text));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(ETAG, tag);
    }
    response
}
