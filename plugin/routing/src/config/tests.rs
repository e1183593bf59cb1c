//! Tests of the configurations that are refused, and of the messages of these refusals.

use super::*;

mod rules;

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
        (r#"{"pools":[]}"#.to_owned(), &["pools", "1 to 64"]),
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
            &[
                "on_prefill_failure",
                "decode waits for prefill, such as nixl",
            ],
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
fn found_b17_a_pool_adds_no_header_that_is_a_legs_own() {
    let with = |names: &str| {
        pool(&format!(
            r#""protocol":"nixl","discovery":{{"static":{{"workers":[]}}}},"call_headers":{names}"#
        ))
    };
    for (names, part) in [
        (r#"["x-api-key","content-type"]"#, "each leg's own"),
        (
            r#"["x-api-key","x-worker-instance-id"]"#,
            "no client may set",
        ),
        (r#"["x-api-key","a b"]"#, "no header's name"),
    ] {
        let said = error(&with(names));
        assert!(
            said.contains("pools[0].call_headers[1]") && said.contains(part),
            "{names}: {said}"
        );
    }
    let config = Config::parse(with(r#"["x-api-key"]"#).as_bytes()).unwrap();
    assert_eq!(config.pools[0].call_headers, ["x-api-key"]);
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

#[test]
fn what_sources_and_destinations_cannot_mean_is_refused() {
    let nixl = r#""protocol":"nixl""#;
    let document = r#""discovery":{"document":{"cluster":"c","addresses":["10.0.0.1:80"]"#;
    let listed =
        r#""discovery":{"static":{"workers":[{"address":"192.168.0.1:1","role":"decode"}]}}"#;
    let none = r#""discovery":{"static":{"workers":[]}}"#;
    let clusters = |members: &str| {
        format!(r#"{nixl},"discovery":{{"envoy_clusters":{{"members":{members}}}}}"#)
    };
    let registration =
        |fields: &str| format!(r#"{nixl},"discovery":{{"registration":{{{fields}}}}}"#);
    for (fields, parts) in [
        (
            format!(r#"{nixl},{document},"keep_stale_ms":10}}}}"#),
            &["discovery.document.keep_stale_ms", "null for ever"][..],
        ),
        (
            format!(r#"{nixl},{document},"interval_ms":10}}}}"#),
            &["discovery.document.interval_ms", "at least 100"],
        ),
        (
            clusters("{}"),
            &["discovery.envoy_clusters.members", "prefill"],
        ),
        (
            clusters(r#"{"a":{"role":"decode","dp_size":0}}"#),
            &["discovery.envoy_clusters.members.a.dp_size", "1 to 1024"],
        ),
        (
            clusters(r#"{"a":{"role":"decode","address":"10.0.0.1:1"}}"#),
            &["members.a", "address", "dp_size"],
        ),
        (
            r#""protocol":"aggregated","discovery":{"envoy_clusters":{"members":{"a":{"role":"decode"}}}}"#.to_owned(),
            &["members.a.role", "aggregated"],
        ),
        (
            r#""protocol":"direct","frontends":["10.0.0.1:1"],"discovery":{"envoy_clusters":{"members":{"a":{"role":"decode"}}}}"#.to_owned(),
            &["discovery.envoy_clusters", "discovery.dynamo"],
        ),
        (registration(""), &["discovery.registration", "token"]),
        (
            registration(r#""token":"""#),
            &["discovery.registration.token", "at least one"],
        ),
        (
            registration(r#""token":"a b""#),
            &["discovery.registration.token", "without spaces"],
        ),
        (
            registration(r#""token":"a","lease_ms":10"#),
            &["discovery.registration.lease_ms", "at least 1000"],
        ),
        (
            registration(r#""token":"a","max_workers":0"#),
            &["discovery.registration.max_workers", "16384"],
        ),
        (
            format!(r#"{nixl},"destinations":"anywhere",{none}"#),
            &["destinations", "members", "original_dst"],
        ),
        (
            format!(r#"{nixl},"destinations":{{"original_dst":{{"networks":[]}}}},{none}"#),
            &["destinations.original_dst.networks", "10.0.0.0/8"],
        ),
        (
            format!(
                r#"{nixl},"destinations":{{"original_dst":{{"networks":["10.0.0.0/40"]}}}},{none}"#
            ),
            &["destinations.original_dst.networks[0]", "10.0.0.0/40"],
        ),
        (
            format!(
                r#"{nixl},"destinations":{{"original_dst":{{"networks":["10.0.0.0/8"]}}}},{listed}"#
            ),
            &[
                "discovery.static.workers[0].address",
                "none of destinations",
            ],
        ),
        (
            format!(
                r#""protocol":"direct","frontends":["10.0.0.1:1"],"destinations":{{"original_dst":{{"networks":["10.0.0.0/8"]}}}},{none}"#
            ),
            &["pools[0].destinations", "members"],
        ),
        (
            format!(r#"{nixl},"engine_metrics":{{"interval_ms":99}},{none}"#),
            &["engine_metrics.interval_ms", "at least 100"],
        ),
        (
            format!(r#"{nixl},"engine_metrics":{{"stale_after_ms":999}},{none}"#),
            &["engine_metrics.stale_after_ms", "at least interval_ms"],
        ),
        (
            format!(r#"{nixl},"engine_metrics":{{"path":"metrics"}},{none}"#),
            &["engine_metrics.path", "slash"],
        ),
        (
            format!(r#"{nixl},"engine_metrics":{{"most_per_second":0}},{none}"#),
            &["engine_metrics.most_per_second", "at least 1"],
        ),
    ] {
        let said = error(&pool(&fields));
        assert!(
            parts.iter().all(|part| said.contains(part)),
            "{fields}: {said}"
        );
    }
}

#[test]
fn sources_that_say_nothing_more_get_the_written_defaults() {
    let config = |fields: &str| Config::parse(pool(fields).as_bytes()).unwrap();
    let kept = |fields: &str| config(fields).pools[0].discovery.keep_stale_ms();
    let document = |fields: &str| {
        format!(
            r#""protocol":"nixl","discovery":{{"document":{{"cluster":"c","addresses":["10.0.0.1:80"]{fields}}}}}"#
        )
    };
    assert_eq!(kept(&document("")), Some(600_000));
    assert_eq!(kept(&document(r#","keep_stale_ms":null"#)), None);
    assert_eq!(kept(&document(r#","keep_stale_ms":1000"#)), Some(1_000));

    let config = config(
        r#""protocol":"nixl","engine_metrics":{},"discovery":{"registration":{"token":"t"}}"#,
    );
    let Discovery::Registration(rules) = &config.pools[0].discovery else {
        panic!("no registration");
    };
    assert_eq!((rules.lease_ms, rules.max_workers), (15_000, 4_096));
    assert_eq!(
        config.pools[0].engine_metrics,
        Some(EngineMetrics::default())
    );
    assert_eq!(config.pools[0].destinations, Destinations::Members);
    assert_eq!(config.sharing, Sharing::default());
    assert_eq!(config.sharing.interval_ms, 25);
}

#[test]
fn pools_are_told_apart_by_name_and_each_is_checked() {
    let named = |names: &[&str], fields: &str| {
        let pools = names.iter().map(|name| {
            format!(r#"{{"name":"{name}","protocol":"nixl","discovery":{{"static":{{"workers":[]}}}}{fields}}}"#)
        });
        let pools: Vec<String> = pools.collect();
        format!(r#"{{"pools":[{}]}}"#, pools.join(","))
    };
    let many: Vec<String> = (0..65).map(|number| number.to_string()).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let config = Config::parse(named(&many[..64], "").as_bytes()).unwrap();
    assert_eq!(config.pools.len(), 64);
    assert!(error(&named(&many, "")).contains("1 to 64"));
    let twice = error(&named(&["a", "b", "a"], ""));
    assert!(twice.contains("pools[2].name"), "{twice}");
    let second =
        named(&["a", "b"], "").replacen(r#""name":"b","#, r#""name":"b","block_tokens":0,"#, 1);
    assert!(error(&second).contains("pools[1].block_tokens"));
    let sharing = named(&["a"], "").replacen('{', r#"{"sharing":{"interval_ms":5},"#, 1);
    assert!(error(&sharing).contains("sharing.interval_ms"));
}

#[test]
fn a_token_comes_out_in_no_words() {
    const SECRET: &str = "hunter2-1234567890";
    let registration = |token: &str| {
        pool(&format!(
            r#""protocol":"nixl","discovery":{{"registration":{{"token":{token}}}}}"#
        ))
    };
    let good = Config::parse(registration(&format!("\"{SECRET}\"")).as_bytes()).unwrap();
    for written in [format!("{good:?}"), format!("{good:#?}")] {
        assert!(!written.contains(SECRET) && written.contains("Token(…)"));
    }
    for token in [
        "1234567890",
        "[\"hunter2-1234567890\"]",
        "{\"x\":\"hunter2-1234567890\"}",
        "\"hunter2-1234567890 \"",
        "\"hunter2-1234567890\\n\"",
        "\"hunter2-1234567890",
        "\"hunter2-1234567890\",\"lease_ms\":1",
        "\"hunter2-1234567890\",\"lease_ms\":-1",
        "\"hunter2-1234567890\",\"surplus\":1",
    ] {
        let document = registration(token);
        let error = Config::parse(document.as_bytes()).unwrap_err();
        for written in [error.to_string(), format!("{error:?}")] {
            assert!(!written.contains("1234567890"), "{token}: {written}");
        }
    }
}
