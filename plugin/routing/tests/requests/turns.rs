//! Tests of cursors: they move once per served request, and never for a query or a pin.

use std::collections::HashMap;

use routing::route::{CallEnd, Plan, Refusal};
use serde_json::json;

use crate::support::*;

#[test]
fn a_query_names_who_is_picked_next_however_often_it_is_asked() {
    for protocol in ["nixl", "sglang"] {
        let mut router = router(protocol, &two_by_two(), json!({}));
        let mut picked: HashMap<u64, u32> = HashMap::new();
        for round in 0..100 {
            let next = who(&mut router);
            assert!((0..round % 4).all(|_| who(&mut router) == next));
            assert!(router.total_load().is_idle());
            let got = pair(ask(&mut router, json!({})));
            assert_eq!(got, next);
            *picked.entry(got.0).or_default() += 1;
            *picked.entry(got.1).or_default() += 1;
        }
        assert!(picked.values().all(|count| *count == 50), "{picked:?}");
    }
}

#[test]
fn a_pin_moves_no_cursor_of_its_own_and_the_others_once() {
    for _ in 0..20 {
        let mut router = router("nixl", &two_by_two(), json!({}));
        for round in 0..20 {
            let (prefill, decode) = who(&mut router);
            let (other_prefill, other_decode) = (3 - prefill, 23 - decode);
            for named in [prefill, other_prefill] {
                for also in [decode, other_decode] {
                    let both = json!({"prefill_worker_id": named, "decode_worker_id": also});
                    assert_eq!(pair(ask(&mut router, both)), (named, also));
                    assert_eq!(who(&mut router), (prefill, decode));
                }
            }
            match round % 3 {
                0 => {
                    let pinned = json!({"prefill_worker_id": other_prefill});
                    assert_eq!(pair(ask(&mut router, pinned)), (other_prefill, decode));
                    assert_eq!(who(&mut router).0, prefill);
                }
                1 => {
                    let pinned = json!({"decode_worker_id": other_decode});
                    assert_eq!(pair(ask(&mut router, pinned)), (prefill, other_decode));
                    assert_eq!(who(&mut router).1, decode);
                }
                _ => assert_eq!(pair(ask(&mut router, json!({}))), (prefill, decode)),
            }
        }
    }
}

#[test]
fn a_refused_request_takes_nobodys_turn() {
    let workers = [
        worker("prefill", 1),
        worker("prefill", 2),
        worker_with("decode", 11, json!({"dp_size": 2})),
    ];
    let mut router = router("nixl", &workers, json!({}));
    for _ in 0..20 {
        let next = who(&mut router);
        for wrong in [
            json!({"decode_worker_id": 11, "dp_rank": 2, "prefill_dp_rank": 0}),
            json!({"decode_worker_id": 1}),
            json!({"dp_rank": 7, "prefill_dp_rank": 0}),
        ] {
            assert_eq!(refusal(ask(&mut router, wrong)).status(), 400);
            assert_eq!(who(&mut router), next);
        }
        pair(ask(&mut router, json!({})));
    }
    assert!(router.total_load().is_idle());
}

#[test]
fn whole_requests_have_turns_too() {
    let workers = [worker("aggregated", 21), worker("aggregated", 22)];
    let mut router = router("nixl", &workers, json!({}));
    for _ in 0..20 {
        let next = who(&mut router);
        assert_eq!(next.0, next.1);
        let other = 43 - next.0;
        for field in ["backend_instance_id", "decode_worker_id"] {
            let (_, assignment) = forward(ask(&mut router, json!({field: other})));
            assert_eq!(assignment.decode.as_ref().unwrap().id.0, other);
            assert_eq!(who(&mut router), next);
        }
        let (dispatch, assignment) = forward(ask(&mut router, json!({})));
        assert_eq!(assignment.decode.as_ref().unwrap().id.0, next.0);
        assert_eq!(dispatch.destinations.len(), 2);
    }
}

#[test]
fn back_pressure_refuses_at_once_and_goes_to_no_worker() {
    // Even where a worker could run the whole request, and even where failures would go there.
    let mut workers = two_by_two();
    workers.push(worker("aggregated", 21));
    for (protocol, on_failure) in [
        ("nixl", json!(["retry_other", "decode_only"])),
        ("sglang", json!(["retry_other"])),
    ] {
        let fields = json!({"prefill": {"max_queued_tokens": 12}, "decode": {"runs_whole_requests": true},
            "on_prefill_failure": on_failure});
        let mut router = router(protocol, &workers, fields);
        // A prompt longer than the bound is accepted where nothing waits.
        let (phase, assignment) = prefill(ask(&mut router, json!({})));
        let waiting = router.total_load();
        assert!(waiting.prefill_tokens <= 12);
        let next = who(&mut router);
        let refused = refusal(ask(&mut router, json!({})));
        let expected = Refusal::Backpressure {
            queued_tokens: waiting.prefill_tokens,
            allowed_tokens: 12,
        };
        assert_eq!(refused, expected);
        assert_eq!((refused.status(), refused.retry_after_s()), (429, Some(1)));
        assert_eq!(router.total_load(), waiting);
        assert_eq!(who(&mut router), next);
        // A request that names a worker is not subject to the bound.
        let named = 3 - phase.worker().id.0;
        let pinned = json!({"prefill_worker_id": named});
        assert_eq!(pair(ask(&mut router, pinned)).0, named);
        drop(phase.answered(CallEnd::Broken, routing::route::Client::Left, &mut router));
        assert!(matches!(ask(&mut router, json!({})), Ok(Plan::Prefill(..))));
        drop(assignment);
    }
}
