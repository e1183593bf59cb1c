//! One violation of every rule: each error begins with the path of what is wrong, and says what would be right.

use super::*;

/// What is wrong, and where that is said to be.
type Violation = (&'static str, &'static str);

/// Fields of a pool with the protocol `nixl`, whose decode workers run requests whole.
const OF_A_POOL: &[Violation] = &[
    (r#""block_tokens":0"#, "block_tokens"),
    (r#""prefill":{"attempts":0}"#, "prefill.attempts"),
    (r#""prefill":{"timeout_ms":0}"#, "prefill.timeout_ms"),
    (
        r#""prefill":{"base_timeout_ms":0}"#,
        "prefill.base_timeout_ms",
    ),
    (
        r#""prefill":{"hedge_after_ms":0}"#,
        "prefill.hedge_after_ms",
    ),
    (r#""bootstrap":{"port":0}"#, "bootstrap.port"),
    (r#""bootstrap":"ask""#, "bootstrap"),
    (r#""cleanup":{"timeout_ms":0}"#, "cleanup.timeout_ms"),
    (r#""cleanup":{"timeout_ms":120001}"#, "cleanup.timeout_ms"),
    (r#""health":{"eject_ms":0}"#, "health.eject_ms"),
    (r#""health":{"most_eject_ms":1}"#, "health.most_eject_ms"),
    (
        r#""selection":{"kv":{"overlap_score_credit":-1}}"#,
        "selection.kv.overlap_score_credit",
    ),
    (
        r#""selection":{"kv":{"overlap_score_credit_decay":-1}}"#,
        "selection.kv.overlap_score_credit_decay",
    ),
    (
        r#""selection":{"kv":{"prefill_load_scale":-1}}"#,
        "selection.kv.prefill_load_scale",
    ),
    (
        r#""selection":{"kv":{"decode_active_request_weight":-1}}"#,
        "selection.kv.decode_active_request_weight",
    ),
    (
        r#""selection":{"kv":{"router_temperature":-0.5}}"#,
        "selection.kv.router_temperature",
    ),
    (
        r#""selection":{"session":{"headers":[]}}"#,
        "selection.session.headers",
    ),
    (
        r#""prefixes":{"max_blocks":16777217}"#,
        "prefixes.max_blocks",
    ),
    (r#""booking_expiry_ms":0"#, "booking_expiry_ms"),
    (r#""max_model_len":0"#, "max_model_len"),
    (
        r#""admission":{"prefill":{"fraction":-1}}"#,
        "admission.prefill.fraction",
    ),
    (
        r#""admission":{"decode":{"fraction":1.1}}"#,
        "admission.decode.fraction",
    ),
    (r#""admission":{"queue":{}}"#, "admission.queue"),
    (
        r#""admission":{"prefill":{"tokens":1},"queue":{"max_requests":0}}"#,
        "admission.queue.max_requests",
    ),
    (
        r#""admission":{"prefill":{"tokens":1},"queue":{"deadline_ms":0}}"#,
        "admission.queue.deadline_ms",
    ),
    (r#""conditional":{},"enforce_disagg":true"#, "conditional"),
    (
        r#""conditional":{"uncached_share":2}"#,
        "conditional.uncached_share",
    ),
    (
        r#""conditional":{"decode_busy_fraction":2}"#,
        "conditional.decode_busy_fraction",
    ),
    (
        r#""conditional":{"prefill_busy_fraction":-1}"#,
        "conditional.prefill_busy_fraction",
    ),
    (r#""conditional":{"policy":"isl_or_load"}"#, "conditional"),
    (
        r#""on_prefill_failure":["decode_only"],"enforce_disagg":true"#,
        "on_prefill_failure",
    ),
    (r#""frontends":["10.0.0.1:1"]"#, "frontends"),
    (r#""on_empty":"pass""#, "on_empty"),
    (r#""paths":[]"#, "paths"),
    (r#""paths":["generate"]"#, "paths[0]"),
    (r#""responses":"split""#, "responses"),
    (
        r#""model_rewrites":[{"model":"","targets":[{"model":"m"}]}]"#,
        "model_rewrites[0].model",
    ),
    (
        r#""model_rewrites":[{"targets":[]}]"#,
        "model_rewrites[0].targets",
    ),
    (
        r#""model_rewrites":[{"targets":[{"model":"m"},{"model":""}]}]"#,
        "model_rewrites[0].targets[1].model",
    ),
    (
        r#""model_rewrites":[{"targets":[{"model":"m","weight":0}]}]"#,
        "model_rewrites[0].targets[0].weight",
    ),
    (
        r#""destinations":{"original_dst":{"networks":[]}}"#,
        "destinations.original_dst.networks",
    ),
    (
        r#""engine_metrics":{"path":"metrics"}"#,
        "engine_metrics.path",
    ),
    (
        r#""engine_metrics":{"interval_ms":99}"#,
        "engine_metrics.interval_ms",
    ),
    (
        r#""engine_metrics":{"timeout_ms":0}"#,
        "engine_metrics.timeout_ms",
    ),
    (
        r#""engine_metrics":{"stale_after_ms":1}"#,
        "engine_metrics.stale_after_ms",
    ),
    (
        r#""engine_metrics":{"most_per_second":0}"#,
        "engine_metrics.most_per_second",
    ),
];

/// A source of workers, in a pool with the protocol `nixl`.
const OF_A_SOURCE: &[Violation] = &[
    (
        r#"{"static":{"workers":[{"role":"decode"}]}}"#,
        "static.workers[0].address",
    ),
    (
        r#"{"static":{"workers":[{"address":"10.0.0.1:0","role":"decode"}]}}"#,
        "static.workers[0].address",
    ),
    (
        r#"{"static":{"workers":[{"address":"10.0.0.1:1","role":"prefill","bootstrap_port":0}]}}"#,
        "static.workers[0].bootstrap_port",
    ),
    (
        r#"{"static":{"workers":[{"address":"10.0.0.1:1","role":"decode","dp_size":1025}]}}"#,
        "static.workers[0].dp_size",
    ),
    (
        r#"{"static":{"workers":[{"address":"10.0.0.1:1","role":"decode","name":""}]}}"#,
        "static.workers[0].name",
    ),
    (
        r#"{"static":{"workers":[{"address":"10.0.0.1:1","role":"decode"},{"address":"10.0.0.1:1","role":"prefill"}]}}"#,
        "static.workers[1]",
    ),
    (r#"{"dynamo":{"models":{"dynamo":"m"}}}"#, "dynamo"),
    (
        r#"{"document":{"cluster":"c","addresses":[]}}"#,
        "document.addresses",
    ),
    (
        r#"{"document":{"cluster":"c","addresses":["10.0.0.1:80"],"path":"w"}}"#,
        "document.path",
    ),
    (
        r#"{"document":{"cluster":"c","addresses":["10.0.0.1:80"],"interval_ms":99}}"#,
        "document.interval_ms",
    ),
    (
        r#"{"document":{"cluster":"c","addresses":["10.0.0.1:80"],"timeout_ms":0}}"#,
        "document.timeout_ms",
    ),
    (
        r#"{"document":{"cluster":"c","addresses":["10.0.0.1:80"],"keep_stale_ms":1}}"#,
        "document.keep_stale_ms",
    ),
    (
        r#"{"envoy_clusters":{"members":{}}}"#,
        "envoy_clusters.members",
    ),
    (
        r#"{"envoy_clusters":{"cluster":"","members":{"a":{"role":"decode"}}}}"#,
        "envoy_clusters.cluster",
    ),
    (
        r#"{"envoy_clusters":{"path":"clusters","members":{"a":{"role":"decode"}}}}"#,
        "envoy_clusters.path",
    ),
    (
        r#"{"envoy_clusters":{"members":{"a":{"role":"decode","dp_size":0}}}}"#,
        "envoy_clusters.members.a.dp_size",
    ),
    (
        r#"{"envoy_clusters":{"members":{"a":{"role":"decode","bootstrap_port":0}}}}"#,
        "envoy_clusters.members.a.bootstrap_port",
    ),
    (r#"{"registration":{"token":"a b"}}"#, "registration.token"),
    (
        r#"{"registration":{"token":"a","lease_ms":999}}"#,
        "registration.lease_ms",
    ),
    (
        r#"{"registration":{"token":"a","max_workers":16385}}"#,
        "registration.max_workers",
    ),
];

/// Whole pools, where the rule is about what belongs together.
const OF_A_WHOLE_POOL: &[Violation] = &[
    (
        r#""protocol":"nixl","discovery":{"static":{"workers":[]}},"decode":{"attempts":0}"#,
        "decode.attempts",
    ),
    (
        r#""protocol":"nixl","discovery":{"static":{"workers":[]}},"conditional":{}"#,
        "conditional",
    ),
    (
        r#""protocol":"nixl","discovery":{"static":{"workers":[]}},"on_prefill_failure":["decode_only"]"#,
        "on_prefill_failure",
    ),
    (
        r#""protocol":"sglang","discovery":{"static":{"workers":[]}},"on_prefill_failure":["decode_only"]"#,
        "on_prefill_failure",
    ),
    (
        r#""protocol":"direct","discovery":{"static":{"workers":[]}}"#,
        "frontends",
    ),
    (
        r#""protocol":"direct","frontends":["10.0.0.1:1"],"discovery":{"static":{"workers":[{"role":"decode"}]}}"#,
        "discovery.static.workers[0].id",
    ),
    (
        r#""protocol":"direct","frontends":["10.0.0.1:1"],"discovery":{"dynamo":{"models":{}}}"#,
        "discovery.dynamo.models",
    ),
    (
        r#""protocol":"direct","frontends":["10.0.0.1:1"],"discovery":{"envoy_clusters":{"members":{"a":{"role":"decode"}}}}"#,
        "discovery.envoy_clusters",
    ),
    (
        r#""protocol":"direct","frontends":["10.0.0.1:1"],"discovery":{"static":{"workers":[]}},"engine_metrics":{}"#,
        "engine_metrics",
    ),
    (
        r#""protocol":"direct","frontends":["10.0.0.1:1"],"discovery":{"static":{"workers":[]}},"destinations":{"original_dst":{"networks":["::/0"]}}"#,
        "destinations",
    ),
    (
        r#""protocol":"aggregated","discovery":{"static":{"workers":[{"address":"10.0.0.1:1","role":"decode"}]}}"#,
        "discovery.static.workers[0].role",
    ),
    (
        r#""protocol":"aggregated","discovery":{"envoy_clusters":{"members":{"a":{"role":"decode"}}}}"#,
        "discovery.envoy_clusters.members.a.role",
    ),
    (
        r#""protocol":"nixl","destinations":{"original_dst":{"networks":["10.0.0.0/8"]}},"discovery":{"static":{"workers":[{"address":"11.0.0.1:1","role":"decode"}]}}"#,
        "discovery.static.workers[0].address",
    ),
];

/// What is too long to be written down here.
#[test]
fn of_what_is_large() {
    let worker = |fields: &str| {
        pool(&format!(
            r#""protocol":"nixl","discovery":{{"static":{{"workers":[{{"address":"10.0.0.1:1","role":"decode",{fields}}}]}}}}"#
        ))
    };
    let long = "x".repeat(1_025);
    let many = vec!["\"a\""; 1_025].join(",");
    let workers = |count: usize, fields: &str| {
        let one = |index| format!(r#"{{"id":{index},"role":"decode"{fields}}}"#);
        let workers: Vec<_> = (0..count).map(one).collect();
        pool(&format!(
            r#""protocol":"direct","frontends":["10.0.0.1:1"],"discovery":{{"static":{{"workers":[{}]}}}}"#,
            workers.join(",")
        ))
    };
    let at = "pools[0].discovery.static.workers";
    for (document, path) in [
        (worker(&format!(r#""model":"{long}""#)), "[0].model"),
        (worker(&format!(r#""namespace":"{long}""#)), "[0].namespace"),
        (worker(&format!(r#""set":"{long}""#)), "[0].set"),
        (
            worker(&format!(r#""adapters":["a","{long}"]"#)),
            "[0].adapters[1]",
        ),
        (worker(&format!(r#""adapters":[{many}]"#)), "[0].adapters"),
        (workers(16_385, ""), ""),
        (workers(65, r#","dp_size":1024"#), ""),
    ] {
        is_said(&document, &format!("{at}{path}"));
    }
}

fn is_said(document: &str, path: &str) {
    let said = error(document);
    let problem = said.strip_prefix(&format!("{path}: "));
    // A path alone helps nobody.
    assert!(
        problem.is_some_and(|problem| problem.len() > 10),
        "{document}\n  is refused with: {said}\n  and not at: {path}"
    );
}

#[test]
fn of_a_pool() {
    for (fields, path) in OF_A_POOL {
        let fields = format!(
            r#""protocol":"nixl","discovery":{{"static":{{"workers":[]}}}},"decode":{{"runs_whole_requests":true}},{fields}"#
        );
        is_said(&pool(&fields), &format!("pools[0].{path}"));
    }
    for (fields, path) in OF_A_WHOLE_POOL {
        is_said(&pool(fields), &format!("pools[0].{path}"));
    }
}

#[test]
fn of_a_source() {
    for (source, path) in OF_A_SOURCE {
        let fields = format!(r#""protocol":"nixl","discovery":{source}"#);
        is_said(&pool(&fields), &format!("pools[0].discovery.{path}"));
    }
}

#[test]
fn of_the_document() {
    let sound = r#"{"name":"p","protocol":"nixl","discovery":{"static":{"workers":[]}}}"#;
    let nameless = sound.replace("\"p\"", "\"\"");
    for (document, path) in [
        (r#"{"pools":[]}"#.to_owned(), "pools"),
        (
            format!(r#"{{"pools":[{sound}],"limits":{{"body_bytes":0}}}}"#),
            "limits.body_bytes",
        ),
        (
            format!(r#"{{"pools":[{sound}],"limits":{{"body_timeout_ms":0}}}}"#),
            "limits.body_timeout_ms",
        ),
        (
            format!(r#"{{"pools":[{sound}],"limits":{{"bodies_in_flight_bytes":0}}}}"#),
            "limits.bodies_in_flight_bytes",
        ),
        (
            format!(r#"{{"pools":[{sound}],"sharing":{{"interval_ms":101}}}}"#),
            "sharing.interval_ms",
        ),
        (format!(r#"{{"pools":[{nameless}]}}"#), "pools[0].name"),
        (format!(r#"{{"pools":[{sound},{sound}]}}"#), "pools[1].name"),
    ] {
        is_said(&document, path);
    }
}

/// What is absent, unknown or no address has a path of its own too.
#[test]
fn of_the_form() {
    let sound = r#""protocol":"nixl","discovery":{"static":{"workers":[]}}"#;
    for (document, path, right) in [
        ("{}".to_owned(), "pools", "missing"),
        (r#"{"pools":[{}]}"#.to_owned(), "pools[0].name", "missing"),
        (
            pool(&format!(r#"{sound},"polcy":1"#)),
            "pools[0].polcy",
            "expected one of",
        ),
        (
            pool(&format!(r#"{sound},"prefill":{{"attempt":1}}"#)),
            "pools[0].prefill.attempt",
            "`attempts`",
        ),
        (
            pool(
                r#""protocol":"nixl","discovery":{"static":{"workers":[{"address":"worker:80"}]}}"#,
            ),
            "pools[0].discovery.static.workers[0].address",
            "10.0.0.1:8000",
        ),
        (
            pool(r#""protocol":"nixl","discovery":{"consul":{}}"#),
            "pools[0].discovery",
            "`registration`",
        ),
        ("{\"pools\":[]".to_owned(), ".", "line 1"),
        (format!("{} x", pool(sound)), ".", "trailing"),
    ] {
        is_said(&document, path);
        let said = error(&document);
        assert!(said.contains(right), "{document}: {said}");
    }
}
