//! The document of workers that a gateway polls, served by the test itself.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::Full;
use hyper::Response;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::engines::{config, with};
use crate::wait::{GENEROUS, eventually};

const PATH: &str = "/workers";

/// How often a gateway asks, in milliseconds.
const INTERVAL_MS: u64 = 250;

/// A small server with one page, which says whatever the test wants.
pub struct Roster {
    address: SocketAddr,
    page: Page,
    // Its end ends the serving.
    _open: oneshot::Sender<()>,
}

#[derive(Clone)]
struct Page {
    text: Arc<Mutex<Bytes>>,
    asked: Arc<AtomicU64>,
}

impl Roster {
    /// Serves a list without workers.
    pub async fn start() -> Roster {
        let page = Page {
            text: Arc::new(Mutex::new(document(&[]))),
            asked: Arc::default(),
        };
        let (address, open) = serve_apart(page.clone());
        Roster {
            address,
            page,
            _open: open,
        }
    }

    /// From now on these are the workers.
    pub fn publish(&self, workers: &[Value]) {
        self.page.set(document(workers));
    }

    /// From now on the page is this text, whatever it is.
    pub fn say(&self, text: &str) {
        self.page.set(Bytes::from(text.to_owned()));
    }

    /// Waits until the page was asked for this many times more.
    pub async fn until_asked(&self, times: u64) {
        let asked = || self.page.asked.load(Ordering::Relaxed);
        let before = asked();
        eventually("the roster is asked for", GENEROUS, || async move {
            let more = asked() - before;
            if more >= times {
                return Ok(());
            }
            Err(format!("{more} times"))
        })
        .await;
    }

    /// A configuration whose one pool finds its workers here, with these further fields of the pool.
    pub fn config(&self, pool: Value) -> Value {
        let source = json!({
            "cluster": "discovery",
            "addresses": [self.address.to_string()],
            "path": PATH,
            "interval_ms": INTERVAL_MS,
            "timeout_ms": 1000,
        });
        config(with(json!({"discovery": {"document": source}}), pool))
    }
}

impl Page {
    fn set(&self, text: Bytes) {
        *self.text.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }

    fn read(&self) -> Bytes {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        text.clone()
    }
}

fn document(workers: &[Value]) -> Bytes {
    Bytes::from(json!({"workers": workers}).to_string())
}

/// Serves on a thread of its own: a roster may outlive the test, and the runtime, that started it.
fn serve_apart(page: Page) -> (SocketAddr, oneshot::Sender<()>) {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let listener = listener.unwrap_or_else(|error| panic!("no free port: {error}"));
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
            let text = (request.uri().path() == PATH).then(|| page.read());
            async move { Ok::<_, Infallible>(answer(text)) }
        });
        let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
        // A gateway that leaves breaks its connections off.
        tokio::spawn(async move { connection.await.unwrap_or_default() });
    }
}

fn answer(page: Option<Bytes>) -> Response<Full<Bytes>> {
    let status = if page.is_some() { 200 } else { 404 };
    let mut response = Response::new(Full::new(page.unwrap_or_default()));
    *response.status_mut() = hyper::StatusCode::from_u16(status).unwrap_or_default();
    let json = hyper::header::HeaderValue::from_static("application/json");
    response
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, json);
    response
}

/// A loopback address that no other test has, so that a port of it stays free while its engine is dead: clients that
/// connect from a port of their own do so from 127.0.0.1.
pub fn own_loopback() -> Ipv4Addr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let process = std::process::id().to_be_bytes();
    // Three of the four bytes are ours; 127.0.0.0/16 stays everyone's.
    Ipv4Addr::new(
        127,
        1 + process[2] % 254,
        process[3],
        NEXT.fetch_add(1, Ordering::Relaxed).max(1),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Ask, send};

    #[tokio::test]
    async fn the_page_says_what_was_published_last() {
        let roster = Roster::start().await;
        let workers = || async {
            let page = send(roster.address, Ask::get(PATH)).await.expect(200);
            page.json()["workers"].clone()
        };
        assert_eq!(workers().await, json!([]));
        roster.publish(&[json!({"address": "127.0.0.1:1"})]);
        assert_eq!(workers().await, json!([{"address": "127.0.0.1:1"}]));
        send(roster.address, Ask::get("/")).await.expect(404);
    }

    #[test]
    fn loopback_addresses_are_ones_own() {
        assert_ne!(own_loopback(), own_loopback());
        assert!(own_loopback().is_loopback());
    }
}
