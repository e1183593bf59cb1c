//! Who is let in, who waits, and who is turned away.

use std::time::Duration;

use routing::request::Generation;
use routing::route::{AfterPrefill, Client, Plan, Refusal, Router, Told, Turn};
use serde_json::{Value, json};

use crate::support::{
    GOOD, ask, body, prefill, query, refusal, router, status, two_by_two, with, worker,
};

/// A pool whose prefill workers are busy with anything at all.
fn strict(fields: Value) -> Router {
    let admission = with(json!({"prefill": {"tokens": 0}}), fields);
    router("nixl", &two_by_two(), json!({"admission": admission}))
}

fn waiter(plan: Result<Plan, Refusal>) -> routing::admission::Waiter {
    match plan {
        Ok(Plan::Wait(waiter)) => waiter,
        Ok(_) => panic!("it does not wait"),
        Err(refusal) => panic!("{refusal}"),
    }
}

fn again(
    router: &mut Router,
    waiter: routing::admission::Waiter,
    ms: u64,
) -> Result<Plan, Refusal> {
    let told = Told {
        now: Duration::from_millis(ms),
        turn: Turn::Called(waiter),
        ..Told::default()
    };
    router.plan(Generation::Chat, &body(&json!({})), told)
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
    let waits = waiter(ask(&mut router, json!({})));
    let later = waiter(ask(&mut router, json!({})));
    assert_eq!((router.waiting(), router.called()), (2, vec![waits, later]));
    assert_eq!(waiter(again(&mut router, waits, 1100)), waits);

    let (phase, seat) = first;
    phase.answered(GOOD, Client::Waits, &mut router);
    let third = prefill(again(&mut router, waits, 1200));
    assert_eq!((router.waiting(), router.called()), (1, vec![later]));
    assert_eq!(waiter(again(&mut router, later, 1300)), later);
    router.gives_up(later);
    assert_eq!(router.waiting(), 0);
    drop((seat, second, third));
    assert!(router.total_load().is_idle());
}

#[test]
fn one_who_wants_a_busy_worker_holds_nobody_up() {
    let mut router = strict(json!({"queue": {}}));
    let busy = prefill(ask(&mut router, json!({"prefill_worker_id": 1})));
    let waits = waiter(ask(&mut router, json!({"prefill_worker_id": 1})));
    let (other, seat) = prefill(ask(&mut router, json!({})));
    assert_eq!(other.worker().id.0, 2);
    let behind = waiter(ask(&mut router, json!({})));
    drop((other, seat));
    assert_eq!(router.called(), [waits, behind]);
    drop(busy);
}

#[test]
fn a_request_that_was_let_in_is_tried_again_on_a_busy_worker_too() {
    let mut router = strict(json!({}));
    let (first, _seat) = prefill(ask(&mut router, json!({})));
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
    let waits = waiter(ask(&mut router, json!({})));
    let refused = refusal(ask(&mut router, json!({})));
    assert_eq!((refused.status(), refused.code()), (429, "queue_full"));
    // They came at second 1.
    assert!(router.late(Duration::from_millis(1499)).is_empty());
    let late = router.late(Duration::from_millis(1500));
    assert_eq!(late, [(waits, Refusal::QueueDeadline { deadline_ms: 500 })]);
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
    let waits = waiter(ask(&mut router, json!({})));
    crate::support::leave(&mut router, &[1, 2, 11, 12]);
    let refused = refusal(again(&mut router, waits, 1100));
    assert_eq!(refused.status(), 503);
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
    // A request takes one block at least: more than half of what there is.
    let first = prefill(ask(&mut router, json!({})));
    let second = prefill(ask(&mut router, json!({})));
    let decodes = [&first, &second].map(|(_, seat)| seat.decode.as_ref().unwrap().id);
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
