//! Tests of a choice's bookings, from the first one to the end, however the request ends.

use routing::fleet::WorkerId;
use routing::load::Load;
use routing::route::{Assignment, Client, Plan, Refusal, Report, Router, SelectionRequest};
use serde_json::json;

use crate::support::*;

fn reserve(router: &mut Router, tokens: u64, expected: Option<u64>, ms: u64) -> Assignment {
    let prompt = Prompt::new(tokens, tokens, 16);
    let ask = SelectionRequest {
        expected_tokens: expected,
        ..prompt.ask()
    };
    router.reserve(&ask, at(ms)).unwrap()
}

#[test]
fn charged_at_selection_and_freed_at_the_end() {
    let mut router = router(&pairs(1, 1), json!({}), 1);
    let assignment = reserve(&mut router, 1_000, None, 1_000);
    let booked = Load {
        prefill_tokens: 1_000,
        prefills: 1,
        decode_blocks: 63,
        decode_weight: 63,
        decodes: 1,
    };
    assert_eq!(router.total_load(), booked);
    assert_eq!(load(&router, 1).prefill_tokens, 1_000);
    assert_eq!(load(&router, 101).decode_blocks, 63);
    drop(assignment);
    assert!(router.total_load().is_idle());
    assert!(load(&router, 1).is_idle() && load(&router, 101).is_idle());
}

#[test]
fn only_what_must_be_computed_is_charged() {
    let mut router = router(&pairs(1, 1), json!({}), 1);
    let prompt = Prompt::new(1, 1_000, 16);
    drop(router.reserve(&prompt.ask(), at(1_000)).unwrap());
    // 62 blocks of 16 tokens are cached now.
    let longer = Prompt::new(1, 1_500, 16);
    let assignment = router.reserve(&longer.ask(), at(2_000)).unwrap();
    assert_eq!(router.total_load().prefill_tokens, 1_500 - 62 * 16);
    drop(assignment);
    // A fully cached prompt still counts.
    let known = Prompt::new(1, 992, 16);
    let assignment = router.reserve(&known.ask(), at(3_000)).unwrap();
    assert_eq!(router.total_load().prefill_tokens, 1);
    drop(assignment);
    assert!(router.total_load().is_idle());
}

#[test]
fn the_first_token_ends_prefills_charge_once() {
    let mut router = router(&pairs(1, 1), json!({}), 1);
    let mut first = reserve(&mut router, 1_000, None, 1_000);
    let second = reserve(&mut router, 500, None, 1_000);
    for ms in [2_000, 3_000, 3_000] {
        first.first_token(at(ms));
        let total = router.total_load();
        assert_eq!((total.prefill_tokens, total.prefills), (500, 1));
        assert_eq!(total.decodes, 2);
    }
    first.release();
    first.release();
    first.first_token(at(4_000));
    first.generated(7);
    let total = router.total_load();
    assert_eq!((total.prefills, total.decodes), (1, 1));
    drop(first);
    assert_eq!(router.total_load(), total);
    drop(second);
    assert!(router.total_load().is_idle());
}

#[test]
fn an_answer_grows_with_what_is_written() {
    let mut router = router(&pairs(1, 1), json!({}), 1);
    let mut assignment = reserve(&mut router, 1_000, None, 1_000);
    assignment.first_token(at(1_500));
    for (generated, blocks) in [(1, 63), (8, 63), (9, 64), (600, 100), (1_000_000, 62_563)] {
        assignment.generated(generated);
        let total = router.total_load();
        assert_eq!((total.decode_blocks, total.decodes), (blocks, 1));
    }
    drop(assignment);
    assert!(router.total_load().is_idle());
}

#[test]
fn and_shrinks_towards_its_expected_end() {
    let mut router = router(&pairs(1, 1), json!({}), 1);
    let mut assignment = reserve(&mut router, 1_600, Some(1_600), 1_000);
    assignment.first_token(at(1_500));
    // Weight: the prompt's blocks, the output's blocks times the share still expected, and the output beyond the expectation.
    for (generated, weight, blocks) in [
        (0, 100, 100),
        (400, 119, 125),
        (800, 125, 150),
        (1_200, 119, 175),
        (1_600, 100, 200),
        (5_000, 313, 413),
    ] {
        assignment.generated(generated);
        let total = router.total_load();
        assert_eq!(
            (total.decode_weight, total.decode_blocks, total.decodes),
            (weight, blocks, 1),
            "{generated}"
        );
    }
    drop(assignment);
    assert!(router.total_load().is_idle());
    // An expectation of 0 tokens still books the prompt.
    let assignment = reserve(&mut router, 100, Some(0), 1_000);
    assert_eq!(router.total_load().decode_blocks, 7);
    drop(assignment);
}

#[test]
fn the_expected_end_is_read_from_hints_and_from_max_tokens() {
    let hinted = json!({"agent_hints": {"osl": 100}});
    for (max_tokens, nvext, weight) in [
        (None, json!({}), 26),
        (Some(200), json!({}), 25),
        (Some(200), hinted.clone(), 24),
        (None, hinted, 24),
    ] {
        let mut router = router(&pairs(1, 1), json!({}), 1);
        let mut wish = wish(1, 352).saying(nvext.clone());
        wish.max_tokens = max_tokens;
        let (phase, mut assignment) = wish.prefill(&mut router);
        drop(phase.answered(GOOD, Client::Waits, &mut router));
        // 402 tokens are 26 blocks; a quarter or a half of the last four blocks weighs nothing.
        assignment.generated(50);
        let total = router.total_load();
        assert_eq!(
            (total.decode_blocks, total.decode_weight),
            (26, weight),
            "{max_tokens:?} {nvext}"
        );
    }
}

#[test]
fn a_stream_of_ten_minutes_keeps_its_count_and_one_without_chunks_loses_it() {
    let mut router = router(&pairs(2, 2), json!({"booking_expiry_ms": 120_000}), 1);
    let mut lively = reserve(&mut router, 1_000, None, 1_000);
    lively.first_token(at(1_500));
    let silent = reserve(&mut router, 2_000, None, 1_000);
    for second in 2..600 {
        router.advance(at(second * 1_000));
        if second % 20 == 0 {
            lively.generated(second);
        }
        let total = router.total_load();
        assert!(load(&router, decode_id(&lively)).decodes >= 1, "{second}");
        match second {
            0..120 => assert_eq!((total.prefills, total.decodes), (1, 2), "{second}"),
            // Expiry is checked every half minute.
            120..155 => {}
            _ => assert_eq!((total.prefills, total.decodes), (0, 1), "{second}"),
        }
    }
    // The expired booking is not freed twice.
    drop(silent);
    assert_eq!(router.total_load().decodes, 1);
    drop(lively);
    assert!(router.total_load().is_idle());
}

#[test]
fn one_that_was_silent_counts_again_when_it_speaks() {
    let mut router = router(&pairs(1, 1), json!({}), 1);
    let mut assignment = reserve(&mut router, 1_000, None, 1_000);
    assignment.first_token(at(1_500));
    router.advance(at(290_000));
    assert_eq!(router.total_load().decodes, 1);
    router.advance(at(340_000));
    assert!(router.total_load().is_idle());
    assignment.generated(10);
    assert_eq!(router.total_load().decodes, 1);
    assignment.release();
    assert!(router.total_load().is_idle());
}

#[test]
fn a_retrys_booking_is_its_own() {
    let mut router = router(&pairs(3, 1), json!({"prefill": {"attempts": 3}}), 1);
    let (mut phase, assignment) = wish(1, 1_000).prefill(&mut router);
    for _ in 0..2 {
        let failed = phase.worker().id.0;
        phase = again(phase.answered(status(500), Client::Waits, &mut router));
        assert!(load(&router, failed).is_idle());
        let now = load(&router, phase.worker().id.0);
        assert_eq!((now.prefill_tokens, now.prefills), (1_000, 1));
        let total = router.total_load();
        assert_eq!((total.prefills, total.decodes), (1, 1));
    }
    drop(phase.answered(status(500), Client::Waits, &mut router));
    assert_eq!(router.total_load().prefills, 0);
    drop(assignment);
    assert!(router.total_load().is_idle());
}

#[test]
fn refusals_and_queries_book_nothing() {
    let mut router = router(&pairs(2, 2), json!({}), 1);
    wish(1, 100).targets(&mut router);
    wish(1, 100).within("").refused(&mut router);
    wish(1, 100).prefilled_by(101).refused(&mut router);
    wish(1, 100)
        .saying(json!({"dp_rank": 9}))
        .refused(&mut router);
    assert!(router.total_load().is_idle());
}

#[test]
fn bookings_on_a_worker_that_left_still_end_once() {
    let all = pairs(2, 2);
    let mut router = router(&all, json!({}), 1);
    let (phase, assignment) = wish(1, 1_000)
        .prefilled_by(1)
        .decoded_by(101)
        .prefill(&mut router);
    let rest: Vec<_> = all
        .iter()
        .filter(|w| w["id"] != 1 && w["id"] != 101)
        .cloned()
        .collect();
    adopt(&mut router, &rest);
    let other = wish(2, 500).prefill(&mut router);
    adopt(&mut router, &all);
    drop((phase, assignment));
    let total = router.total_load();
    assert_eq!((total.prefill_tokens, total.decodes), (500, 1));
    drop(other);
    assert!(router.total_load().is_idle());
    for id in [1, 2, 101, 102] {
        assert!(load(&router, id).is_idle());
    }
}

/// A router whose decode worker of 200 blocks is busy above 150.
fn of_200_blocks() -> Router {
    let workers = [
        worker("prefill", 1),
        worker_with("decode", 101, json!({"kv_blocks": 200})),
    ];
    router(
        &workers,
        json!({"admission": {"decode": {"fraction": 0.75}}}),
        1,
    )
}

#[test]
fn found_c4_blocks_count_against_a_threshold_until_the_answer_ends() {
    let mut router = of_200_blocks();
    let mut assignments = Vec::new();
    for nth in 0..8 {
        let mut wish = wish(nth, 1_600);
        wish.max_tokens = Some(100);
        let Ok(Plan::Prefill(phase, mut assignment)) = wish.plan(&mut router) else {
            break;
        };
        drop(phase.answered(GOOD, Client::Waits, &mut router));
        // Four tokens before its end, an answer holds the prompt's 100 blocks and six of its own.
        assignment.generated(96);
        assignments.push(assignment);
        assert_eq!(
            load(&router, 101).decode_blocks,
            106 * assignments.len() as u64,
            "{nth}"
        );
    }
    assert_eq!(assignments.len(), 2);
    assert!(matches!(
        wish(9, 16).refused(&mut router),
        Refusal::Overloaded { .. }
    ));
    assignments.pop();
    wish(10, 16).prefill(&mut router);
}

#[test]
fn found_c5_each_of_n_sequences_has_its_own_output() {
    for (member, sequences) in [("n", 4), ("best_of", 4), ("n", 1)] {
        let mut router = router(&wholes(1), json!({}), 1);
        let mut asked = wish(1, 160);
        asked.max_tokens = Some(64);
        asked.more = json!({member: sequences});
        let (_, mut assignment) = asked.forward(&mut router);
        for quarter in 1..=4 {
            let all = 64 * sequences * quarter / 4;
            assignment.generated(all);
            let load = router.total_load();
            let written = all / 16;
            assert_eq!(load.decode_blocks, 10 + written, "{member} {all}");
            // As many quarters of the output no longer weigh as the answer has finished.
            let weight = 10_000 + written * 1_000 * (4 - quarter) / 4;
            assert_eq!(load.decode_weight, weight.div_ceil(1_000), "{member} {all}");
        }
    }
}

#[test]
fn found_c5_a_batch_of_prompts_has_as_many_outputs() {
    let mut router = router(&wholes(1), json!({}), 1);
    let mut asked = wish(1, 0);
    asked.prompt = json!([vec![1; 80], vec![2; 80]]);
    asked.max_tokens = Some(32);
    let (_, mut assignment) = asked.forward(&mut router);
    let prompt = router.total_load();
    assignment.generated(32);
    let half = router.total_load();
    assert_eq!(half.decode_blocks, prompt.decode_blocks + 2);
    assert_eq!(half.decode_weight, prompt.decode_weight + 1);
}

#[test]
fn found_c6_an_answer_beyond_its_hint_weighs_what_it_holds_beyond() {
    let mut router = router(&pairs(1, 2), policy("kv"), 1);
    let long = wish(1, 1_600)
        .saying(json!({"agent_hints": {"osl": 16}}))
        .decoded_by(101);
    let (phase, mut assignment) = long.prefill(&mut router);
    drop(phase.answered(GOOD, Client::Waits, &mut router));
    assignment.generated(1_616);
    let load = load(&router, 101);
    assert_eq!((load.decode_blocks, load.decode_weight), (201, 200));
    // The lighter load of the other worker is still lighter.
    let other = wish(2, 1_600).decoded_by(102).prefill(&mut router);
    for nth in 3..11 {
        assert_eq!(wish(nth, 16).decoder(&mut router), 102);
    }
    drop((assignment, other));
    assert!(router.total_load().is_idle());
}

#[test]
fn what_is_held_by_answers_near_their_ends_is_not_taken_for_somebody_elses() {
    let mut router = of_200_blocks();
    let mut wish = wish(1, 1_600);
    wish.max_tokens = Some(32);
    let (phase, mut assignment) = wish.prefill(&mut router);
    drop(phase.answered(GOOD, Client::Waits, &mut router));
    assignment.generated(32);
    // The 102 blocks in use of 200 are the booked ones: no other sender holds any.
    router.apply_reports(&[Report {
        worker: WorkerId(101),
        at: at(1_000),
        started: None,
        waiting: Some(0),
        running: Some(1),
        kv_use: Some(0.51),
        kv_blocks: Some(200),
        block_tokens: None,
    }]);
    let worker = router.fleet().get(WorkerId(101)).cloned().unwrap();
    assert_eq!(router.worker_load_in_all(&worker).decode_blocks, 102);
}

#[test]
fn found_what_generates_nothing_counts_as_little_while_it_lasts() {
    for name in ["least_loaded", "kv"] {
        let mut router = router(&wholes(2), policy(name), 1);
        let mut assignments = Vec::new();
        for nth in 1..=3 {
            let (_, first) = router.plain(None).unwrap();
            let (_, second) = router.plain(None).unwrap();
            assignments.extend([first, second]);
            for id in [201, 202] {
                let load = load(&router, id);
                assert_eq!((load.decodes, load.decode_blocks), (nth, nth), "{name}");
            }
        }
        let (_, assignment) = router.plain(None).unwrap();
        let busier = [201, 202]
            .into_iter()
            .max_by_key(|id| load(&router, *id).decodes);
        let (_, other) = wish(1, 64).forward(&mut router);
        assert_ne!(Some(decode_id(&other)), busier, "{name}");
        drop((assignments, assignment, other));
        assert!(router.total_load().is_idle());
    }
    // Frontends manage their workers themselves.
    let direct = json!({"protocol": "direct", "frontends": ["10.9.0.1:80"]});
    let mut router = router(&pairs(1, 1), direct, 1);
    let _held = router.plain(None).unwrap();
    assert!(router.total_load().is_idle());
}
