//! Tests of admission: which requests enter, wait or are refused.

use std::time::Duration;

use routing::request::Generation;
use routing::route::{
    AfterPrefill, Client, Explain, Plan, PlanInput, QueuedRequest, Refusal, Router,
};
use serde_json::{Value, json};

use crate::support::{
    GOOD, ask, body, prefill, query, refusal, router, status, two_by_two, with, worker, worker_with,
};

/// A pool whose prefill workers are busy with any load at all.
fn strict(fields: Value) -> Router {
    let admission = with(json!({"prefill": {"tokens": 0}}), fields);
    router("nixl", &two_by_two(), json!({"admission": admission}))
}

fn waits_with(plan: Result<Plan, Refusal>, body: Vec<u8>) -> QueuedRequest {
    match plan {
        Ok(Plan::Wait(ticket)) => ticket.with_body(body).expect("the body that was read"),
        Ok(_) => panic!("it does not wait"),
        Err(refusal) => panic!("{refusal}"),
    }
}

fn waits(plan: Result<Plan, Refusal>) -> QueuedRequest {
    waits_with(plan, body(&json!({})))
}

/// Tries a waiting request; none: it keeps waiting.
fn again(
    router: &mut Router,
    queued: &mut QueuedRequest,
    ms: u64,
) -> Option<Result<Plan, Refusal>> {
    router.plan_queued(queued, Duration::from_millis(ms), Explain::No)
}

#[test]
fn without_a_queue_everyone_is_turned_away_while_all_are_busy() {
    let mut router = strict(json!({}));
    let held = [
        prefill(ask(&mut router, json!({}))),
        prefill(ask(&mut router, json!({}))),
    ];
    let refused = refusal(ask(&mut router, json!({})));
    assert_eq!((refused.status(), refused.code()), (429, "overloaded"));
    assert_eq!(refused.retry_after_s(), Some(1));
    let pinned = refusal(ask(&mut router, json!({"prefill_worker_id": 1})));
    assert_eq!(pinned.code(), "overloaded");
    drop(held);
    prefill(ask(&mut router, json!({})));
}

#[test]
fn those_who_wait_are_called_in_order_when_a_booking_ends() {
    let mut router = strict(json!({"queue": {}}));
    let first = prefill(ask(&mut router, json!({})));
    let second = prefill(ask(&mut router, json!({})));
    let mut sooner = waits(ask(&mut router, json!({})));
    let mut later = waits(ask(&mut router, json!({})));
    let both = vec![sooner.waiter, later.waiter];
    assert_eq!((router.waiting(), router.called()), (2, both));
    assert!(again(&mut router, &mut sooner, 1100).is_none());

    let (phase, assignment) = first;
    drop(phase.answered(GOOD, Client::Waits, &mut router));
    let third = prefill(again(&mut router, &mut sooner, 1200).expect("its turn"));
    assert_eq!(sooner.into_body(), body(&json!({})));
    assert_eq!((router.waiting(), router.called()), (1, vec![later.waiter]));
    assert!(again(&mut router, &mut later, 1300).is_none());
    router.gives_up(later.waiter);
    assert_eq!(router.waiting(), 0);
    drop((assignment, second, third));
    assert!(router.total_load().is_idle());
}

#[test]
fn one_who_wants_a_busy_worker_holds_nobody_up() {
    let mut router = strict(json!({"queue": {}}));
    let busy = prefill(ask(&mut router, json!({"prefill_worker_id": 1})));
    let pinned = waits(ask(&mut router, json!({"prefill_worker_id": 1})));
    let (other, assignment) = prefill(ask(&mut router, json!({})));
    assert_eq!(other.worker().id.0, 2);
    let behind = waits(ask(&mut router, json!({})));
    drop((other, assignment));
    assert_eq!(router.called(), [pinned.waiter, behind.waiter]);
    drop(busy);
}

#[test]
fn a_request_that_was_let_in_is_tried_again_on_a_busy_worker_too() {
    let mut router = strict(json!({}));
    let (first, _assignment) = prefill(ask(&mut router, json!({})));
    let (second, _other) = prefill(ask(&mut router, json!({})));
    let failed = first.worker().id;
    let after = first.answered(status(503), Client::Waits, &mut router);
    assert!(matches!(after, AfterPrefill::Again(next) if next.worker().id != failed));
    drop(second);
}

#[test]
fn the_queue_is_bounded_in_number_and_in_time() {
    let mut router = strict(json!({"queue": {"max_requests": 1, "deadline_ms": 500}}));
    let _held = [
        prefill(ask(&mut router, json!({}))),
        prefill(ask(&mut router, json!({}))),
    ];
    let queued = waits(ask(&mut router, json!({})));
    let refused = refusal(ask(&mut router, json!({})));
    assert_eq!((refused.status(), refused.code()), (429, "queue_full"));
    // The requests came at second 1.
    assert!(router.late(Duration::from_millis(1499)).is_empty());
    let late = router.late(Duration::from_millis(1500));
    let refusal = Refusal::QueueDeadline { deadline_ms: 500 };
    assert_eq!(late, [(queued.waiter, refusal)]);
    assert_eq!(router.waiting(), 0);
}

#[test]
fn a_query_does_not_wait_and_nobody_waits_where_nobody_is() {
    let mut router = strict(json!({"queue": {}}));
    let _held = [
        prefill(ask(&mut router, json!({}))),
        prefill(ask(&mut router, json!({}))),
    ];
    let annotated = json!({"annotations": ["query_instance_id:"]});
    assert_eq!(refusal(ask(&mut router, annotated)).code(), "overloaded");
    let mut queued = waits(ask(&mut router, json!({})));
    crate::support::leave(&mut router, &[1, 2, 11, 12]);
    let refused = refusal(again(&mut router, &mut queued, 1100).expect("an end"));
    assert_eq!(refused.status(), 503);
    assert_eq!(router.waiting(), 0);
}

/// A body of several hundred kilobytes in awkward spelling.
fn long_body(nvext: &Value) -> Vec<u8> {
    let text = "caf\u{e9} ".repeat(60_000);
    let messages = json!([{"role": "user", "content": text}]);
    let text = json!({"model": "m", "messages": messages, "nvext": nvext}).to_string();
    let odd = text.replacen('{', "{ \"max\\u005ftokens\" : 7,", 1);
    odd.into_bytes()
}

#[test]
fn found_b2_a_request_that_waits_is_read_once_however_often_it_is_tried() {
    for busy in [
        json!({"prefill": {"tokens": 0}}),
        json!({"decode": {"blocks": 0}}),
    ] {
        let admission = with(busy, json!({"queue": {}}));
        let workers = [worker("prefill", 1), worker("decode", 11)];
        let mut router = router("nixl", &workers, json!({"admission": admission}));
        let (first, assignment) = prefill(ask(&mut router, json!({})));
        let before = router.take_tally().body_bytes;
        assert_eq!(before, body(&json!({})).len() as u64);

        let long = long_body(&json!({}));
        let input = PlanInput {
            now: Duration::from_secs(1),
            ..PlanInput::default()
        };
        let plan = router.plan(Generation::Chat, &long, input);
        let mut queued = waits_with(plan, long.clone());
        for event in 0..100 {
            assert!(again(&mut router, &mut queued, 1000 + event).is_none());
        }
        let tally = router.take_tally();
        assert_eq!(tally.body_bytes, long.len() as u64, "each byte once");
        assert!(tally.picks.is_empty(), "{tally:?}");

        drop(first.answered(GOOD, Client::Waits, &mut router));
        drop(assignment);
        let (phase, _assignment) =
            prefill(again(&mut router, &mut queued, 2000).expect("its turn"));
        assert_eq!(router.take_tally().body_bytes, 0);
        let kept = queued.into_body();
        assert_eq!(kept, long);
        let leg: Value = serde_json::from_slice(&phase.body(&kept)).unwrap();
        assert_eq!(leg["max_tokens"], 1);
        assert_eq!(
            leg["messages"][0]["content"].as_str().map(str::len),
            Some(360_000)
        );
    }
}

#[test]
fn found_b2_what_waits_is_sent_as_it_would_have_been_at_once() {
    let workers = [worker("prefill", 1), worker("decode", 11)];
    for protocol in ["nixl", "trtllm", "sglang"] {
        let admission = json!({"prefill": {"tokens": 0}, "queue": {}});
        let mut router = router(protocol, &workers, json!({"admission": admission}));
        let long = long_body(&json!({"hints": {}}));
        let input = PlanInput {
            now: Duration::from_secs(1),
            ..PlanInput::default()
        };
        let (first, assignment) = prefill(router.plan(Generation::Chat, &long, input));
        let plan = router.plan(Generation::Chat, &long, input);
        let mut queued = waits_with(plan, long.clone());
        let expected = bare(&first.body(&long));
        drop((first, assignment));
        let (phase, assignment) = prefill(again(&mut router, &mut queued, 2000).expect("its turn"));
        assert_eq!(bare(&phase.body(&long)), expected, "{protocol}");
        assert!(assignment.may_recover());
    }
}

/// A leg without the fields that differ between requests.
fn bare(leg: &[u8]) -> Value {
    let mut leg: Value = serde_json::from_slice(leg).unwrap();
    if let Some(fields) = leg.as_object_mut() {
        for name in ["bootstrap_room", "rid", "disaggregated_params"] {
            fields.remove(name);
        }
    }
    leg
}

#[test]
fn found_b2_who_waits_follows_the_fleet() {
    let mut router = strict(json!({"queue": {}}));
    let _held = [
        prefill(ask(&mut router, json!({}))),
        prefill(ask(&mut router, json!({}))),
    ];
    let mut queued = waits(ask(&mut router, json!({})));
    // The model's workers leave, and another model's come.
    let other = worker_with("aggregated", 21, json!({"model": "other"}));
    crate::support::replace(&mut router, &[other]);
    let refused = refusal(again(&mut router, &mut queued, 1100).expect("an end"));
    assert!([404, 503].contains(&refused.status()), "{refused}");
    assert_eq!(router.waiting(), 0);
}

/// After a change of the fleet, the model's name and the named worker are looked up again.
#[test]
fn found_b2_who_waits_is_served_by_those_who_are_there_when_its_turn_comes() {
    let mut router = strict(json!({"queue": {}}));
    let _held = [
        prefill(ask(&mut router, json!({}))),
        prefill(ask(&mut router, json!({}))),
    ];
    let mut queued = waits(ask(&mut router, json!({})));
    let mut named = waits(ask(&mut router, json!({"prefill_worker_id": 2})));
    // The model is now an adapter of another one, and the named worker has left.
    let of_base = json!({"model": "base", "adapters": ["m"]});
    let others = [
        worker_with("prefill", 3, of_base.clone()),
        worker_with("prefill", 4, of_base.clone()),
        worker_with("decode", 13, of_base),
    ];
    crate::support::replace(&mut router, &others);
    for queued in [&mut queued, &mut named] {
        let plan = again(&mut router, queued, 1100).expect("its turn");
        let (phase, assignment) = prefill(plan);
        assert!([3, 4].contains(&phase.worker().id.0));
        drop((phase, assignment));
    }
    assert_eq!(router.waiting(), 0);
}

#[test]
fn a_busy_decode_worker_is_passed_over_and_all_busy_is_an_overload() {
    let admission = json!({"decode": {"fraction": 0.5}});
    let mut router = router(
        "nixl",
        &two_by_two(),
        json!({"admission": admission, "kv_blocks": 1}),
    );
    // A request takes at least one block: more than half of all.
    let first = prefill(ask(&mut router, json!({})));
    let second = prefill(ask(&mut router, json!({})));
    let decodes = [&first, &second].map(|(_, assignment)| assignment.decode.as_ref().unwrap().id);
    assert_ne!(decodes[0], decodes[1]);
    let refused = refusal(ask(&mut router, json!({})));
    assert!(matches!(
        refused,
        Refusal::Overloaded {
            role: routing::fleet::Role::Decode
        }
    ));
}

#[test]
fn thresholds_are_off_unless_set() {
    let workers = [worker("prefill", 1), worker("decode", 11)];
    let mut router = router("nixl", &workers, json!({}));
    let held: Vec<_> = (0..200)
        .map(|_| prefill(ask(&mut router, json!({}))))
        .collect();
    assert_eq!(query(&mut router, json!({})), (1, 11));
    drop(held);
}
