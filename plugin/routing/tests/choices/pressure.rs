//! Tests of the limit on tokens that wait for prefill: only the queues of workers that may be picked count.

use routing::route::Refusal;
use serde_json::json;

use crate::support::*;

fn limited(workers: &[serde_json::Value]) -> routing::route::Router {
    router(workers, json!({"prefill": {"max_queued_tokens": 1_000}}), 1)
}

fn is_pressed(refusal: &Refusal) -> bool {
    matches!(refusal, Refusal::Backpressure { .. })
}

#[test]
fn found_c8_one_who_names_an_idle_worker_is_not_turned_away() {
    let mut router = limited(&pairs(2, 1));
    let _busy = wish(1, 2_000).prefilled_by(2).prefill(&mut router);
    assert!(is_pressed(&wish(2, 100).refused(&mut router)));
    // Naming a decode worker leaves prefill open, so the limit applies.
    assert!(is_pressed(
        &wish(2, 100).decoded_by(101).refused(&mut router)
    ));
    let (phase, _assignment) = wish(2, 100).prefilled_by(1).prefill(&mut router);
    assert_eq!(phase.worker().id.0, 1);
    // A caller that names the busy worker is not refused either: the caller has chosen it.
    let (phase, _assignment) = wish(3, 100).prefilled_by(2).prefill(&mut router);
    assert_eq!(phase.worker().id.0, 2);
}

#[test]
fn found_c8_what_waits_on_workers_that_are_no_candidates_does_not_count() {
    let mut router = limited(&pairs(2, 1));
    let _busy = wish(1, 2_000).prefilled_by(2).prefill(&mut router);
    let within = wish(2, 100).within("10.0.0.1:1,10.0.0.101:101");
    let (phase, _assignment) = within.prefill(&mut router);
    assert_eq!(phase.worker().id.0, 1);
    let without = wish(2, 100).within("10.0.0.2:2,10.0.0.101:101");
    assert!(is_pressed(&without.refused(&mut router)));
    let allowed = wish(3, 100).saying(json!({"allowed_worker_ids": [1, 101]}));
    assert_eq!(allowed.prefill(&mut router).0.worker().id.0, 1);

    let ranks = [
        worker_with("prefill", 1, json!({"dp_size": 2})),
        worker("decode", 101),
    ];
    let mut router = limited(&ranks);
    let on = |rank: u32| json!({"prefill_dp_rank": rank});
    let busy = wish(1, 2_000).saying(json!({"prefill_worker_id": 1}));
    let _busy = busy.saying(on(1)).prefill(&mut router);
    assert!(is_pressed(&wish(2, 100).refused(&mut router)));
    assert!(is_pressed(&wish(2, 100).saying(on(1)).refused(&mut router)));
    wish(2, 100).saying(on(0)).prefill(&mut router);
}
