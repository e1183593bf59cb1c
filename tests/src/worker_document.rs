//! Owns the document of workers that a gateway polls, served by the test itself.

use std::cell::RefCell;

use hyper::StatusCode;
pub use pd_harness_common::loopback::own as own_loopback;
use pd_harness_common::page::{Page, Tag};
use serde_json::{Value, json};

use crate::engines::{config, with};
use crate::wait::{GENEROUS, eventually};

const PATH: &str = "/workers";

/// Poll interval of a gateway, in milliseconds.
pub const INTERVAL_MS: u64 = 250;

/// A small server with one page, whose content the test sets.
pub struct WorkerDocument(Page);

impl WorkerDocument {
    /// Serves a list without workers.
    pub async fn start() -> WorkerDocument {
        let page = Page::start(PATH, Tag::None);
        let page = page.unwrap_or_else(|error| panic!("cannot serve a page: {error}"));
        let document = WorkerDocument(page);
        document.publish(&[]);
        document
    }

    /// Replaces the workers.
    pub fn publish(&self, workers: &[Value]) {
        self.publish_text(&json!({"workers": workers}).to_string());
    }

    /// Replaces the page by this text, valid or not.
    pub fn publish_text(&self, text: &str) {
        self.0.publish(text.to_owned());
    }

    /// Sets the status of the page.
    pub fn set_status(&self, status: u16) {
        self.0
            .set_status(StatusCode::from_u16(status).unwrap_or_default());
    }

    /// Gives the page an ETag; a request that carries the current tag is answered with 304.
    pub fn tag(&self) {
        self.0.set_tag(Tag::Some);
    }

    /// Refuses connections from now on, and ends the open ones.
    pub fn close(&mut self) {
        self.0.close();
    }

    /// Serves the same page at the same address again.
    pub async fn reopen(&mut self) {
        // The earlier server may still be ending.
        let page = RefCell::new(&mut self.0);
        let open = eventually("its port is free", GENEROUS, || async {
            let reopened = page.borrow_mut().reopen();
            reopened.map_err(|error| error.to_string())
        });
        open.await;
    }

    /// Number of 304 answers.
    pub fn unchanged(&self) -> u64 {
        self.0.unchanged()
    }

    /// Waits for this many further requests.
    pub async fn until_polled(&self, times: u64) {
        let before = self.0.asked();
        eventually("the document is asked for", GENEROUS, || async move {
            let more = self.0.asked() - before;
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
            "addresses": [self.0.address.to_string()],
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Ask, send};

    #[tokio::test]
    async fn the_page_says_what_was_published_last() {
        let document = WorkerDocument::start().await;
        let workers = || async {
            let page = send(document.0.address, Ask::get(PATH)).await.expect(200);
            page.json()["workers"].clone()
        };
        assert_eq!(workers().await, json!([]));
        document.publish(&[json!({"address": "127.0.0.1:1"})]);
        assert_eq!(workers().await, json!([{"address": "127.0.0.1:1"}]));
        send(document.0.address, Ask::get("/")).await.expect(404);
    }

    #[tokio::test]
    async fn who_knows_the_page_is_told_so() {
        let mut document = WorkerDocument::start().await;
        document.tag();
        let ask = |tag: &str| {
            send(
                document.0.address,
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
        send(document.0.address, Ask::get(PATH)).await.expect(500);
    }
}
