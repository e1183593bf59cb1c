//! Tests of what is refused, and how it is said.

use super::*;

fn error(document: &str) -> String {
    Config::parse(document.as_bytes()).unwrap_err().to_string()
}

fn pool(fields: &str) -> String {
    format!(r#"{{"pools":[{{"name":"p",{fields}}}]}}"#)
}

#[test]
fn an_error_names_the_path_and_what_would_be_right() {
    let workers = |worker: &str| {
        pool(&format!(
            r#""protocol":"nixl","discovery":{{"static":{{"workers":[{worker}]}}}}"#
        ))
    };
    for (document, parts) in [
        ("{}".to_owned(), &["pools"][..]),
        (r#"{"pools":[],"statu":true}"#.to_owned(), &["statu"]),
        (r#"{"pools":[]}"#.to_owned(), &["pools", "exactly one"]),
        (
            pool(r#""protocol":"nix","discovery":{"static":{"workers":[]}}"#),
            &["pools[0].protocol", "nixl"],
        ),
        (
            workers(r#"{"address":"host:80","role":"decode"}"#),
            &["workers[0].address"],
        ),
        (
            workers(r#"{"address":"127.0.0.1:80","role":"encode"}"#),
            &["workers[0].role", "prefill"],
        ),
        (
            workers(r#"{"role":"decode"}"#),
            &["workers[0].address", "required"],
        ),
        (
            workers(r#"{"address":"127.0.0.1:80","role":"decode","port":1}"#),
            &["port"],
        ),
        (
            workers(
                r#"{"address":"127.0.0.1:80","role":"decode"},{"address":"127.0.0.1:80","role":"decode"}"#,
            ),
            &["workers[1]", "twice"],
        ),
        (
            pool(
                r#""protocol":"sglang","on_prefill_failure":["decode_only"],"decode":{"runs_whole_requests":true},"discovery":{"static":{"workers":[]}}"#,
            ),
            &["on_prefill_failure", "nixl only"],
        ),
        (
            pool(r#""protocol":"direct","discovery":{"static":{"workers":[]}}"#),
            &["pools[0].frontends", "10.0.0.1:8000"],
        ),
        (
            pool(r#""protocol":"nixl","discovery":{"dynamo":{"models":{"dynamo":"m"}}}"#),
            &["discovery.dynamo", "direct"],
        ),
    ] {
        let said = error(&document);
        assert!(
            parts.iter().all(|part| said.contains(part)),
            "{document}: {said}"
        );
    }
}

#[test]
fn ids_keep_all_64_bits() {
    let document = pool(
        r#""protocol":"direct","frontends":["127.0.0.1:1"],"discovery":{"static":{"workers":[{"id":18446744073709551615,"role":"decode"}]}}"#,
    );
    let config = Config::parse(document.as_bytes()).unwrap();
    let Discovery::Static(list) = &config.pools[0].discovery else {
        panic!("not static");
    };
    assert_eq!(list.workers[0].id, Some(u64::MAX));
}
