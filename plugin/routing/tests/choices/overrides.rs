//! Tests of a trusted caller's weight overrides for one request.

use routing::route::{Refusal, Router};
use serde_json::{Value, json};

use crate::support::*;

/// The second of two prefill workers has the prompt of that name cached, and has a little to do.
fn taught(fields: Value) -> (Router, impl Sized) {
    let mut router = router(&pairs(2, 1), fields, 1);
    let phase = wish(1, 4_000).prefilled_by(2).prefill(&mut router);
    drop(phase);
    let busy = wish(2, 1_000)
        .prefilled_by(2)
        .at(5_000)
        .prefill(&mut router);
    (router, busy)
}

fn again() -> Wish {
    wish(1, 4_000).at(5_000)
}

#[test]
fn a_trusted_caller_is_heard() {
    let (mut router, _busy) = taught(json!({}));
    assert_eq!(again().prefillers(&mut router, 100, 2), [0, 100]);
    for (weights, expected) in [
        (json!({}), 100),
        (Value::Null, 100),
        (json!({"overlap_score_credit": null}), 100),
        (json!({"overlap_score_credit": 0.0}), 0),
        (json!({"overlap_score_credit": 0}), 0),
        (json!({"overlap_score_credit": 0.2}), 0),
        (json!({"prefill_load_scale": 3.0}), 100),
        (json!({"overlap_score_weight": 2.0}), 100),
        (json!({"track_prefill_tokens": true}), 100),
    ] {
        let picked = again()
            .overriding(weights.clone())
            .prefillers(&mut router, 100, 2);
        assert_eq!(picked[1], expected, "{weights}");
    }
    for weights in [
        json!({"prefill_load_scale": 0}),
        json!({"overlap_score_weight": 0}),
        json!({"track_prefill_tokens": false}),
        json!({"router_temperature": 1e6}),
    ] {
        let picked = again()
            .overriding(weights.clone())
            .prefillers(&mut router, 400, 2);
        assert!((150..250).contains(&picked[1]), "{weights}: {picked:?}");
    }
    // The overrides applied to those requests only.
    assert_eq!(again().prefillers(&mut router, 100, 2), [0, 100]);
}

#[test]
fn it_wins_over_the_configuration() {
    let fields = json!({"selection": {"kv": {"overlap_score_credit": 0.0}}});
    let (mut router, _busy) = taught(fields);
    assert_eq!(again().prefiller(&mut router), 1);
    let overridden = again().overriding(json!({"overlap_score_credit": 1.0}));
    assert_eq!(overridden.prefiller(&mut router), 2);
}

#[test]
fn dynamos_whole_object_is_understood() {
    let (mut router, _busy) = taught(json!({}));
    let weights = json!({"overlap_score_credit": 0.0, "prefill_load_scale": 1.0, "router_temperature": 0.0,
        "assume_kv_reuse": true, "track_prefill_tokens": true, "shared_cache_multiplier": 0.5});
    assert_eq!(again().overriding(weights).prefiller(&mut router), 1);
}

#[test]
fn an_untrusted_caller_is_not_heard() {
    for weights in [
        json!({"overlap_score_credit": 0.0}),
        json!({"prefill_load_scale": 0.0}),
        json!({"router_temperature": 1e6}),
        json!({"overlap_score_credit": -1}),
        json!({"nonsense": 1}),
        json!("nonsense"),
    ] {
        let mut router = router(&pairs(2, 1), json!({"trust_clients": false}), 1);
        let (phase, assignment) = wish(1, 4_000).prefill(&mut router);
        let first = phase.worker().id;
        drop((phase, assignment));
        for _ in 0..50 {
            let (phase, _assignment) = wish(1, 4_000)
                .overriding(weights.clone())
                .prefill(&mut router);
            assert_eq!(phase.worker().id, first, "{weights}");
        }
    }
}

/// The refusal of such an override.
fn refusal_of(weights: &str) -> Refusal {
    let mut router = router(&pairs(2, 1), json!({}), 1);
    let body = format!(
        r#"{{"model":"m","prompt":[1,2,3],"nvext":{{"router_config_override":{weights}}}}}"#
    );
    let input = routing::route::PlanInput::default();
    let plan = router.plan(
        routing::request::Generation::Completions,
        body.as_bytes(),
        input,
    );
    assert!(router.total_load().is_idle());
    match plan {
        Ok(_) => panic!("{weights} was taken"),
        Err(refusal) => refusal,
    }
}

#[test]
fn numbers_that_cannot_be_meant_are_refused_by_name() {
    for weights in [
        r#"{"overlap_score_credit":-1}"#,
        r#"{"prefill_load_scale":-0.001}"#,
        r#"{"router_temperature":-1e300}"#,
        r#"{"overlap_score_weight":-1}"#,
    ] {
        let refused = refusal_of(weights);
        assert_eq!((refused.status(), refused.code()), (400, "invalid_field"));
        assert!(
            refused.to_string().contains("router_config_override"),
            "{refused}"
        );
    }
}

#[test]
fn what_cannot_be_read_is_refused_by_name_too() {
    for weights in [
        r#"{"router_temperature":1e999}"#,
        r#"{"router_temperature":"NaN"}"#,
        r#"{"router_temperature":true}"#,
        r#"{"track_prefill_tokens":1}"#,
        r#"{"unknown":1}"#,
        r#""text""#,
        "7",
    ] {
        let refused = refusal_of(weights);
        assert_eq!(
            (refused.status(), refused.code()),
            (400, "invalid_field"),
            "{weights}"
        );
        assert!(
            refused.to_string().contains("router_config_override"),
            "{weights}: {refused}"
        );
    }
}

#[test]
fn no_number_is_no_json() {
    for weights in [
        r#"{"router_temperature":NaN}"#,
        r#"{"router_temperature":Infinity}"#,
    ] {
        assert_eq!(refusal_of(weights).status(), 400);
    }
}

#[test]
fn a_configuration_that_cannot_be_meant_is_refused_by_name() {
    for name in [
        "overlap_score_credit",
        "overlap_score_credit_decay",
        "prefill_load_scale",
        "decode_active_request_weight",
        "router_temperature",
    ] {
        let pool = json!({"name": "p", "protocol": "nixl", "selection": {"kv": {name: -1.0}},
            "discovery": {"static": {"workers": pairs(1, 1)}}});
        let document = json!({"pools": [pool]}).to_string();
        match routing::config::Config::parse(document.as_bytes()) {
            Ok(_) => panic!("{name} may be negative"),
            Err(error) => assert!(error.to_string().contains(name), "{error}"),
        }
    }
}
