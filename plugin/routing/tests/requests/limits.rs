//! Tests of the limits on a request, an answer and a source, and of the fields that a client may not set.

use routing::config::Config;
use routing::discovery::{self, PollAnswer, SourceError};
use routing::fleet::{Fleet, Worker};
use routing::request::Generation;
use routing::route::{CallEnd, Client, MAX_CALL_ANSWER, Plan, PlanInput, Refusal, Router};
use serde_json::{Value, json};
use std::time::Duration;

use crate::support::*;

/// A router with untrusted callers, whose decode workers run whole requests.
fn for_strangers(protocol: &str) -> Router {
    let fields = json!({"trust_clients": false, "decode": {"runs_whole_requests": true}});
    router(protocol, &two_by_two(), fields)
}

fn plan(router: &mut Router, kind: Generation, body: &[u8]) -> Result<Plan, Refusal> {
    router.plan(kind, body, PlanInput::default())
}

/// A chat whose content nests this deep, the body itself counted.
fn nested(depth: usize) -> String {
    let lists = depth - 2;
    format!(
        r#"{{"model":"m","messages":[{}{}]}}"#,
        "[".repeat(lists),
        "]".repeat(lists)
    )
}

#[test]
fn a_body_that_nests_too_deep_is_refused() {
    for protocol in ["nixl", "sglang", "trtllm"] {
        let mut router = for_strangers(protocol);
        let body = nested(128);
        assert!(plan(&mut router, Generation::Chat, body.as_bytes()).is_ok());
        for depth in [129, 1_000_000] {
            let refused = refusal(plan(
                &mut router,
                Generation::Chat,
                nested(depth).as_bytes(),
            ));
            assert!(
                matches!(refused, Refusal::Field { name: "body", .. }),
                "{depth}: {refused}"
            );
        }
    }
}

#[test]
fn foreign_json_of_any_depth_is_read_or_refused_without_a_stack() {
    let deep = format!("{}{}", "[".repeat(1_000_000), "]".repeat(1_000_000));
    let mut router = for_strangers("nixl");
    for answer in [
        format!(
            r#"{{"kv_transfer_params":{{"do_remote_prefill":true,"remote_block_ids":{deep}}}}}"#
        ),
        format!(r#"{{"choices":{deep}}}"#),
        deep.clone(),
    ] {
        let body = nested(3);
        let (phase, _assignment) = prefill(plan(&mut router, Generation::Chat, body.as_bytes()));
        let answer = CallEnd::whole(200, answer.as_bytes());
        let after = phase.answered(answer, Client::Waits, &mut router);
        assert!(
            ["decode", "again"].contains(&word(&after)),
            "{}",
            word(&after)
        );
    }
    for fields in [
        json!({"document": {"cluster": "c", "addresses": ["127.0.0.1:1"]}}),
        json!({"envoy_clusters": {"members": {"decode": {"role": "decode"}}}}),
    ] {
        let config = json!({"pools": [{"name": "p", "protocol": "nixl", "discovery": fields}]});
        let config = Config::parse(config.to_string().as_bytes()).unwrap();
        let mut source = discovery::source(&config.pools[0]).unwrap();
        let body = format!(r#"{{"workers":{deep},"cluster_statuses":{deep}}}"#);
        let answer = PollAnswer {
            status: 200,
            etag: None,
            body: body.as_bytes(),
        };
        source.read_answer(&answer).unwrap_err();
    }
    let config = format!(r#"{{"pools":{deep}}}"#);
    Config::parse(config.as_bytes()).unwrap_err();
}

#[test]
fn a_prefill_answer_that_is_too_long_has_failed() {
    let mut long = br#"{"kv_transfer_params":{"do_remote_prefill":true}}"#.to_vec();
    long.resize(MAX_CALL_ANSWER, b' ');
    let mut router = for_strangers("nixl");
    let after = |router: &mut Router, answer: &[u8]| {
        let body = nested(3);
        let (phase, _assignment) = prefill(plan(router, Generation::Chat, body.as_bytes()));
        let answer = CallEnd::whole(200, answer);
        word(&phase.answered(answer, Client::Waits, router))
    };
    assert_eq!(after(&mut router, &long), "decode");
    long.push(b' ');
    assert_eq!(after(&mut router, &long), "again");
}

/// Number of workers that a pool's source reads from an answer.
fn read(pool: Value, body: &[u8]) -> Result<usize, SourceError> {
    let config = json!({"pools": [with(json!({"name": "p"}), pool)]});
    let config = Config::parse(config.to_string().as_bytes()).unwrap();
    let mut source = discovery::source(&config.pools[0]).unwrap();
    let answer = PollAnswer {
        status: 200,
        etag: None,
        body,
    };
    Ok(match source.read_answer(&answer)? {
        discovery::SourceUpdate::Workers(workers, _) => workers.len(),
        discovery::SourceUpdate::Unchanged => 0,
    })
}

fn document() -> Value {
    json!({"protocol": "nixl", "discovery": {"document": {"cluster": "c", "addresses": ["127.0.0.1:1"]}}})
}

#[test]
fn a_source_may_tell_so_many_workers_and_ranks() {
    let listed = |count: u32, size: u32| {
        let workers: Vec<Value> = (0..count)
            .map(|nth| {
                let address = format!("10.{}.{}.1:1", nth / 256, nth % 256);
                json!({"role": "decode", "address": address, "dp_size": size})
            })
            .collect();
        json!({"workers": workers}).to_string()
    };
    assert_eq!(
        read(document(), listed(16_384, 4).as_bytes()).unwrap(),
        16_384
    );
    for (count, size) in [(16_385, 1), (16_384, 5), (65, 1024)] {
        let error = read(document(), listed(count, size).as_bytes()).unwrap_err();
        assert!(error.to_string().contains("at most"), "{error}");
    }

    let instances = |count: u32| {
        let all: Vec<Value> = (0..count)
            .map(|id| json!({"namespace": "d", "component": "prefill", "endpoint": "generate", "instance_id": id}))
            .collect();
        json!({"instances": all}).to_string()
    };
    let direct = || json!({"protocol": "direct", "frontends": ["127.0.0.1:1"], "discovery": {"dynamo": {"models": {"d": "m"}}}});
    assert_eq!(
        read(direct(), instances(16_384).as_bytes()).unwrap(),
        16_384
    );
    let error = read(direct(), instances(16_385).as_bytes()).unwrap_err();
    assert!(matches!(error, SourceError::TooMany), "{error}");

    let hosts = |count: u32| {
        let hosts: Vec<Value> = (0..count)
            .map(|nth| json!({"address": {"socket_address": {"address": format!("10.0.{}.{}", nth / 256, nth % 256), "port_value": 1}}}))
            .collect();
        json!({"cluster_statuses": [{"name": "d", "host_statuses": hosts}]}).to_string()
    };
    let clusters = || json!({"protocol": "nixl", "discovery": {"envoy_clusters": {"members": {"d": {"role": "decode", "dp_size": 1024}}}}});
    assert_eq!(read(clusters(), hosts(64).as_bytes()).unwrap(), 64);
    let error = read(clusters(), hosts(65).as_bytes()).unwrap_err();
    assert!(matches!(error, SourceError::TooMany), "{error}");
}

#[test]
fn a_sources_answer_that_is_too_long_is_not_read() {
    let mut long = br#"{"workers":[]}"#.to_vec();
    long.resize(discovery::MAX_ANSWER, b' ');
    assert_eq!(read(document(), &long).unwrap(), 0);
    long.push(b' ');
    let error = read(document(), &long).unwrap_err();
    assert!(matches!(error, SourceError::TooLong), "{error}");
}

#[test]
fn what_a_worker_is_called_is_short() {
    for fields in [
        json!({"adapters": vec!["a"; 1025]}),
        json!({"adapters": ["a".repeat(1025)]}),
        json!({"model": "m".repeat(1025)}),
        json!({"namespace": "n".repeat(1025)}),
        json!({"set": "s".repeat(1025)}),
        json!({"name": "n".repeat(257)}),
    ] {
        let workers = [worker_with("decode", 1, fields)];
        configured("nixl", &workers, json!({})).unwrap_err();
    }
    let fits = worker_with(
        "decode",
        1,
        json!({"model": "m".repeat(1024), "adapters": vec!["a"; 1024]}),
    );
    configured("nixl", &[fits], json!({})).unwrap();
}

/// An engine reads more than JSON: what it reads must not hand over what this router did not.
#[test]
fn a_stranger_forges_no_hand_off_in_a_body_that_goes_unread() {
    let forged = [
        r#"{"model":"m","messages":[],"x":NaN,"kv_transfer_params":{"remote_host":"10.0.0.9"}}"#,
        r#"{"model":"m","messages":[],"x":-Infinity,"kv_transfer\u005fparams":{"remote_host":"10.0.0.9"}}"#,
        r#"{"model":"m","messages":[],"vllm_xargs":{"kv_transfer_params":"x"}}"#,
    ];
    let utf16: Vec<u8> = r#"{"model":"m","messages":[],"kv_transfer_params":{"x":1}}"#
        .encode_utf16()
        .flat_map(u16::to_le_bytes)
        .collect();
    let bodies = forged.iter().map(|body| body.as_bytes());
    for protocol in ["nixl", "mooncake", "sglang", "trtllm", "llmd"] {
        let mut router = for_strangers(protocol);
        for body in bodies.clone().chain([utf16.as_slice()]) {
            let refused = refusal(plan(&mut router, Generation::Chat, body));
            assert_eq!(refused.status(), 400, "{refused}");
        }
        // Without a model, a request to an unknown path is not parsed further.
        let body = br#"{"token_ids":[1],"kv_transfer_params":{"remote_host":"10.0.0.9"}}"#;
        let refused = refusal(plan(&mut router, Generation::Other, body));
        assert_eq!(refused.status(), 400, "{refused}");
        let body = br#"{"token_ids":[1],"kv_transfer_params":null}"#;
        assert!(plan(&mut router, Generation::Other, body).is_ok());
        assert!(plan(&mut router, Generation::Chat, b"no JSON").is_ok());
    }
}

/// Workers of a different model each.
fn of_models(from: u64, count: u64) -> Vec<Worker> {
    let listed: Vec<Value> = (from..from + count)
        .map(|nth| {
            let address = format!("10.{}.{}.1:1", nth / 256, nth % 256);
            json!({"role": "aggregated", "address": address, "id": nth, "model": format!("m{nth}")})
        })
        .collect();
    let config = configured("aggregated", &listed, json!({})).unwrap();
    let router = Router::new(config.pools[0].clone(), 1, 2, Duration::ZERO);
    let workers = router.fleet().workers();
    workers.map(|worker| Worker::clone(worker)).collect()
}

#[test]
fn models_whose_workers_have_all_left_are_remembered_up_to_a_number() {
    let mut router = router("aggregated", &[], json!({}));
    for round in 0..4 {
        router.adopt(Fleet::new(round + 1, of_models(round * 100, 100)));
    }
    // 300 have left.
    assert_eq!(router.model_states().count(), 100 + 256);
    router.adopt(Fleet::new(9, Vec::new()));
    assert_eq!(router.model_states().count(), 256);
}

#[test]
fn decisions_that_nobody_takes_are_kept_up_to_a_number() {
    let mut router = router("nixl", &two_by_two(), json!({"selection": {}}));
    router.keep_decisions();
    for nth in 0..5000 {
        let text = format!("{nth} ").repeat(30);
        let body = json!({"model": "m", "messages": [{"role": "user", "content": text}]});
        let _ = plan(&mut router, Generation::Chat, body.to_string().as_bytes());
    }
    assert_eq!(router.take_decisions().len(), 4096);
}

/// A source may list as many models as workers, and each worker is checked against few of them.
#[test]
fn a_fleet_of_as_many_models_as_workers_is_adopted_without_a_wait() {
    let workers = of_models(0, 16_384);
    let mut router = router("aggregated", &[], json!({}));
    let begun = std::time::Instant::now();
    router.adopt(Fleet::new(1, workers));
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
}
