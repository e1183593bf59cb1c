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
            &["on_prefill_failure", "nixl, mooncake and trtllm only"],
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
fn what_selection_and_admission_cannot_mean_is_refused() {
    let said = |fields: &str| {
        let fields = format!(
            r#""protocol":"nixl","discovery":{{"static":{{"workers":[]}}}},"decode":{{"runs_whole_requests":true}},{fields}"#
        );
        error(&pool(&fields))
    };
    for (fields, parts) in [
        (
            r#""selection":{"prefill":"best"}"#,
            &["selection.prefill", "best", "kv", "prefix_hash"][..],
        ),
        (
            r#""selection":{"kv":{"router_temperature":-1}}"#,
            &["selection.kv.router_temperature", "0 or more"],
        ),
        (
            r#""selection":{"kv":{"overlap_weight":1}}"#,
            &["selection.kv", "overlap_weight", "overlap_score_credit"],
        ),
        (
            r#""selection":{"session":{"headers":[]}}"#,
            &["selection.session.headers", "x-session-id"],
        ),
        (
            r#""prefixes":{"max_blocks":99999999}"#,
            &["prefixes.max_blocks", "16777216"],
        ),
        (
            r#""health":{"eject_after_ms":3}"#,
            &["health", "eject_after_ms", "most_eject_ms"],
        ),
        (
            r#""health":{"eject_ms":0}"#,
            &["health.eject_ms", "eject_after"],
        ),
        (
            r#""health":{"most_eject_ms":4999}"#,
            &["health.most_eject_ms", "at least eject_ms"],
        ),
        (
            r#""booking_expiry_ms":0"#,
            &["booking_expiry_ms", "at least 1"],
        ),
        (
            r#""admission":{"queue":{}}"#,
            &["admission.queue", "threshold"],
        ),
        (
            r#""admission":{"decode":{"fraction":1.5}}"#,
            &["admission.decode.fraction", "from 0 to 1"],
        ),
        (
            r#""admission":{"prefill":{"tokens":1},"queue":{"max_requests":0}}"#,
            &["queue.max_requests", "leave the queue out"],
        ),
        (
            r#""admission":{"prefill":{"tokens":1},"queue":{"policy":"lifo"}}"#,
            &["queue.policy", "lcfs"],
        ),
        (
            r#""conditional":{"policy":"prefill_load"}"#,
            &["conditional", "prefill_busy_tokens"],
        ),
        (
            r#""conditional":{"uncached_share":70}"#,
            &["conditional.uncached_share", "from 0 to 1"],
        ),
        (
            r#""conditional":{},"enforce_disagg":true"#,
            &["conditional", "enforce_disagg"],
        ),
    ] {
        let said = said(fields);
        assert!(
            parts.iter().all(|part| said.contains(part)),
            "{fields}: {said}"
        );
    }
    let without =
        pool(r#""protocol":"nixl","discovery":{"static":{"workers":[]}},"conditional":{}"#);
    assert!(error(&without).contains("decode.runs_whole_requests"));
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
