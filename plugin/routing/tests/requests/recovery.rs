//! Tests of the replacement of a decode leg that failed before its client read anything, and of a late prefill.

use std::time::Duration;

use routing::fleet::WorkerId;
use routing::outcome::{Came, Leg};
use routing::route::{AfterPrefill, Assignment, CallEnd, Client, Failed, Plan, Router};
use serde_json::{Value, json};

use crate::support::*;

const NOW: Duration = Duration::from_secs(2);

fn decoder(assignment: &Assignment) -> WorkerId {
    assignment.decode.as_ref().expect("a decode worker").id
}

/// Recovers the request after its decode worker has failed: with an error, after work that may have been done.
fn recover(router: &mut Router, assignment: &mut Assignment) -> Option<Plan> {
    recover_after(router, assignment, Came::Status(500))
}

/// Recovers the request after this end of the leg.
fn recover_after(router: &mut Router, assignment: &mut Assignment, came: Came) -> Option<Plan> {
    let workers = [decoder(assignment)];
    place_again(router, assignment, came, &workers)
}

/// Recovers the request where these workers may have been asked.
fn place_again(
    router: &mut Router,
    assignment: &mut Assignment,
    came: Came,
    workers: &[WorkerId],
) -> Option<Plan> {
    let leg = assignment.leg(router.pool().rules());
    let meaning = router.leg_ended(assignment, came);
    let failed = Failed {
        leg,
        meaning,
        workers,
        frontends: &[],
    };
    router.recover(assignment, &failed, &body(&json!({})), NOW)
}

#[test]
fn a_failed_decode_worker_is_replaced_by_another_pair_within_the_budget() {
    for times in [0, 1, 2, 3] {
        let workers = [
            worker("prefill", 1),
            worker("decode", 11),
            worker("decode", 12),
            worker("decode", 13),
        ];
        let fields = json!({"decode": {"recoveries": times}});
        let mut router = router("nixl", &workers, fields);
        let (phase, mut assignment) = prefill(ask(&mut router, json!({})));
        drop(phase);
        let mut tried = vec![decoder(&assignment)];
        while let Some(plan) = recover(&mut router, &mut assignment) {
            let (phase, next) = prefill(Ok(plan));
            // The prefill worker did nothing wrong, so it is not left out.
            assert_eq!(phase.worker().id, WorkerId(1));
            assert!(!tried.contains(&decoder(&next)), "{tried:?}");
            tried.push(decoder(&next));
            assignment = next;
        }
        assert_eq!(tried.len(), 1 + times.min(2), "{times} times");
        drop(assignment);
        assert!(router.total_load().is_idle());
    }
}

#[test]
fn a_leg_that_reached_nobody_costs_no_recovery_and_is_tried_as_often_as_the_pool_allows() {
    for (recoveries, attempts, placed) in [(0, 3, 1), (1, 1, 2), (1, 3, 4), (2, 3, 5), (1, 9, 6)] {
        let decoders = (11..=16).map(|id| worker("decode", id));
        let workers: Vec<_> = std::iter::once(worker("prefill", 1))
            .chain(decoders)
            .collect();
        let fields = json!({"decode": {"recoveries": recoveries, "attempts": attempts}});
        let mut router = router("nixl", &workers, fields);
        let (phase, mut assignment) = prefill(ask(&mut router, json!({})));
        drop(phase);
        let mut tried = vec![decoder(&assignment)];
        while let Some(plan) = recover_after(&mut router, &mut assignment, Came::Refused) {
            let (phase, next) = prefill(Ok(plan));
            drop(phase);
            assert!(!tried.contains(&decoder(&next)), "{tried:?}");
            tried.push(decoder(&next));
            assignment = next;
        }
        assert_eq!(
            tried.len(),
            placed,
            "{recoveries} recoveries, {attempts} attempts"
        );
    }
}

#[test]
fn what_reached_nobody_leaves_the_recoveries_to_what_failed() {
    let workers = [
        worker("aggregated", 21),
        worker("aggregated", 22),
        worker("aggregated", 23),
        worker("aggregated", 24),
    ];
    let mut router = router("aggregated", &workers, json!({"decode": {"attempts": 2}}));
    let (_, mut assignment) = forward(ask(&mut router, json!({})));
    let mut ends = [Came::Refused, Came::Status(500), Came::Status(502)].into_iter();
    let mut again = || {
        let plan = recover_after(&mut router, &mut assignment, ends.next()?)?;
        assignment = forward(Ok(plan)).1;
        Some(())
    };
    assert!(again().is_some(), "it reached nobody");
    assert!(again().is_some(), "the one recovery");
    assert!(again().is_none(), "nothing is left");
}

#[test]
fn a_request_that_ran_whole_runs_whole_elsewhere() {
    let workers = [worker("aggregated", 21), worker("aggregated", 22)];
    let mut router = router("aggregated", &workers, json!({}));
    let (_, mut assignment) = forward(ask(&mut router, json!({})));
    let first = decoder(&assignment);
    let plan = recover(&mut router, &mut assignment).expect("another worker");
    let (dispatch, mut next) = forward(Ok(plan));
    assert_ne!(decoder(&next), first);
    assert!(dispatch.edits.is_none());
    assert!(recover(&mut router, &mut next).is_none());
}

#[test]
fn where_all_may_have_failed_only_the_likeliest_is_left_out() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (phase, mut assignment) = prefill(ask(&mut router, json!({})));
    drop(phase);
    let first = decoder(&assignment);
    let second = match first {
        WorkerId(11) => WorkerId(12),
        _ => WorkerId(11),
    };
    let plan = place_again(
        &mut router,
        &mut assignment,
        Came::Refused,
        &[first, second],
    );
    let (_phase, next) = prefill(Ok(plan.expect("the other one")));
    assert_ne!(decoder(&next), first);
}

#[test]
fn nobody_is_asked_again_by_one_who_named_the_worker() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (_, mut assignment) = prefill(ask(&mut router, json!({"decode_worker_id": 11})));
    assert_eq!(decoder(&assignment), WorkerId(11));
    assert!(recover_after(&mut router, &mut assignment, Came::Cut).is_none());
}

#[test]
fn a_new_pair_has_a_room_of_its_own() {
    let mut router = router("sglang", &two_by_two(), json!({}));
    let client = body(&json!({}));
    let room = |leg: Vec<u8>| {
        let leg: Value = serde_json::from_slice(&leg).unwrap();
        leg["bootstrap_room"].as_u64().expect("a room")
    };
    let (phase, mut assignment) = prefill(ask(&mut router, json!({})));
    let first = room(phase.body(&client));
    let (second, _) = prefill(Ok(
        recover(&mut router, &mut assignment).expect("another pair")
    ));
    assert_ne!(room(second.body(&client)), first);
}

#[test]
fn a_late_prefill_gets_a_second_beside_it_and_the_first_good_answer_counts() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (first, assignment) = prefill(ask(&mut router, json!({})));
    let second = first.hedge(&mut router).expect("a second call");
    assert_ne!(first.worker().id, second.worker().id);
    assert_eq!(router.total_load().prefills, 2);
    let after = second.answered(GOOD, Client::Waits, &mut router);
    assert!(matches!(after, AfterPrefill::Decode { .. }));
    // The KV of the slow prefill is fetched by a clean-up leg.
    let after = first.answered(GOOD, Client::Left, &mut router);
    assert!(matches!(after, AfterPrefill::CleanUp(leg) if leg.blocks == 2));
    drop(assignment);
    assert!(router.total_load().is_idle());
}

#[test]
fn one_of_two_that_fails_leaves_the_request_to_the_other_and_is_not_tried_again() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (first, _assignment) = prefill(ask(&mut router, json!({})));
    let second = first.hedge(&mut router).expect("a second call");
    assert!(first.absorb_failure(status(500), &mut router).is_ok());
    let second = *second
        .absorb_failure(GOOD, &mut router)
        .expect_err("a good answer");
    let after = second.answered(CallEnd::Broken, Client::Waits, &mut router);
    assert!(
        matches!(after, AfterPrefill::Refused(_)),
        "{}",
        word(&after)
    );
}

/// Workers that need not compile first.
fn warm() -> Value {
    json!({"health": {"cold_timeout_ms": 0}})
}

/// An engine compiles at its first request: it gets the longer deadline until it has answered, or passed a deadline.
#[test]
fn found_v4_a_worker_that_has_never_answered_may_take_longer() {
    let workers = [worker("prefill", 1), worker("decode", 11)];
    for end in [GOOD, TOO_LATE] {
        let mut router = router("nixl", &workers, json!({"prefill": {"attempts": 1}}));
        let (cold, _assignment) = prefill(ask(&mut router, json!({})));
        assert_eq!(cold.timeout(), Duration::from_secs(180));
        drop(cold.answered(end, Client::Waits, &mut router));
        let (warm, _assignment) = prefill(ask(&mut router, json!({})));
        assert!(warm.timeout() < Duration::from_secs(20));
        leave(&mut router, &[1]);
        // A returning worker is another incarnation.
        let all = self::router("nixl", &workers, json!({}));
        let fleet = all.fleet().workers().map(|worker| (**worker).clone());
        let version = router.fleet().version() + 1;
        router.adopt(routing::fleet::Fleet::new(version, fleet.collect()));
        let (again, _assignment) = prefill(ask(&mut router, json!({})));
        assert_eq!(again.timeout(), Duration::from_secs(180));
    }
}

#[test]
fn found_v4_so_may_a_decode_worker_over_its_first_token() {
    let mut router = router("aggregated", &[worker("aggregated", 21)], json!({}));
    let streamed = |router: &mut Router| {
        let body = json!({"model": "m", "messages": [], "stream": true}).to_string();
        let input = routing::route::PlanInput::default();
        let kind = routing::request::Generation::Chat;
        forward(router.plan(kind, body.as_bytes(), input))
    };
    let (cold, mut assignment) = streamed(&mut router);
    assert!(cold.patience.first >= Some(Duration::from_secs(180)));
    router.leg_ended(&mut assignment, Came::Good);
    let (warm, _assignment) = streamed(&mut router);
    assert!(warm.patience.first < Some(Duration::from_secs(100)));
}

#[test]
fn a_decode_deadline_is_the_first_tokens_or_the_whole_answers() {
    let deadline = |members: Value| {
        let mut router = router("nixl", &two_by_two(), warm());
        let input = routing::route::PlanInput::default();
        let body = with(json!({"model": "m", "messages": []}), members).to_string();
        let plan = router.plan(routing::request::Generation::Chat, body.as_bytes(), input);
        let (phase, _assignment) = prefill(plan);
        match phase.answered(GOOD, Client::Waits, &mut router) {
            AfterPrefill::Decode { dispatch, .. } => dispatch.patience,
            other => panic!("{}", word(&other)),
        }
    };
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    let stream = deadline(json!({"stream": true, "max_tokens": 10}));
    assert_eq!((stream.first, stream.silence), (seconds(60), seconds(120)));
    let whole = deadline(json!({"max_tokens": 10}));
    assert_eq!((whole.first, whole.total), (seconds(62), seconds(62)));
    assert_eq!((whole.silence, stream.total), (seconds(120), None));
    assert_eq!(deadline(json!({})).first, None);
}

#[test]
fn a_prefills_deadline_grows_with_what_is_booked_before_it() {
    let workers = [worker("prefill", 1), worker("decode", 11)];
    let mut router = router("nixl", &workers, warm());
    let (first, _one) = prefill(ask(&mut router, json!({})));
    let long = json!({"model": "m", "messages": [{"role": "user", "content": "x".repeat(40_000)}]});
    let input = routing::route::PlanInput::default();
    let kind = routing::request::Generation::Chat;
    let (second, _two) = prefill(router.plan(kind, long.to_string().as_bytes(), input));
    let (third, _three) = prefill(ask(&mut router, json!({})));
    assert!(first.timeout() < second.timeout());
    assert!(second.timeout() < third.timeout());
    assert!(third.timeout() < Duration::from_secs(30));
}

#[test]
fn in_direct_mode_another_frontend_is_asked() {
    let fields = json!({"frontends": ["127.0.0.1:8000", "127.0.0.1:8001"]});
    let mut router = router("direct", &two_by_two(), fields);
    let (dispatch, mut assignment) = forward(ask(&mut router, json!({})));
    let asked = [dispatch.destinations[0]];
    let workers = [decoder(&assignment)];
    let failed = Failed {
        leg: Leg::Frontend,
        meaning: router.leg_ended(&mut assignment, Came::Status(500)),
        workers: &workers,
        frontends: &asked,
    };
    let plan = router.recover(&mut assignment, &failed, &body(&json!({})), NOW);
    let (dispatch, assignment) = forward(Ok(plan.expect("another frontend")));
    assert!(!dispatch.destinations.is_empty());
    assert!(!dispatch.destinations.contains(&asked[0]));
    assert_ne!(decoder(&assignment), workers[0]);
}

#[test]
fn the_only_decode_worker_is_asked_again_with_another_workers_hand_off() {
    let workers = [
        worker("prefill", 1),
        worker("prefill", 2),
        worker("decode", 11),
    ];
    let mut router = router("nixl", &workers, json!({}));
    let (phase, mut assignment) = prefill(ask(&mut router, json!({})));
    let first = phase.worker().id;
    drop(phase);
    let plan = recover_after(&mut router, &mut assignment, Came::Status(500));
    let (phase, assignment) = prefill(Ok(plan.expect("the other pair")));
    assert_ne!(phase.worker().id, first);
    assert_eq!(decoder(&assignment), WorkerId(11));
}

/// A hand-off waits for a second decode worker only as long as its lease lasts: later the blocks may be another request's.
#[test]
fn found_v3_a_hand_off_is_not_dispatched_once_its_lease_is_over() {
    let expiring: &'static [u8] = br#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[4,5]],"remote_blocks_expiry_time":1700000009.5}}"#;
    let answer = CallEnd::Whole {
        status: 200,
        body: expiring,
    };
    let start = Duration::from_secs(1_700_000_000);
    for (answer, lease_ms, wait_ms, is_the_same) in [
        (GOOD, 30_000, 29_000, true),
        (GOOD, 30_000, 30_000, false),
        (GOOD, 5_000, 5_000, false),
        (GOOD, 0, 900_000, true),
        (answer, 30_000, 9_000, true),
        (answer, 30_000, 9_500, false),
        (answer, 0, 9_500, false),
    ] {
        let fields = json!({"handoff": {"lease_ms": lease_ms}});
        let mut router = router("nixl", &two_by_two(), fields);
        let input = routing::route::PlanInput {
            now: start,
            ..routing::route::PlanInput::default()
        };
        let client = body(&json!({}));
        let plan = router.plan(routing::request::Generation::Chat, &client, input);
        let (phase, mut assignment) = prefill(plan);
        let AfterPrefill::Decode { target, staged, .. } =
            phase.answered(answer, Client::Waits, &mut router)
        else {
            panic!("no decode");
        };
        router.assign_decode(&mut assignment, &target.0, target.1, staged);
        let now = start + Duration::from_millis(wait_ms);
        router.advance(now);
        let failed = Failed {
            leg: Leg::Decode,
            meaning: router.leg_ended(&mut assignment, Came::Refused),
            workers: &[target.0.id],
            frontends: &[],
        };
        let plan = router.recover(&mut assignment, &failed, &client, now);
        let is_same = matches!(plan, Some(Plan::Forward(..)));
        assert_eq!(is_same, is_the_same, "{lease_ms} ms, after {wait_ms}");
        assert!(
            is_same || matches!(plan, Some(Plan::Prefill(..))),
            "a new prefill"
        );
    }
}

/// A hand-off that has expired before it comes is none.
#[test]
fn found_v3_a_hand_off_that_comes_too_late_is_none() {
    let late = CallEnd::Whole {
        status: 200,
        body: br#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[4]],"remote_blocks_expiry_time":1600000000}}"#,
    };
    let mut router = router("nixl", &two_by_two(), json!({}));
    let input = routing::route::PlanInput {
        now: Duration::from_secs(1_700_000_000),
        ..routing::route::PlanInput::default()
    };
    let client = body(&json!({}));
    let (phase, _assignment) =
        prefill(router.plan(routing::request::Generation::Chat, &client, input));
    let after = phase.answered(late, Client::Waits, &mut router);
    assert_eq!(word(&after), "again");
}

/// A clean-up leg is bound to the lease too.
#[test]
fn found_v3_what_is_given_up_after_its_lease_is_not_fetched() {
    for (wait_s, is_fetched) in [(29, true), (30, false)] {
        let mut router = router("nixl", &two_by_two(), json!({}));
        let (phase, mut assignment) = prefill(ask(&mut router, json!({})));
        let after = phase.answered(GOOD, Client::Waits, &mut router);
        let AfterPrefill::Decode { target, staged, .. } = after else {
            panic!("no decode");
        };
        router.assign_decode(&mut assignment, &target.0, target.1, staged);
        router.leg_ended(&mut assignment, Came::Status(400));
        router.advance(Duration::from_secs(1 + wait_s));
        assert_eq!(
            router.give_up_handoff(&mut assignment).is_some(),
            is_fetched
        );
        assert!(
            router.give_up_handoff(&mut assignment).is_none(),
            "never twice"
        );
    }
}

/// A hand-off that a decode worker may have used is spent: no other worker and no clean-up leg gets it.
#[test]
fn found_v3_what_may_have_been_fetched_is_handed_to_nobody_again() {
    for (came, is_as_before) in [
        (Came::Refused, true),
        (Came::NotSent, true),
        (Came::Status(401), true),
        (Came::Status(429), true),
        (Came::Status(400), true),
        (Came::Status(408), false),
        (Came::Status(500), false),
        (Came::Status(503), false),
        (Came::Reset, false),
        (Came::Cut, false),
        (Came::TimedOut, false),
        (Came::Empty, false),
        (Came::FailedInside, false),
        (Came::Left, false),
    ] {
        let mut router = router("nixl", &two_by_two(), json!({}));
        let (phase, mut assignment) = prefill(ask(&mut router, json!({})));
        let after = phase.answered(GOOD, Client::Waits, &mut router);
        let AfterPrefill::Decode { target, staged, .. } = after else {
            panic!("no decode");
        };
        router.assign_decode(&mut assignment, &target.0, target.1, staged);
        router.leg_ended(&mut assignment, came);
        assert_eq!(
            assignment.staged_blocks().is_some(),
            is_as_before,
            "{came:?}"
        );
        let fetched = router.give_up_handoff(&mut assignment);
        assert_eq!(fetched.is_some(), is_as_before, "{came:?}");
    }
}
