//! Tests of pins: where a caller may send its request, and the refusal where that is impossible.

use routing::fleet::WorkerId;
use routing::rendezvous::NotServed;
use routing::request::Generation;
use routing::route::{AfterPrefill, Client, PinProblem, Plan, PlanInput, Refusal};
use serde_json::{Value, json};

use crate::support::*;

/// Two ranks each; besides, another namespace and another model.
fn fleet() -> Vec<Value> {
    let ranks = json!({"dp_size": 2});
    vec![
        worker_with("prefill", 1, ranks.clone()),
        worker_with("decode", 11, ranks.clone()),
        worker_with("prefill", 3, json!({"namespace": "other"})),
        worker_with("decode", 13, json!({"namespace": "other"})),
        worker_with("decode", 15, json!({"model": "another"})),
        worker_with("prefill", 16, json!({"model": "another"})),
    ]
}

#[test]
fn a_pin_that_cannot_be_is_refused_and_says_which() {
    let role = |is| PinProblem::WrongRole { is };
    let rank = |rank| PinProblem::RankOutOfRange { rank, dp_size: 2 };
    use routing::fleet::Role::{Decode, Prefill};
    for (nvext, field, id, problem) in [
        (
            json!({"prefill_worker_id": 11}),
            "prefill_worker_id",
            11,
            role(Decode),
        ),
        (
            json!({"decode_worker_id": 1}),
            "decode_worker_id",
            1,
            role(Prefill),
        ),
        (
            json!({"prefill_worker_id": 1, "backend_instance_id": 1}),
            "backend_instance_id",
            1,
            role(Prefill),
        ),
        (
            json!({"prefill_worker_id": 1, "prefill_dp_rank": 2}),
            "prefill_worker_id",
            1,
            rank(2),
        ),
        (
            json!({"decode_worker_id": 11, "dp_rank": 2, "prefill_dp_rank": 0}),
            "decode_worker_id",
            11,
            rank(2),
        ),
        (
            json!({"prefill_worker_id": 1, "decode_worker_id": 13}),
            "decode_worker_id",
            13,
            PinProblem::Elsewhere,
        ),
        (
            json!({"prefill_worker_id": 3, "decode_worker_id": 11}),
            "decode_worker_id",
            11,
            PinProblem::Elsewhere,
        ),
        (
            json!({"decode_worker_id": 15}),
            "decode_worker_id",
            15,
            PinProblem::Elsewhere,
        ),
        (
            json!({"prefill_worker_id": 16}),
            "prefill_worker_id",
            16,
            PinProblem::Elsewhere,
        ),
    ] {
        for protocol in ["nixl", "sglang", "direct"] {
            let mut router = router(protocol, &fleet(), json!({}));
            let refused = refusal(ask(&mut router, nvext.clone()));
            let id = WorkerId(id);
            assert_eq!(refused, Refusal::Pin { field, id, problem }, "{nvext}");
            assert_eq!((refused.status(), refused.retry_after_s()), (400, None));
            assert!(
                refused.to_string().contains(&format!("{field}={id}")),
                "{refused}"
            );
            let json: Value = serde_json::from_str(&refused.to_json()).unwrap();
            assert_eq!(json["error"]["param"], field);
            assert!(router.total_load().is_idle());
            // A query gets the same answer.
            let query = with(
                nvext.clone(),
                json!({"annotations": ["query_instance_id:"]}),
            );
            assert_eq!(refusal(ask(&mut router, query)), refused);
        }
    }
    let mut router = router("nixl", &fleet(), json!({}));
    let refused = refusal(ask(&mut router, json!({"dp_rank": 2})));
    assert_eq!(
        (refused.status(), refused.code()),
        (400, "dp_rank_out_of_range")
    );
}

#[test]
fn ids_are_64_bits_and_pinned_requests_are_booked_like_others() {
    let max = u64::MAX;
    let workers = [
        worker("prefill", max),
        worker("prefill", 1),
        worker("decode", max - 1),
        worker("decode", 2),
    ];
    let mut router = router("nixl", &workers, json!({}));
    let named = json!({"prefill_worker_id": max, "decode_worker_id": max - 1});
    assert_eq!(query(&mut router, named.clone()), (max, max - 1));
    let (phase, assignment) = prefill(ask(&mut router, named));
    assert_eq!(
        router
            .worker_load(router.fleet().get(WorkerId(max)).unwrap())
            .prefills,
        1
    );
    assert_eq!(
        router
            .worker_load(router.fleet().get(WorkerId(max - 1)).unwrap())
            .decodes,
        1
    );
    // A named worker is meant alone: there is no alternative destination.
    let AfterPrefill::Decode { dispatch, .. } = phase.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    assert_eq!(dispatch.destinations.len(), 1);
    drop(assignment);
    assert!(router.total_load().is_idle());
    // No other worker is tried either.
    let (phase, _assignment) = prefill(ask(&mut router, json!({"prefill_worker_id": 1})));
    let after = phase.answered(status(503), Client::Waits, &mut router);
    assert_eq!(word(&after), "refused");
}

#[test]
fn headers_win_over_nvext_and_the_new_spelling_over_the_old() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let nvext = json!({"prefill_worker_id": 1, "decode_worker_id": 11});
    for (prefill, decode) in [
        ("x-prefill-instance-id", "x-worker-instance-id"),
        (
            "X-Dynamo-Prefill-Instance-Id",
            "X-Dynamo-Worker-Instance-Id",
        ),
    ] {
        let headers = [(prefill, "2".to_owned()), (decode, "12".to_owned())];
        assert_eq!(
            pair(ask_with(&mut router, &headers, nvext.clone())),
            (2, 12)
        );
        assert_eq!(
            pair(ask_with(&mut router, &headers[..1], nvext.clone())),
            (2, 11)
        );
        let old = [
            ("x-prefill-instance-id", "1".to_owned()),
            ("x-worker-instance-id", "11".to_owned()),
        ];
        let new = [
            ("x-dynamo-prefill-instance-id", "2".to_owned()),
            ("x-dynamo-worker-instance-id", "12".to_owned()),
        ];
        let both: Vec<_> = old.into_iter().chain(new).collect();
        assert_eq!(pair(ask_with(&mut router, &both, json!({}))), (2, 12));
    }
    // An unreadable header counts as absent.
    let bad = [("x-prefill-instance-id", "18446744073709551616".to_owned())];
    assert_eq!(pair(ask_with(&mut router, &bad, nvext)), (1, 11));
}

#[test]
fn ranks_of_prefill_and_decode_are_kept_apart() {
    let mut router = router("nixl", &fleet(), json!({}));
    let nvext =
        json!({"prefill_worker_id": 1, "prefill_dp_rank": 1, "decode_worker_id": 11, "dp_rank": 0});
    let (phase, _assignment) = prefill(ask(&mut router, nvext));
    assert_eq!(phase.headers(), [("x-data-parallel-rank", "1".to_owned())]);
    let AfterPrefill::Decode {
        dispatch, target, ..
    } = phase.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    assert_eq!(dispatch.headers, [("x-data-parallel-rank", "0".to_owned())]);
    assert_eq!(target.1.rank, 0);
}

#[test]
fn of_a_named_workers_ranks_the_least_busy_one_is_taken() {
    let mut router = router("nixl", &fleet(), json!({}));
    let named = json!({"prefill_worker_id": 1, "decode_worker_id": 11});
    let (_first, _first_assignment) = prefill(ask(&mut router, named.clone()));
    let (second, _second_assignment) = prefill(ask(&mut router, named));
    assert_eq!(second.headers(), [("x-data-parallel-rank", "1".to_owned())]);
    let AfterPrefill::Decode { dispatch, .. } = second.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    assert_eq!(dispatch.headers, [("x-data-parallel-rank", "1".to_owned())]);
}

#[test]
fn who_is_named_but_not_bound_yet_is_waited_for() {
    let mut router = router("sglang", &two_by_two(), json!({"bootstrap": "ask"}));
    let info = br#"{"disaggregation_bootstrap_port":9000}"#;
    let first = router.fleet().get(WorkerId(1)).unwrap().incarnation();
    assert!(router.on_reply(&first, info));
    assert_eq!(pair(ask(&mut router, json!({"prefill_worker_id": 1}))).0, 1);
    let refused = refusal(ask(&mut router, json!({"prefill_worker_id": 2})));
    assert_eq!(refused, Refusal::NotServed(NotServed::Pending));
    assert_eq!(refused.status(), 503);
    // A named worker need not be bound for a query; without a name the bound one is picked.
    assert_eq!(query(&mut router, json!({"prefill_worker_id": 2})).0, 2);
    assert!((0..10).all(|_| who(&mut router).0 == 1));
}

#[test]
fn an_untrusted_caller_is_not_heard() {
    let overrides = json!({"prefill_worker_id": 99, "decode_worker_id": 11, "dp_rank": 7,
        "annotations": ["query_instance_id:"], "routing_constraints": {"required_taints": ["none"]}});
    let headers = [("x-prefill-instance-id", "98".to_owned())];
    let mut router = router("nixl", &two_by_two(), json!({"trust_clients": false}));
    for nvext in [
        overrides,
        json!("not even an object"),
        json!({"decode_worker_id": -1}),
    ] {
        let mut seen = std::collections::HashSet::new();
        for _ in 0..4 {
            seen.insert(pair(ask_with(&mut router, &headers, nvext.clone())).1);
        }
        assert_eq!(seen.len(), 2);
    }
}

#[test]
fn in_direct_mode_an_untrusted_query_is_not_passed_on() {
    let nvext = json!({"annotations": ["query_instance_id:", "other"], "kept": 1, "allowed_worker_ids": [1, 11, 21]});
    let whole = [worker("aggregated", 21)];
    for workers in [&two_by_two()[..], &whole[..]] {
        let mut untrusting = router("direct", workers, json!({"trust_clients": false}));
        let (dispatch, _) = forward(ask(&mut untrusting, nvext.clone()));
        assert_eq!(leg(&dispatch, &body(&nvext))["nvext"], json!({"kept": 1}));
        let (dispatch, _) = forward(ask(&mut untrusting, json!({"kept": 1})));
        assert!(dispatch.edits.is_none());
        let mut trusting = router("direct", workers, json!({}));
        assert!(matches!(
            ask(&mut trusting, nvext.clone()),
            Ok(Plan::Answer(_))
        ));
    }
}

#[test]
fn direct_selection_asks_for_the_header_that_is_missing() {
    for protocol in ["nixl", "sglang", "direct"] {
        let fields = json!({"selection": {"prefill": "direct", "decode": "direct"}});
        let mut router = router(protocol, &two_by_two(), fields);
        let refused = refusal(ask(&mut router, json!({})));
        assert_eq!(
            (refused.status(), refused.code()),
            (400, "worker_id_required")
        );
        assert!(
            refused.to_string().contains("x-dynamo-prefill-instance-id"),
            "{refused}"
        );
        let refused = refusal(ask(&mut router, json!({"prefill_worker_id": 1})));
        assert!(
            refused.to_string().contains("x-dynamo-worker-instance-id"),
            "{refused}"
        );
        assert!(router.total_load().is_idle());
        let named = json!({"prefill_worker_id": 1, "decode_worker_id": 12});
        assert_eq!(query(&mut router, named.clone()), (1, 12));
        assert!(ask(&mut router, named).is_ok());
    }
    let mut whole = router(
        "nixl",
        &[worker("aggregated", 21)],
        json!({"selection": {"decode": "direct"}}),
    );
    let refused = refusal(ask(&mut whole, json!({})));
    assert!(
        refused.to_string().contains("x-dynamo-worker-instance-id"),
        "{refused}"
    );
    forward(ask(&mut whole, json!({"backend_instance_id": 21})));
}

#[test]
fn a_query_is_answered_in_the_form_that_was_asked_for() {
    let mut router = router("nixl", &fleet(), json!({}));
    let input = PlanInput {
        headers: &[],
        now: std::time::Duration::from_secs(5),
        ..PlanInput::default()
    };
    let mut answer = |body: Value| {
        let generation = match body.get("prompt") {
            Some(_) => Generation::Completions,
            None => Generation::Chat,
        };
        match router.plan(generation, body.to_string().as_bytes(), input) {
            Ok(Plan::Answer(answer)) => answer,
            _ => panic!("not answered here"),
        }
    };
    let nvext = json!({"annotations": ["query_instance_id:"], "prefill_worker_id": 1, "prefill_dp_rank": 1,
        "decode_worker_id": 11, "dp_rank": 0});
    let workers = json!({"prefill_worker_id": 1, "prefill_dp_rank": 1, "decode_worker_id": 11, "decode_dp_rank": 0});

    let chat = answer(json!({"model": "m", "messages": [], "nvext": nvext}));
    assert_eq!(chat.content_type, "application/json");
    let json: Value = serde_json::from_str(&chat.body).unwrap();
    assert_eq!(
        (&json["nvext"]["worker_id"], &json["nvext"]["block_count"]),
        (&workers, &json!(1))
    );

    let ids = answer(json!({"model": "m", "prompt": [7, 8, 9], "nvext": nvext}));
    let json: Value = serde_json::from_str(&ids.body).unwrap();
    assert_eq!(json["nvext"]["token_ids"], json!([7, 8, 9]));

    let stream = answer(json!({"model": "m", "messages": [], "stream": true, "nvext": nvext}));
    assert_eq!(stream.content_type, "text/event-stream");
    let events: Vec<&str> = stream.body.split_terminator("\n\n").collect();
    assert_eq!((events.len(), events[1]), (2, "data: [DONE]"));
    let json: Value = serde_json::from_str(events[0].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(json["nvext"]["worker_id"], workers);
}

/// A named worker has no alternative: after a first reset, which may be a connection that the worker had closed, it is
/// asked again.
#[test]
fn found_w3_a_named_prefill_worker_is_asked_again_after_a_first_reset() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (phase, _assignment) = prefill(ask(&mut router, json!({"prefill_worker_id": 1})));
    let after = phase.answered(whole_of(503, RESET), Client::Waits, &mut router);
    let AfterPrefill::Again(phase) = after else {
        panic!("{}", word(&after));
    };
    assert_eq!(phase.worker().id, WorkerId(1));
    let after = phase.answered(GOOD, Client::Waits, &mut router);
    assert_eq!(word(&after), "decode");

    // The worker's own failures are passed on at once.
    for answer in [UNREACHED, status(500)] {
        let (phase, _assignment) = prefill(ask(&mut router, json!({"prefill_worker_id": 2})));
        let after = phase.answered(answer, Client::Waits, &mut router);
        assert_eq!(word(&after), "refused", "{answer}");
    }
}
