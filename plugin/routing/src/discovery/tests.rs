//! Tests common to all sources: how they are made, and what they poll.

use super::*;
use crate::config::Config;

/// A pool with these fields.
pub fn pool(fields: &str) -> Pool {
    let document = format!(r#"{{"pools":[{{"name":"p",{fields}}}]}}"#);
    let mut config = Config::parse(document.as_bytes()).unwrap();
    config.pools.remove(0)
}

pub fn answer(body: &[u8]) -> PollAnswer<'_> {
    PollAnswer {
        status: 200,
        etag: None,
        body,
    }
}

/// The names of the workers in an answer, and its messages.
pub fn names(read_answer: SourceUpdate) -> (Vec<String>, Vec<String>) {
    match read_answer {
        SourceUpdate::Workers(workers, said) => {
            (workers.into_iter().map(|w| w.name).collect(), said)
        }
        SourceUpdate::Unchanged => panic!("unchanged"),
    }
}

#[test]
fn every_source_says_what_it_asks_and_under_its_own_name() {
    for (fields, name, asked) in [
        (
            r#""protocol":"direct","frontends":["10.0.0.1:8000","10.0.0.2:8000"],"discovery":{"dynamo":{"models":{"d":"m"}}}"#,
            "dynamo",
            Some(("decode", 2, "/health")),
        ),
        (
            r#""protocol":"nixl","discovery":{"document":{"cluster":"control","addresses":["10.0.0.9:80"]}}"#,
            "document",
            Some(("control", 1, "/workers")),
        ),
        (
            r#""protocol":"nixl","discovery":{"envoy_clusters":{"members":{"prefill":{"role":"prefill"}}}}"#,
            "envoy_clusters",
            Some(("envoy_admin", 0, "/clusters?format=json")),
        ),
        (
            r#""protocol":"nixl","discovery":{"registration":{"token":"t"}}"#,
            "registration",
            None,
        ),
    ] {
        let pool = pool(fields);
        let mut source = source(&pool).unwrap();
        assert_eq!(pool.discovery.name(), name);
        let poll = source.poll();
        let seen = poll.as_ref().map(|poll| {
            let destinations = poll.destinations.len();
            (poll.cluster.as_str(), destinations, poll.path.as_str())
        });
        assert_eq!(seen, asked);
        assert!(poll.is_none_or(|poll| (poll.interval_ms, poll.timeout_ms) == (1_000, 1_000)));
        // For every source, errors and unrelated pages hold no workers.
        for (status, body) in [
            (503, &b"{\"workers\":[]}"[..]),
            (304, b""),
            (200, b"<html>"),
        ] {
            let answer = PollAnswer {
                status,
                etag: None,
                body,
            };
            assert!(source.read_answer(&answer).is_err(), "{name} {status}");
        }
    }
    assert!(
        source(&pool(
            r#""protocol":"nixl","discovery":{"static":{"workers":[]}}"#
        ))
        .is_none()
    );
}
