//! Owns the document of workers that a gateway polls, served by the test itself.

use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::Full;
use hyper::Response;
use hyper::header::{CONTENT_TYPE, ETAG, HeaderValue, IF_NONE_MATCH};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::engines::{config, with};
use crate::wait::{GENEROUS, eventually};

const PATH: &str = "/workers";

/// Poll interval of a gateway, in milliseconds.
pub const INTERVAL_MS: u64 = 250;

/// A small server with one page, whose content the test sets.
pub struct WorkerDocument {
    address: SocketAddr,
    page: Page,
    // Dropping the sender ends the server.
    open: Option<oneshot::Sender<()>>,
}

#[derive(Clone)]
struct Page {
    text: Arc<Mutex<Bytes>>,
    status: Arc<AtomicU16>,
    tagged: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    unchanged: Arc<AtomicU64>,
}

impl WorkerDocument {
    /// Serves a list without workers.
    pub async fn start() -> WorkerDocument {
        let page = Page {
            text: Arc::new(Mutex::new(document(&[]))),
            status: Arc::new(AtomicU16::new(200)),
            tagged: Arc::default(),
            asked: Arc::default(),
            unchanged: Arc::default(),
        };
        let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let (address, open) = serve_apart(anywhere, page.clone());
        WorkerDocument {
            address,
            page,
            open: Some(open),
        }
    }

    /// Replaces the workers.
    pub fn publish(&self, workers: &[Value]) {
        self.page.set(document(workers));
    }

    /// Replaces the page by this text, valid or not.
    pub fn publish_text(&self, text: &str) {
        self.page.set(Bytes::from(text.to_owned()));
    }

    /// Sets the status of the page.
    pub fn set_status(&self, status: u16) {
        self.page.status.store(status, Ordering::Relaxed);
    }

    /// Gives the page an ETag; a request that carries the current tag is answered with 304.
    pub fn tag(&self) {
        self.page.tagged.store(true, Ordering::Relaxed);
    }

    /// Refuses connections from now on, and ends the open ones.
    pub fn close(&mut self) {
        self.open = None;
    }

    /// Serves the same page at the same address again.
    pub async fn reopen(&mut self) {
        // The earlier server may still be ending.
        let open = eventually("its port is free", GENEROUS, || async {
            match std::net::TcpListener::bind(self.address) {
                Ok(free) => {
                    drop(free);
                    Ok(serve_apart(self.address, self.page.clone()).1)
                }
                Err(error) => Err(error.to_string()),
            }
        });
        self.open = Some(open.await);
    }

    /// Number of 304 answers.
    pub fn unchanged(&self) -> u64 {
        self.page.unchanged.load(Ordering::Relaxed)
    }

    /// Waits for this many further requests.
    pub async fn until_polled(&self, times: u64) {
        let asked = || self.page.asked.load(Ordering::Relaxed);
        let before = asked();
        eventually("the document is asked for", GENEROUS, || async move {
            let more = asked() - before;
            if more >= times {
                return Ok(());
            }
            Err(format!("{more} times"))
        })
        .await;
    }

    /// The `discovery` source that points here.
    pub fn source(&self) -> Value {
        json!({
            "cluster": "discovery",
            "addresses": [self.address.to_string()],
            "path": PATH,
            "interval_ms": INTERVAL_MS,
            "timeout_ms": 1000,
        })
    }

    /// A configuration whose one pool discovers its workers here, with these further fields of the pool.
    pub fn config(&self, pool: Value) -> Value {
        config(with(
            json!({"discovery": {"document": self.source()}}),
            pool,
        ))
    }
}

impl Page {
    fn set(&self, text: Bytes) {
        *self.text.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }

    /// The answer to a client that has the page with this tag.
    fn answer(&self, known: Option<&[u8]>) -> Response<Full<Bytes>> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        let status = self.status.load(Ordering::Relaxed);
        if status != 200 || !self.tagged.load(Ordering::Relaxed) {
            return page(status, text.clone());
        }
        let tag = tag(&text);
        let mut response = match known == Some(tag.as_bytes()) {
            true => {
                self.unchanged.fetch_add(1, Ordering::Relaxed);
                page(304, Bytes::new())
            }
            false => page(200, text.clone()),
        };
        if let Ok(tag) = HeaderValue::from_str(&tag) {
            response.headers_mut().insert(ETAG, tag);
        }
        response
    }
}

/// A tag that changes with the page.
fn tag(text: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("\"{:x}\"", hasher.finish())
}

fn document(workers: &[Value]) -> Bytes {
    Bytes::from(json!({"workers": workers}).to_string())
}

/// Serves on a separate thread: the document may outlive the test, and the runtime, that started it.
fn serve_apart(at: SocketAddr, page: Page) -> (SocketAddr, oneshot::Sender<()>) {
    let listener = std::net::TcpListener::bind(at);
    let listener = listener.unwrap_or_else(|error| panic!("cannot listen on {at}: {error}"));
    let address = listener.local_addr();
    let address = address.unwrap_or_else(|error| panic!("no address: {error}"));
    let (open, closed) = oneshot::channel();
    std::thread::spawn(move || -> std::io::Result<()> {
        listener.set_nonblocking(true)?;
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().build()?.block_on(async {
            tokio::select! {
                () = serve(TcpListener::from_std(listener)?, page) => {}
                _ = closed => {}
            }
            Ok(())
        })
    });
    (address, open)
}

async fn serve(listener: TcpListener, page: Page) {
    while let Ok((stream, _)) = listener.accept().await {
        let page = page.clone();
        let answer = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
            let response = answer(&page, &request);
            async move { Ok::<_, Infallible>(response) }
        });
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
        // A gateway that ends breaks its connections: no error here.
        tokio::spawn(async move { connection.await.unwrap_or_default() });
    }
}

fn answer(page: &Page, request: &hyper::Request<hyper::body::Incoming>) -> Response<Full<Bytes>> {
    if request.uri().path() != PATH {
        return self::page(404, Bytes::new());
    }
    let known = request.headers().get(IF_NONE_MATCH);
    page.answer(known.map(HeaderValue::as_bytes))
}

fn page(status: u16, text: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text));
    *response.status_mut() = hyper::StatusCode::from_u16(status).unwrap_or_default();
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

/// A loopback address that no other test has, so that a port stays free while its engine is dead: the source address of client
/// connections is 127.0.0.1.
pub fn own_loopback() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    // Three of the four bytes vary; 127.0.0.0/16 stays shared. A process gets an address again only after 254 others.
    let number = 1 + NEXT.fetch_add(1, Ordering::Relaxed) % 254;
    Ipv4Addr::new(127, 1 + high % 254, low, number as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Ask, send};

    #[tokio::test]
    async fn the_page_says_what_was_published_last() {
        let document = WorkerDocument::start().await;
        let workers = || async {
            let page = send(document.address, Ask::get(PATH)).await.expect(200);
            page.json()["workers"].clone()
        };
        assert_eq!(workers().await, json!([]));
        document.publish(&[json!({"address": "127.0.0.1:1"})]);
        assert_eq!(workers().await, json!([{"address": "127.0.0.1:1"}]));
        send(document.address, Ask::get("/")).await.expect(404);
    }

    #[tokio::test]
    async fn who_knows_the_page_is_told_so() {
        let mut document = WorkerDocument::start().await;
        document.tag();
        let ask = |tag: &str| {
            send(
                document.address,
                Ask::get(PATH).header("if-none-match", tag),
            )
        };
        let first = ask("\"none\"").await.expect(200);
        let tag = first.header("etag").unwrap_or_default().to_owned();
        ask(&tag).await.expect(304);
        document.publish_text("[]");
        assert_ne!(ask(&tag).await.expect(200).header("etag"), Some(&*tag));
        assert_eq!(document.unchanged(), 1);
        document.set_status(500);
        ask(&tag).await.expect(500);
        document.close();
        document.reopen().await;
        send(document.address, Ask::get(PATH)).await.expect(500);
    }

    #[test]
    fn loopback_addresses_are_ones_own() {
        assert_ne!(own_loopback(), own_loopback());
        assert!(own_loopback().is_loopback());
    }
}
