//! Tests of the knowledge of a worker's cache, and of how long a failure counts against a worker.

use routing::route::{AfterPrefill, CallEnd, Client, Router};
use serde_json::json;

use crate::support::*;

#[test]
fn what_a_named_worker_was_given_is_known_too() {
    for seed in 0..20 {
        let mut pairs = router(&pairs(8, 1), json!({}), seed);
        assert_eq!(wish(1, 1_000).prefilled_by(5).served(&mut pairs), 5);
        assert_eq!(remembered(&pairs, 5), 60, "15 runs of four");
        assert_eq!(wish(1, 1_000).at(9_000).prefiller(&mut pairs), 5);

        let mut whole = router(&wholes(8), json!({}), seed);
        let named = wish(1, 1_000).saying(json!({"backend_instance_id": 205}));
        drop(named.forward(&mut whole));
        assert_eq!(remembered(&whole, 205), 60);
        assert_eq!(wish(1, 1_000).decoder(&mut whole), 205);
    }
}

#[test]
fn a_mere_query_teaches_nothing() {
    let mut router = router(&pairs(8, 1), json!({}), 1);
    let named = wish(1, 1_000).prefilled_by(5);
    assert_eq!(named.prefiller(&mut router), 5);
    assert!((1..=8).all(|id| remembered(&router, id) == 0));
}

#[test]
fn a_capacity_that_is_known_bounds_what_is_remembered() {
    let small = json!({"kv_blocks": 50});
    let workers = [
        worker_with("prefill", 1, small.clone()),
        worker_with("prefill", 2, small),
        worker("decode", 101),
    ];
    let mut router = router(&workers, json!({}), 1);
    wish(1, 480).prefilled_by(1).served(&mut router);
    wish(2, 480).prefilled_by(1).served(&mut router);
    assert!(remembered(&router, 1) <= 50);
    // The newer prefix stays cached, however late; less of the older one.
    for _ in 0..20 {
        assert_eq!(wish(2, 480).at(3_600_000).prefiller(&mut router), 1);
    }
    wish(1, 480)
        .prefilled_by(2)
        .at(3_600_000)
        .served(&mut router);
    assert_eq!(wish(1, 480).at(3_700_000).prefiller(&mut router), 2);
}

#[test]
fn where_it_is_not_known_a_prefix_is_forgotten_in_time() {
    let mut router = router(&pairs(8, 1), json!({}), 1);
    wish(1, 1_000).prefilled_by(5).served(&mut router);
    assert_eq!(
        wish(1, 1_000).at(100_000).prefillers(&mut router, 50, 8)[4],
        50
    );
    let late = wish(1, 1_000).at(140_000).prefillers(&mut router, 400, 8);
    assert!(unevenness(&late) < 26.0, "{late:?}");
}

#[test]
fn a_worker_that_leaves_loses_its_prefixes_and_attracts_nobody_when_it_returns() {
    let all = pairs(8, 2);
    for kv_blocks in [None, Some(4_000)] {
        let fields = kv_blocks.map_or(json!({}), |blocks: u32| json!({"kv_blocks": blocks}));
        let mut router = router(&all, fields, 1);
        wish(1, 4_000).prefilled_by(3).served(&mut router);
        // A request is under way while the worker leaves.
        let open = wish(1, 4_000)
            .prefilled_by(3)
            .at(2_000)
            .prefill(&mut router);
        let rest: Vec<_> = all.iter().filter(|w| w["id"] != 3).cloned().collect();
        adopt(&mut router, &rest);
        let gone = wish(1, 4_000).at(3_000).prefillers(&mut router, 400, 8);
        assert_eq!(gone[2], 0);
        let others: Vec<u64> = gone.into_iter().filter(|count| *count > 0).collect();
        assert_eq!(others.len(), 7);
        assert!(unevenness(&others) < 24.0, "{others:?}");

        adopt(&mut router, &all);
        drop(open);
        assert_eq!(remembered(&router, 3), 0);
        let back = wish(1, 4_000).at(4_000).prefillers(&mut router, 400, 8);
        assert!(unevenness(&back) < 26.0, "{back:?}");
        assert!(router.total_load().is_idle());
        // Prompts served after the return count again.
        wish(1, 4_000).prefilled_by(3).at(5_000).served(&mut router);
        assert_eq!(wish(1, 4_000).at(9_000).prefiller(&mut router), 3);
    }
}

/// A prefill call with a fresh prompt to the given worker, with this answer, at one second.
fn ends(router: &mut Router, id: u64, answer: CallEnd<'_>) -> AfterPrefill {
    let (phase, assignment) = wish(50 + id, 100).prefilled_by(id).prefill(router);
    let after = phase.answered(answer, Client::Waits, router);
    router.request_ended(&assignment);
    after
}

#[test]
fn one_that_cannot_be_reached_is_passed_over_for_five_seconds_and_forgets() {
    for name in PICKING {
        let mut router = router(&pairs(3, 1), policy(name), 1);
        wish(1, 400).prefilled_by(2).at(100).served(&mut router);
        drop(ends(&mut router, 2, UNREACHED));
        assert_eq!(remembered(&router, 2), 0);
        for ms in [1_001, 3_000, 5_999] {
            for number in 0..40 {
                assert_ne!(wish(number, 400).at(ms).prefiller(&mut router), 2, "{name}");
            }
        }
        let sessions = (0..60u64).map(|number| {
            let mut wish = wish(number, 400).at(6_001);
            wish.session = Some(number.to_le_bytes().to_vec());
            drop(wish.prefill(&mut router));
            wish.prefiller(&mut router)
        });
        assert!(sessions.collect::<Vec<_>>().contains(&2), "{name}");
    }
}

/// An open circuit breaker, or a host that the proxy does not have: the worker itself has not answered.
#[test]
fn found_b1_one_whose_call_could_not_be_made_is_passed_over_for_a_second_and_keeps_its_prefixes() {
    let mut router = router(&pairs(3, 1), json!({}), 1);
    wish(1, 4_000).prefilled_by(2).at(100).served(&mut router);
    for _ in 0..9 {
        drop(ends(&mut router, 2, CallEnd::NotSent));
        drop(ends(&mut router, 1, GOOD));
    }
    assert_eq!(router.ejected(), 0);
    assert!(remembered(&router, 2) >= 240);
    let at = |router: &mut Router, ms| wish(1, 4_000).at(ms).prefillers(router, 50, 3)[1];
    assert_eq!((at(&mut router, 1_999), at(&mut router, 2_001)), (0, 50));
}

/// A header that the host refuses is the client's own fault.
#[test]
fn found_b1_a_call_that_cannot_be_sent_for_what_it_carries_is_held_against_nobody() {
    let mut router = router(&pairs(3, 1), json!({}), 1);
    wish(1, 4_000).prefilled_by(2).at(100).served(&mut router);
    for _ in 0..9 {
        let after = ends(&mut router, 2, CallEnd::Unsendable);
        assert!(matches!(after, AfterPrefill::Refused(refusal) if refusal.status() == 400));
        drop(ends(&mut router, 1, GOOD));
    }
    assert_eq!(router.ejected(), 0);
    assert_eq!(wish(1, 4_000).at(1_001).prefiller(&mut router), 2);
}

#[test]
fn the_supersede_calls_passes_over_those_that_are_marked() {
    for _ in 0..10 {
        let mut router = router(&pairs(3, 1), json!({}), 1);
        drop(ends(&mut router, 1, UNREACHED));
        let (phase, _assignment) = wish(1, 100).prefill(&mut router);
        let first = phase.worker().id.0;
        let next = again(phase.answered(status(500), Client::Waits, &mut router));
        assert_eq!(first + next.worker().id.0, 5);
    }
}

#[test]
fn the_prefix_goes_to_the_one_that_took_over() {
    let mut router = router(&pairs(4, 1), json!({}), 1);
    wish(1, 4_000).prefilled_by(2).at(100).served(&mut router);
    let (phase, _assignment) = wish(1, 4_000).at(1_000).prefill(&mut router);
    assert_eq!(phase.worker().id.0, 2);
    let next = again(phase.answered(UNREACHED, Client::Waits, &mut router));
    let other = next.worker().id.0;
    assert_ne!(other, 2);
    assert_eq!(load(&router, 2).prefills, 0);
    // The whole prompt must be computed there.
    assert_eq!(load(&router, other).prefill_tokens, 4_000);
    router.advance(at(1_500));
    drop(next.answered(GOOD, Client::Waits, &mut router));
    assert_eq!(
        wish(1, 4_000).at(20_000).prefillers(&mut router, 50, 4)[other as usize - 1],
        50
    );
}

#[test]
fn where_all_are_marked_they_are_used_all_the_same() {
    for failure in [UNREACHED, status(429)] {
        let mut router = router(&pairs(3, 1), json!({}), 1);
        for id in 1..=3 {
            drop(ends(&mut router, id, failure));
        }
        let picked = wish(1, 4_000).at(1_500).prefillers(&mut router, 300, 3);
        assert!(unevenness(&picked) < 14.0, "{picked:?}");
    }
    // One of them is only overloaded: it is preferred.
    let mut router = router(&pairs(3, 1), json!({}), 1);
    for (id, failure) in [(1, UNREACHED), (2, status(429)), (3, UNREACHED)] {
        drop(ends(&mut router, id, failure));
    }
    assert_eq!(
        wish(1, 4_000).at(1_500).prefillers(&mut router, 50, 3),
        [0, 50, 0]
    );
}

#[test]
fn one_that_is_full_is_passed_over_for_longer_each_time_and_keeps_its_prefixes() {
    for full in [status(429), status(503)] {
        let mut router = router(&pairs(3, 1), json!({}), 1);
        wish(1, 4_000).prefilled_by(2).at(100).served(&mut router);
        let mut now = 1_000;
        // Milliseconds, doubled each time, at most a second.
        for lasts in [100, 200, 400, 800, 1_000, 1_000] {
            let named = wish(52, 100).prefilled_by(2).at(now);
            let (phase, assignment) = named.prefill(&mut router);
            let after = phase.answered(full, Client::Waits, &mut router);
            // The caller named the worker, so no other one is asked.
            assert!(!matches!(after, AfterPrefill::Again(_)));
            router.request_ended(&assignment);
            assert!(remembered(&router, 2) >= 240);
            let at = |router: &mut Router, ms| wish(1, 4_000).at(ms).prefillers(router, 50, 3)[1];
            assert_eq!(at(&mut router, now + lasts - 1), 0, "{lasts} ms");
            now += lasts + 1;
            assert_eq!(at(&mut router, now), 50);
        }
        assert_eq!(router.ejected(), 0);
    }
}

#[test]
fn an_answer_clears_the_mark_and_a_clients_error_sets_none() {
    for answer in [GOOD, status(400)] {
        let mut router = router(&pairs(3, 1), json!({}), 1);
        drop(ends(&mut router, 2, answer));
        let picked = wish(1, 4_000).at(1_500).prefillers(&mut router, 300, 3);
        assert!(picked[1] > 50, "{picked:?}");
    }
    let mut router = router(&pairs(3, 1), json!({}), 1);
    drop(ends(&mut router, 2, UNREACHED));
    drop(ends(&mut router, 2, GOOD));
    let picked = wish(1, 4_000).at(1_500).prefillers(&mut router, 300, 3);
    assert!(picked[1] > 50, "{picked:?}");
}

#[test]
fn a_decode_worker_that_took_no_connection_is_passed_over_too() {
    let mut router = router(&pairs(1, 3), json!({}), 1);
    let (phase, mut assignment) = wish(1, 100).decoded_by(102).prefill(&mut router);
    drop(phase.answered(GOOD, Client::Waits, &mut router));
    router.took_no_connection(&["10.0.0.102:102".parse().unwrap()]);
    router.served_by(&mut assignment, "10.0.0.103:103".parse().unwrap());
    assert_eq!(
        (load(&router, 102).decodes, load(&router, 103).decodes),
        (0, 1)
    );
    drop(assignment);
    let wish = wish(2, 100);
    for ms in [1_001, 5_999] {
        assert!((0..50).all(|_| wish.clone().at(ms).decoder(&mut router) != 102));
    }
    assert!((0..50).any(|_| wish.clone().at(6_001).decoder(&mut router) == 102));
}

#[test]
fn a_mark_outlives_neither_its_worker_nor_a_clock_that_goes_back() {
    let all = pairs(2, 1);
    let mut router = router(&all, json!({}), 1);
    drop(ends(&mut router, 2, UNREACHED));
    adopt(
        &mut router,
        &all[..1]
            .iter()
            .chain(&all[2..])
            .cloned()
            .collect::<Vec<_>>(),
    );
    adopt(&mut router, &all);
    // After its return no earlier failure counts.
    let picked = wish(1, 100).at(1_500).prefillers(&mut router, 200, 2);
    assert!(picked[1] > 50, "{picked:?}");
    drop(ends(&mut router, 2, UNREACHED));
    assert_eq!(wish(1, 100).at(10).prefiller(&mut router), 1);
    let picked = wish(1, 100).at(7_000).prefillers(&mut router, 200, 2);
    assert!(picked[1] > 50, "{picked:?}");
}
