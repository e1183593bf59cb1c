//! Owns the document source: a JSON list of workers, polled from an HTTP cluster.
//!
//! The document is `{"workers": [...]}`, with workers written as in the static source; `docs/workers.schema.json` is its
//! schema. An ETag of the server is sent back with the next poll, which may then be answered with 304.

use serde::Deserialize;

use super::outside::Outside;
use super::{Poll, PollAnswer, Source, SourceError, SourceUpdate, static_workers};
use crate::config::{DocumentDiscovery, ListedWorker, Pool, ProtocolName};
use crate::fleet::Worker;

/// The document as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenDocument {
    pub(super) workers: Vec<ListedWorker>,
}

/// Longest ETag that is sent back, in bytes; a longer one is ignored.
const MAX_ETAG: usize = 512;

/// A server that lists the workers.
#[derive(Debug)]
pub struct Document {
    poll: Poll,
    protocol: ProtocolName,
    outside: Outside,
    /// ETag of the last answer that was read.
    etag: Option<String>,
}

impl Document {
    pub fn new(document: &DocumentDiscovery, pool: &Pool) -> Self {
        Self {
            poll: Poll {
                cluster: document.cluster.clone(),
                destinations: document.addresses.clone(),
                path: document.path.clone(),
                headers: vec![("accept", "application/json".to_owned())],
                interval_ms: document.interval_ms,
                timeout_ms: document.timeout_ms,
            },
            protocol: pool.protocol,
            outside: Outside::new(&pool.destinations),
            etag: None,
        }
    }
}

impl Source for Document {
    fn poll(&self) -> Option<Poll> {
        let mut poll = self.poll.clone();
        if let Some(etag) = &self.etag {
            poll.headers.push(("if-none-match", etag.clone()));
        }
        Some(poll)
    }

    fn read_answer(&mut self, answer: &PollAnswer<'_>) -> Result<SourceUpdate, SourceError> {
        answer.check_length()?;
        match answer.status {
            200 => {}
            304 if self.etag.is_some() => return Ok(SourceUpdate::Unchanged),
            status => {
                // Another server than the one with the ETag may have answered.
                self.etag = None;
                return Err(SourceError::Status(status));
            }
        }
        // No ETag until the answer has been read.
        self.etag = None;
        let workers = parse(answer.body, self.protocol)?;
        if !workers.is_empty() {
            // Only a second empty list counts, so an empty one must not be answered with 304.
            self.etag = answer.etag.and_then(sendable);
        }
        let (workers, said) = self.outside.leave_out(workers, Vec::new());
        Ok(SourceUpdate::Workers(workers, said))
    }
}

/// The ETag, if it may be sent back.
fn sendable(etag: &[u8]) -> Option<String> {
    let is_plain = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    match etag.len() <= MAX_ETAG && etag.iter().all(is_plain) {
        true => String::from_utf8(etag.to_vec()).ok(),
        false => None,
    }
}

/// The workers that a document lists.
///
/// # Errors
/// When the document cannot be read; an empty list is no error.
pub fn parse(body: &[u8], protocol: ProtocolName) -> Result<Vec<Worker>, SourceError> {
    let document: WrittenDocument = serde_json::from_slice(body).map_err(SourceError::Document)?;
    crate::config::check_workers(&document.workers, protocol, "")?;
    Ok(static_workers(&document.workers))
}

#[cfg(test)]
mod tests {
    mod schema;

    use super::super::tests::{self, answer, pool};
    use super::*;

    fn source(fields: &str) -> Document {
        let fields = format!(
            r#""protocol":"nixl",{fields}"discovery":{{"document":{{"cluster":"c","addresses":["10.0.0.9:80"]}}}}"#
        );
        let pool = pool(&fields);
        let crate::config::Discovery::Document(document) = &pool.discovery else {
            panic!("no document");
        };
        Document::new(document, &pool)
    }

    fn asked(source: &Document) -> Option<String> {
        let headers = source.poll().unwrap().headers;
        let mut found = headers
            .into_iter()
            .filter(|(name, _)| *name == "if-none-match");
        found.next().map(|(_, etag)| etag)
    }

    const ONE: &[u8] = br#"{"workers":[{"address":"10.0.0.1:8000","role":"decode"}]}"#;

    fn tagged<'a>(status: u16, etag: &'a [u8], body: &'a [u8]) -> PollAnswer<'a> {
        PollAnswer {
            status,
            etag: Some(etag),
            body,
        }
    }

    #[test]
    fn an_etag_is_sent_back_until_something_else_than_unchanged_is_answered() {
        let mut source = source("");
        assert_eq!(asked(&source), None);
        source.read_answer(&tagged(200, b"W/\"1\"", ONE)).unwrap();
        assert_eq!(asked(&source).as_deref(), Some("W/\"1\""));
        let unchanged = source.read_answer(&tagged(304, b"", b"")).unwrap();
        assert_eq!(unchanged, SourceUpdate::Unchanged);
        source.read_answer(&tagged(200, b"\"2\"", ONE)).unwrap();
        assert_eq!(asked(&source).as_deref(), Some("\"2\""));
        source
            .read_answer(&tagged(200, b"\"3\"", b"{"))
            .unwrap_err();
        assert_eq!(asked(&source), None);
        source.read_answer(&tagged(304, b"", b"")).unwrap_err();
        source.read_answer(&tagged(200, b"\"3\"", ONE)).unwrap();
        source.read_answer(&tagged(503, b"\"3\"", ONE)).unwrap_err();
        assert_eq!(asked(&source), None);
    }

    #[test]
    fn an_etag_that_no_header_can_carry_is_not_sent_and_an_empty_list_is_asked_for_again() {
        for etag in [&b"a\r\nx: y"[..], b"\xff", &[b'a'; 513]] {
            let mut source = source("");
            source.read_answer(&tagged(200, etag, ONE)).unwrap();
            assert_eq!(asked(&source), None);
        }
        let mut source = source("");
        source
            .read_answer(&tagged(200, b"\"1\"", br#"{"workers":[]}"#))
            .unwrap();
        assert_eq!(asked(&source), None);
    }

    #[test]
    fn who_lies_outside_the_networks_is_left_out_by_name_and_told_of_once() {
        let mut source = source(r#""destinations":{"original_dst":{"networks":["10.0.0.0/8"]}},"#);
        let body = br#"{"workers":[{"address":"10.0.0.1:8000","role":"decode","draining":true},
            {"address":"169.254.169.254:80","role":"decode","name":"sly"}]}"#;
        let (names, said) = tests::names(source.read_answer(&answer(body)).unwrap());
        assert_eq!(names, ["10.0.0.1:8000"]);
        assert!(
            said.len() == 1 && said[0].contains("sly at 169.254.169.254:80"),
            "{said:?}"
        );
        let (_, said) = tests::names(source.read_answer(&answer(body)).unwrap());
        assert!(said.is_empty());
        source.read_answer(&answer(ONE)).unwrap();
        let (_, said) = tests::names(source.read_answer(&answer(body)).unwrap());
        assert_eq!(said.len(), 1);
    }

    #[test]
    fn a_document_lists_workers_as_the_configuration_does() {
        let body = br#"{"workers":[{"address":"10.0.0.1:8000","role":"prefill","id":18446744073709551615,"set":"a"}]}"#;
        let workers = parse(body, ProtocolName::Nixl).unwrap();
        assert_eq!((workers[0].id.0, workers[0].set.as_str()), (u64::MAX, "a"));
        assert_eq!(parse(br#"{"workers":[]}"#, ProtocolName::Nixl).unwrap(), []);
        for bad in [
            &b""[..],
            b"[]",
            b"{}",
            br#"{"workers":[{"role":"prefill"}]}"#,
            br#"{"workers":[],"x":1}"#,
        ] {
            assert!(parse(bad, ProtocolName::Nixl).is_err(), "{bad:?}");
        }
    }
}
