//! Tests of ejection and return, by the answers of prefill workers.

use routing::clock::Clock;
use routing::fleet::WorkerId;
use routing::outcome::Came;
use routing::route::{CallEnd, Client, Router};
use serde_json::json;

use crate::support::*;

/// A call with a fresh prompt to the named worker, with the given answer.
fn ends(router: &mut Router, id: u64, ms: u64, answer: CallEnd<'_>) {
    let (phase, assignment) = wish(50 + id, 100).prefilled_by(id).at(ms).prefill(router);
    drop(phase.answered(answer, Client::Waits, router));
    router.request_ended(&assignment);
}

/// Worker 2 of four fails three times while worker 1 works, at 1 s.
fn with_one_ejected(name: &str, failure: CallEnd<'_>) -> Router {
    let mut router = router(&pairs(4, 1), policy(name), 1);
    ends(&mut router, 2, 1_000, failure);
    ends(&mut router, 1, 1_000, GOOD);
    ends(&mut router, 2, 1_000, failure);
    assert!(!router.is_ejected(WorkerId(2)), "{name}");
    ends(&mut router, 2, 1_000, failure);
    assert!(router.is_ejected(WorkerId(2)), "{name}");
    router
}

/// How many of `requests` different requests go to worker 2, each under way when the next one comes.
fn sent(router: &mut Router, ms: u64, requests: u64) -> usize {
    let phases = (0..requests).map(|number| {
        let mut wish = wish(1_000 + number, 400).at(ms);
        wish.session = Some(number.to_le_bytes().to_vec());
        wish.prefill(router)
    });
    let phases: Vec<_> = phases.collect();
    let of_it = phases.iter().filter(|(phase, _)| phase.worker().id.0 == 2);
    of_it.count()
}

#[test]
fn one_that_keeps_failing_is_passed_over_under_every_policy_but_for_its_trial() {
    for name in PICKING {
        for failure in [CallEnd::Broken, UNREACHED, status(500)] {
            let mut router = with_one_ejected(name, failure);
            for ms in [1_001, 3_000, 5_999] {
                assert_eq!(sent(&mut router, ms, 40), 0, "{name}");
            }
            assert_eq!(sent(&mut router, 6_001, 60), 1, "{name}");
            assert_eq!(sent(&mut router, 6_002, 60), 0, "{name}");
            assert!(router.is_ejected(WorkerId(2)));
        }
    }
}

/// No `/health` is polled here: a worker that hangs shows only by its calls, which end at their deadline.
#[test]
fn one_that_hangs_is_found_by_its_deadline_though_its_health_check_is_fine() {
    let mut router = router(&pairs(2, 1), json!({}), 1);
    for ms in [1_000, 16_000, 31_000] {
        ends(&mut router, 2, ms, status(504));
        ends(&mut router, 1, ms, GOOD);
    }
    assert_eq!(router.ejected(), 1);
    assert_eq!(sent(&mut router, 35_999, 40), 0);
}

/// sgl-project/sglang#31206, seen from a request.
#[test]
fn half_open_success_closes() {
    let mut router = with_one_ejected("round_robin", status(500));
    let (phase, _assignment) = (0..4)
        .map(|number| wish(number, 400).at(6_001).prefill(&mut router))
        .find(|(phase, _)| phase.worker().id.0 == 2)
        .unwrap();
    assert_eq!(sent(&mut router, 6_002, 40), 0);
    drop(phase.answered(GOOD, Client::Left, &mut router));
    assert_eq!(router.ejected(), 0);
    assert_eq!(sent(&mut router, 6_003, 40), 10);
}

#[test]
fn a_trial_that_fails_goes_elsewhere_and_ejects_for_longer() {
    let mut router = with_one_ejected("round_robin", status(500));
    let lasts = |router: &mut Router| {
        let ejections = router.take_ejections();
        ejections.last().map(|ejection| ejection.lasts)
    };
    assert_eq!(lasts(&mut router), Some(at(5_000)));
    ends(&mut router, 1, 6_000, GOOD);
    let (phase, _assignment) = (0..4)
        .map(|number| wish(number, 400).at(6_001).prefill(&mut router))
        .find(|(phase, _)| phase.worker().id.0 == 2)
        .unwrap();
    let next = again(phase.answered(status(500), Client::Waits, &mut router));
    assert_ne!(next.worker().id.0, 2);
    // The request may be the cause, until another worker has served it.
    assert_eq!(lasts(&mut router), None);
    drop(next.answered(GOOD, Client::Waits, &mut router));
    assert_eq!(lasts(&mut router), Some(at(10_000)));
    assert_eq!(sent(&mut router, 16_000, 40), 0);
    assert_eq!(sent(&mut router, 16_002, 40), 1);
}

#[test]
fn a_retry_that_has_nobody_else_goes_to_one_that_is_ejected_and_an_answer_lets_it_in() {
    let mut router = router(&pairs(2, 1), json!({}), 1);
    ends(&mut router, 2, 1_000, status(500));
    ends(&mut router, 1, 1_000, GOOD);
    ends(&mut router, 2, 1_000, status(500));
    ends(&mut router, 2, 1_000, status(500));
    let (phase, _assignment) = wish(1, 100).at(1_001).prefill(&mut router);
    let next = again(phase.answered(status(500), Client::Waits, &mut router));
    assert_eq!(next.worker().id.0, 2);
    assert!(router.is_ejected(WorkerId(2)));
    drop(next.answered(GOOD, Client::Waits, &mut router));
    assert_eq!(router.ejected(), 0);
}

#[test]
fn one_that_the_caller_names_is_used_all_the_same_and_is_no_trial() {
    let mut router = with_one_ejected("kv", status(500));
    let (phase, _assignment) = wish(1, 100).prefilled_by(2).at(6_001).prefill(&mut router);
    assert_eq!(phase.worker().id.0, 2);
    assert_eq!(sent(&mut router, 6_002, 60), 1);
}

#[test]
fn what_all_do_wrong_ejects_nobody() {
    let mut router = router(&pairs(4, 1), json!({}), 1);
    for round in 0..10 {
        for id in 1..=4 {
            ends(&mut router, id, 1_000 + round, status(503));
        }
    }
    assert_eq!(router.ejected(), 0);
    let picked = wish(1, 4_000).at(1_500).prefillers(&mut router, 400, 4);
    assert!(unevenness(&picked) < 17.0, "{picked:?}");
}

#[test]
fn a_client_error_and_too_much_to_do_neither_count_as_failures_nor_end_a_row_of_them() {
    let mut router = router(&pairs(2, 1), json!({}), 1);
    let is_ejected_after = |router: &mut Router, answers: &[CallEnd<'_>]| {
        for answer in answers {
            ends(router, 2, 1_000, *answer);
        }
        ends(router, 1, 1_000, GOOD);
        router.is_ejected(WorkerId(2))
    };
    for _ in 0..9 {
        assert!(!is_ejected_after(
            &mut router,
            &[status(429), status(503), status(400)]
        ));
    }
    for is_ejected in [false, false, true] {
        assert_eq!(
            is_ejected_after(&mut router, &[status(500), status(400), status(429)]),
            is_ejected
        );
    }
}

#[test]
fn with_0_nobody_is_ejected() {
    let never = json!({"health": {"eject_after": 0}});
    let mut router = router(&pairs(2, 1), never, 1);
    for _ in 0..50 {
        ends(&mut router, 2, 1_000, status(500));
        ends(&mut router, 1, 1_000, GOOD);
    }
    assert_eq!(router.ejected(), 0);
    assert!(sent(&mut router, 2_001, 40) > 10);
}

#[test]
fn one_failure_is_tried_elsewhere_first_for_a_second() {
    for failure in [CallEnd::Broken, status(500)] {
        let mut router = router(&pairs(3, 1), json!({}), 1);
        wish(1, 400).prefilled_by(2).at(100).served(&mut router);
        ends(&mut router, 2, 1_000, failure);
        // The worker's cache is still considered valid.
        assert!(remembered(&router, 2) >= 25);
        assert_eq!(wish(1, 400).at(1_999).prefillers(&mut router, 40, 3)[1], 0);
        assert_eq!(wish(1, 400).at(2_001).prefillers(&mut router, 40, 3)[1], 40);
    }
}

#[test]
fn plain_requests_go_to_one_that_works() {
    let mut router = router(&pairs(1, 3), json!({}), 1);
    let (phase, mut assignment) = wish(1, 100).decoded_by(102).prefill(&mut router);
    drop(phase.answered(GOOD, Client::Waits, &mut router));
    router.leg_ended(&mut assignment, Came::Refused);
    drop(assignment);
    let unreachable = "10.0.0.102:102";
    for _ in 0..40 {
        let (dispatch, _) = router.plain(None).unwrap();
        assert_eq!(
            dispatch.destinations.last().unwrap().to_string(),
            unreachable
        );
    }
}

#[test]
fn found_w8_a_wall_clock_that_is_set_back_keeps_nobody_out_for_longer() {
    let mut clock = Clock::default();
    let mut at_wall = |ms| u64::try_from(clock.read(at(ms)).as_millis()).unwrap();
    assert_eq!(at_wall(1_000), 1_000);
    let mut router = with_one_ejected("kv", CallEnd::Broken);
    assert_eq!(sent(&mut router, at_wall(3_000), 40), 0);
    assert_eq!(sent(&mut router, at_wall(500), 40), 0);
    // More than five seconds have passed, whatever the wall clock says.
    assert_eq!(sent(&mut router, at_wall(3_600), 60), 1);
}
