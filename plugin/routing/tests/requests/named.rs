//! Tests of worker names in requests, and of stale names: outer pickers are always a moment behind.

use std::collections::HashSet;

use routing::fleet::{Role, WorkerId};
use routing::route::{AfterPrefill, Client, PinProblem, Plan, Refusal, Router};
use serde_json::{Value, json};

use crate::support::*;

fn pairs(router: &mut Router, nvext: &Value, tries: usize) -> HashSet<(u64, u64)> {
    (0..tries)
        .map(|_| pair(ask(router, nvext.clone())))
        .collect()
}

fn whole(plan: Result<Plan, Refusal>) -> u64 {
    forward(plan).1.decode.as_ref().unwrap().id.0
}

#[test]
fn found_c7_a_backend_id_pins_decode_and_leaves_prefill_free() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let named = json!({"backend_instance_id": 11});
    assert_eq!(
        pairs(&mut router, &named, 8),
        HashSet::from([(1, 11), (2, 11)])
    );
    let header = [("x-dynamo-backend-instance-id", "12".to_owned())];
    assert_eq!(pair(ask_with(&mut router, &header, json!({}))).1, 12);
    // Another prefill worker may replace a failed one.
    let (phase, _assignment) = prefill(ask(&mut router, named.clone()));
    let after = phase.answered(status(500), Client::Waits, &mut router);
    assert!(matches!(after, AfterPrefill::Again(_)));
    let both = json!({"backend_instance_id": 11, "prefill_worker_id": 2});
    assert_eq!(pairs(&mut router, &both, 4), HashSet::from([(2, 11)]));
    // A named decode worker takes precedence over the backend.
    let both = json!({"backend_instance_id": 11, "decode_worker_id": 12});
    assert!(pairs(&mut router, &both, 4).iter().all(|pair| pair.1 == 12));
    // A prefill worker cannot be the backend.
    let refused = refusal(ask(&mut router, json!({"backend_instance_id": 1})));
    let problem = PinProblem::WrongRole { is: Role::Prefill };
    let field = "backend_instance_id";
    let id = WorkerId(1);
    assert_eq!(refused, Refusal::Pin { field, id, problem });
}

/// Prefill workers 1 and 2, decode workers 11 and 12; 12 drains, and 99 has never existed.
fn with_one_that_drains(fields: Value) -> Router {
    let workers = [
        worker("prefill", 1),
        worker("prefill", 2),
        worker("decode", 11),
        worker_with("decode", 12, json!({"draining": true})),
    ];
    router("nixl", &workers, fields)
}

const STALE: [(&str, u64); 6] = [
    ("prefill_worker_id", 99),
    ("decode_worker_id", 99),
    ("backend_instance_id", 99),
    ("decode_worker_id", 12),
    ("backend_instance_id", 12),
    ("decode_worker_id", u64::MAX),
];

#[test]
fn found_c9_a_name_that_is_nobodys_any_more_is_left_out_where_the_policy_aggregates() {
    for fields in [
        json!({}),
        json!({"on_stale_pin": "ignore", "on_prefill_absent": "fail"}),
    ] {
        let mut router = with_one_that_drains(fields);
        for (field, id) in STALE {
            let named = json!({field: id, "dp_rank": 3});
            let with_rank = ask(&mut router, named);
            if field != "prefill_worker_id" {
                assert!(
                    with_rank.is_ok(),
                    "{field}={id}: the rank was that worker's"
                );
            }
            assert_eq!(
                pairs(&mut router, &json!({field: id}), 6),
                HashSet::from([(1, 11), (2, 11)]),
                "{field}={id}"
            );
            assert_eq!(query(&mut router, json!({field: id})).1, 11);
        }
        // The other name still counts.
        let one =
            json!({"prefill_worker_id": 99, "decode_worker_id": 11, "backend_instance_id": 98});
        assert_eq!(pairs(&mut router, &one, 6).len(), 2);
        let one = json!({"prefill_worker_id": 2, "decode_worker_id": 98});
        assert_eq!(pairs(&mut router, &one, 6), HashSet::from([(2, 11)]));
    }
    let mut direct = router("direct", &two_by_two(), json!({}));
    let (dispatch, assignment) = forward(ask(&mut direct, json!({"prefill_worker_id": 99})));
    let picked = assignment.prefill.as_ref().unwrap().id.to_string();
    let header = dispatch
        .headers
        .iter()
        .find(|(name, _)| name.contains("prefill-instance-id"));
    assert_eq!(header.unwrap().1, picked);
}

#[test]
fn found_c9_else_it_is_refused_and_may_be_tried_again_with_another() {
    for fields in [
        json!({"on_stale_pin": "reject"}),
        json!({"enforce_disagg": true}),
        json!({"on_prefill_absent": "fail"}),
        // No policy would pick a replacement.
        json!({"selection": {"prefill": "direct", "decode": "direct"}}),
    ] {
        let mut router = with_one_that_drains(fields.clone());
        for (field, id) in STALE {
            let refused = refusal(ask(&mut router, json!({field: id})));
            let problem = match id {
                12 => PinProblem::Draining,
                _ => PinProblem::Unknown,
            };
            let id = WorkerId(id);
            assert_eq!(refused, Refusal::Pin { field, id, problem }, "{fields}");
            assert_eq!(
                (refused.status(), refused.code(), refused.retry_after_s()),
                (503, "stale_worker_id", Some(1))
            );
            let query = json!({field: id, "annotations": ["query_instance_id:"]});
            assert_eq!(refusal(ask(&mut router, query)), refused);
        }
        assert!(router.total_load().is_idle());
    }
}

#[test]
fn found_c12_where_a_request_runs_whole_a_prefill_name_that_cannot_be_is_refused_all_the_same() {
    let wholes = [
        worker("aggregated", 21),
        worker("aggregated", 22),
        worker_with("prefill", 1, json!({"dp_size": 2})),
    ];
    let mut router = router("nixl", &wholes, json!({}));
    let field = "prefill_worker_id";
    let refused = |router: &mut Router, said: Value| match refusal(ask(router, said)) {
        Refusal::Pin {
            field: of,
            id,
            problem,
        } if of == field => (id.0, problem),
        other => panic!("{other}"),
    };
    let is = Role::Aggregated;
    assert_eq!(
        refused(&mut router, json!({"prefill_worker_id": 21})),
        (21, PinProblem::WrongRole { is })
    );
    assert_eq!(
        refused(
            &mut router,
            json!({"prefill_worker_id": 21, "decode_worker_id": 22})
        ),
        (21, PinProblem::WrongRole { is })
    );
    assert_eq!(
        refused(
            &mut router,
            json!({"prefill_worker_id": 1, "prefill_dp_rank": 2})
        ),
        (
            1,
            PinProblem::RankOutOfRange {
                rank: 2,
                dp_size: 2
            }
        )
    );
    // A query gets the same answer.
    let query_of = json!({"prefill_worker_id": 21, "annotations": ["query_instance_id:"]});
    assert_eq!(refused(&mut router, query_of).0, 21);
    // A worker that could prefill, and one named for both legs, as in the answer to a query.
    assert!(
        whole(ask(
            &mut router,
            json!({"prefill_worker_id": 1, "prefill_dp_rank": 1})
        )) > 20
    );
    let both = json!({"prefill_worker_id": 22, "decode_worker_id": 22});
    assert!((0..6).all(|_| whole(ask(&mut router, both.clone())) == 22));
    assert_eq!(query(&mut router, both), (22, 22));
}

#[test]
fn only_those_whose_ids_are_allowed_are_picked() {
    for protocol in ["nixl", "direct"] {
        let mut router = router(protocol, &two_by_two(), json!({}));
        let picked = |router: &mut Router, said: Value| match ask(router, said) {
            Ok(Plan::Prefill(phase, assignment)) => (
                phase.worker().id.0,
                assignment.decode.as_ref().unwrap().id.0,
            ),
            Ok(Plan::Forward(_, assignment)) => (
                assignment.prefill.as_ref().unwrap().id.0,
                assignment.decode.as_ref().unwrap().id.0,
            ),
            Ok(_) => panic!("nobody is picked"),
            Err(refusal) => panic!("{refusal}"),
        };
        let some = json!({"allowed_worker_ids": [2, 11, 99]});
        assert!((0..6).all(|_| picked(&mut router, some.clone()) == (2, 11)));
        assert_eq!(query(&mut router, some), (2, 11));
        for (said, role) in [
            (json!([]), Role::Prefill),
            (json!([11, 12]), Role::Prefill),
            (json!([1, 2]), Role::Decode),
        ] {
            let refused = refusal(ask(&mut router, json!({"allowed_worker_ids": said})));
            assert_eq!(
                (refused.status(), refused.code()),
                (503, "no_eligible_worker")
            );
            let text = refused.to_string();
            assert!(
                text.contains("allowed_worker_ids") && text.contains(role.name()),
                "{text}"
            );
        }
        let outside = json!({"allowed_worker_ids": [2, 11], "decode_worker_id": 12});
        assert_eq!(
            refusal(ask(&mut router, outside)).code(),
            "invalid_worker_id"
        );
        let null = json!({"allowed_worker_ids": null});
        let all: HashSet<_> = (0..8)
            .map(|_| picked(&mut router, null.clone()).0)
            .collect();
        assert_eq!(all.len(), 2);
        let bad = json!({"allowed_worker_ids": ["2"]});
        assert_eq!(refusal(ask(&mut router, bad)).code(), "invalid_field");
    }
    // Alternative destinations are allowed ones, too.
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (phase, _assignment) = prefill(ask(&mut router, json!({"allowed_worker_ids": [1, 12]})));
    let after = phase.answered(GOOD, Client::Waits, &mut router);
    let AfterPrefill::Decode { dispatch, .. } = after else {
        panic!("no decode");
    };
    assert_eq!(dispatch.destinations.len(), 1);
    // Ignored from untrusted callers.
    let mut untrusting = self::router("nixl", &two_by_two(), json!({"trust_clients": false}));
    assert!(ask(&mut untrusting, json!({"allowed_worker_ids": [99]})).is_ok());
}

#[test]
fn a_name_without_a_rank_goes_to_the_rank_that_has_least_to_do() {
    let ranks = json!({"dp_size": 2});
    let workers = [
        worker_with("prefill", 1, ranks.clone()),
        worker_with("decode", 11, ranks),
    ];
    let mut router = router("nixl", &workers, json!({}));
    let long = json!({"model": "m", "messages": [{"role": "user", "content": "x".repeat(40_000)}],
        "nvext": {"prefill_worker_id": 1, "prefill_dp_rank": 0}});
    let input = routing::route::PlanInput {
        now: std::time::Duration::from_secs(1),
        ..Default::default()
    };
    let generation = routing::request::Generation::Chat;
    let _long = router
        .plan(generation, long.to_string().as_bytes(), input)
        .unwrap();
    let short = |rank: u32| json!({"prefill_worker_id": 1, "prefill_dp_rank": rank});
    let _short: Vec<_> = (0..3)
        .map(|_| prefill(ask(&mut router, short(1))))
        .collect();
    // One long prompt is more work than three short ones.
    let (phase, _assignment) = prefill(ask(&mut router, json!({"prefill_worker_id": 1})));
    assert_eq!(phase.headers(), [("x-data-parallel-rank", "1".to_owned())]);
}
