//! Tests of engine reports: they count on top of bookings while they are fresh, and change no booking.

use std::time::Duration;

use routing::fleet::WorkerId;
use routing::route::{Report, Router};
use serde_json::{Value, json};

use crate::support::*;

fn report(worker: u64, ms: u64) -> Report {
    Report {
        worker: WorkerId(worker),
        at: at(ms),
        started: None,
        waiting: None,
        running: None,
        kv_use: None,
        kv_blocks: None,
        block_tokens: None,
    }
}

fn running(worker: u64, ms: u64, running: u32) -> Report {
    Report {
        running: Some(running),
        ..report(worker, ms)
    }
}

fn least_loaded() -> Value {
    policy("least_loaded")
}

/// How many of 16 requests decode on the first of two workers.
fn on_first(router: &mut Router, ms: u64) -> usize {
    let wish = wish(1, 64).at(ms);
    (0..16).filter(|_| wish.decoder(router) == 101).count()
}

#[test]
fn what_an_engine_has_from_elsewhere_counts_until_it_means_nothing() {
    let mut router = router(&pairs(1, 2), least_loaded(), 1);
    router.advance(at(1_000));
    router.apply_reports(&[running(101, 1_000, 3), running(102, 1_000, 0)]);
    assert_eq!(on_first(&mut router, 1_000), 0);
    assert!(load(&router, 101).is_idle() && router.total_load().is_idle());
    assert_eq!(on_first(&mut router, 5_999), 0);
    // No further reports: the last one counts for as long as a booking of that time would.
    assert_eq!(on_first(&mut router, 300_999), 0);
    let old = on_first(&mut router, 301_000);
    assert!((1..16).contains(&old), "{old}");
    assert_eq!(router.report_of(WorkerId(101)).unwrap().running, Some(3));
}

#[test]
fn what_is_booked_here_is_not_foreign() {
    let mut router = router(&pairs(1, 2), least_loaded(), 1);
    let held = wish(1, 64).decoded_by(101).prefill(&mut router);
    router.apply_reports(&[running(101, 1_000, 1)]);
    let other = wish(2, 64).decoded_by(102).prefill(&mut router);
    let even = on_first(&mut router, 1_100);
    assert!((1..16).contains(&even), "{even}");
    // A report older than the last one is ignored, and so is one of an unknown worker.
    router.apply_reports(&[running(101, 900, 9), running(999, 2_000, 9)]);
    let even = on_first(&mut router, 1_100);
    assert!((1..16).contains(&even), "{even}");
    router.apply_reports(&[running(101, 1_200, 2), running(102, 1_200, 1)]);
    assert_eq!(on_first(&mut router, 1_200), 0);
    drop((held, other));
}

#[test]
fn blocks_in_use_beyond_those_booked_make_a_worker_dear_and_busy() {
    let fields = with(
        policy("kv"),
        json!({"admission": {"decode": {"fraction": 0.5}}}),
    );
    let mut router = router(&pairs(1, 2), fields, 1);
    let used = |worker, ms, part| Report {
        kv_use: Some(part),
        kv_blocks: Some(1000),
        ..report(worker, ms)
    };
    router.advance(at(1_000));
    router.apply_reports(&[used(101, 1_000, 0.2), used(102, 1_000, 0.1)]);
    assert_eq!(on_first(&mut router, 1_000), 0);
    router.apply_reports(&[used(101, 1_500, 0.1), used(102, 1_500, 0.6)]);
    assert_eq!(on_first(&mut router, 1_500), 16);
    router.apply_reports(&[used(101, 2_000, 0.7), used(102, 2_000, 0.6)]);
    wish(1, 64).at(2_000).refused(&mut router);
}

#[test]
fn foreign_prompts_wait_as_long_as_ones_own_do() {
    let mut router = router(&pairs(2, 1), policy("kv"), 1);
    for nth in 0..4 {
        wish(nth, 1600).at(1_000 * (nth + 1)).served(&mut router);
    }
    router.advance(at(10_000));
    let waiting = |worker, waiting| Report {
        waiting: Some(waiting),
        ..report(worker, 10_000)
    };
    router.apply_reports(&[waiting(1, 2), waiting(2, 0)]);
    assert_eq!(
        wish(50, 64).at(10_000).prefillers(&mut router, 8, 2),
        [0, 8]
    );
}

#[test]
fn the_ranks_of_a_worker_share_what_it_tells_evenly() {
    let workers = [
        worker("prefill", 1),
        worker_with("decode", 101, json!({"dp_size": 2})),
        worker("decode", 102),
    ];
    let mut router = router(&workers, least_loaded(), 1);
    router.advance(at(1_000));
    router.apply_reports(&[running(101, 1_000, 4), running(102, 1_000, 3)]);
    assert_eq!(on_first(&mut router, 1_000), 16);
    router.apply_reports(&[running(101, 2_000, 6), running(102, 2_000, 1)]);
    assert_eq!(on_first(&mut router, 2_000), 0);
}

#[test]
fn a_capacity_that_becomes_known_forgets_nothing_that_fits() {
    let mut router = router(&pairs(1, 1), policy("kv"), 1);
    wish(1, 640).served(&mut router);
    wish(2, 640).served(&mut router);
    assert_eq!(remembered(&router, 1), 80);
    let fits = |ms, blocks| Report {
        kv_blocks: Some(blocks),
        ..report(1, ms)
    };
    router.apply_reports(&[fits(2_000, 100)]);
    assert_eq!(remembered(&router, 1), 80);
    router.apply_reports(&[fits(3_000, 50)]);
    assert_eq!(remembered(&router, 1), 50);
    // A report without the figure does not withdraw it.
    router.apply_reports(&[report(1, 4_000)]);
    wish(3, 640).served(&mut router);
    assert_eq!(remembered(&router, 1), 50);
    // The engine's larger blocks make room for more of the router's blocks.
    router.apply_reports(&[Report {
        block_tokens: Some(32),
        ..fits(5_000, 40)
    }]);
    wish(4, 640).served(&mut router);
    assert_eq!(remembered(&router, 1), 80);
    // The source's figure takes precedence.
    adopt(
        &mut router,
        &[
            worker_with("prefill", 1, json!({"kv_blocks": 60})),
            worker("decode", 101),
        ],
    );
    assert_eq!(remembered(&router, 1), 60);
}

#[test]
fn a_block_size_that_is_not_the_pools_is_warned_of_once() {
    let mut router = router(&pairs(1, 1), policy("kv"), 1);
    let sized = |worker, ms, tokens| Report {
        block_tokens: Some(tokens),
        ..report(worker, ms)
    };
    router.apply_reports(&[sized(1, 1_000, 16), sized(101, 1_000, 64)]);
    let warnings = router.take_warnings();
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].contains("64") && warnings[0].contains("16"));
    router.apply_reports(&[sized(101, 2_000, 64)]);
    assert!(router.take_warnings().is_empty());
}

#[test]
fn an_engine_that_has_started_anew_is_another_worker() {
    let mut router = router(&pairs(1, 1), policy("kv"), 1);
    let started = |ms, seconds: u64| Report {
        started: Some(Duration::from_secs(seconds)),
        ..report(1, ms)
    };
    router.apply_reports(&[started(1_000, 500)]);
    wish(1, 640).served(&mut router);
    assert_eq!(remembered(&router, 1), 40);
    // Some engines compute the start time anew for each answer.
    router.apply_reports(&[Report {
        started: Some(Duration::from_millis(500_400)),
        ..report(1, 2_000)
    }]);
    router.apply_reports(&[report(1, 3_000)]);
    assert_eq!(remembered(&router, 1), 40);
    router.apply_reports(&[started(4_000, 900)]);
    assert_eq!(remembered(&router, 1), 0);
}

/// Estimated requests on a worker, from all senders.
fn believed(router: &Router, id: u64) -> u64 {
    let worker = router.fleet().get(WorkerId(id)).unwrap();
    router.worker_load_in_all(worker).decodes
}

/// An engine of 1,000 blocks with that many requests waiting, and that part of its cache in use.
fn engine(worker: u64, ms: u64, waiting: u32, kv_use: f32) -> Report {
    Report {
        waiting: Some(waiting),
        running: Some(0),
        kv_use: Some(kv_use),
        kv_blocks: Some(1000),
        ..report(worker, ms)
    }
}

/// How many of 48 requests at once each of three engines gets, where the first is overloaded and silent since 1,000 ms.
fn spread(fields: Value, now: u64) -> Vec<u64> {
    let mut router = router(&wholes(3), fields, 1);
    router.advance(at(1_000));
    router.apply_reports(&[engine(201, 1_000, 60, 0.9)]);
    for ms in (1_000..=now).step_by(1_000) {
        router.advance(at(ms));
        router.apply_reports(&[engine(202, ms, 0, 0.1), engine(203, ms, 1, 0.1)]);
    }
    router.advance(at(now));
    let assignments = (0..48).map(|nth| wish(nth, 64).at(now).forward(&mut router).1);
    let assignments: Vec<_> = assignments.collect();
    counts(assignments.iter().map(decode_id), 201, 3)
}

#[test]
fn found_w1_an_overloaded_engine_whose_metrics_hang_gets_nothing() {
    for fields in [policy("kv"), policy("least_loaded")] {
        for now in [1_000, 4_000, 60_000] {
            let spread = spread(fields.clone(), now);
            assert_eq!(spread[0], 0, "{fields} {now}: {spread:?}");
        }
    }
}

#[test]
fn found_w1_one_that_never_told_is_like_the_median_of_its_peers() {
    let mut router = router(&pairs(2, 4), policy("least_loaded"), 1);
    router.advance(at(1_000));
    assert_eq!(believed(&router, 104), 0);
    router.apply_reports(&[running(101, 1_000, 9), running(102, 1_000, 2)]);
    // The mean of the middle two; prefill workers are not peers here.
    assert_eq!((believed(&router, 104), believed(&router, 1)), (6, 0));
    router.apply_reports(&[running(103, 1_001, 3)]);
    assert_eq!(believed(&router, 104), 3);
    // Own bookings are added.
    let held = wish(1, 64).decoded_by(104).prefill(&mut router);
    assert_eq!(believed(&router, 104), 4);
    drop(held);
    // A worker that has just joined gets the median too.
    adopt(&mut router, &pairs(2, 5));
    assert_eq!(believed(&router, 105), 3);
}

#[test]
fn found_w1_one_that_fell_silent_has_its_last_figure_or_the_median() {
    let mut router = router(&pairs(1, 3), json!({"booking_expiry_ms": 20_000}), 1);
    router.advance(at(1_000));
    router.apply_reports(&[running(101, 1_000, 9), running(102, 1_000, 1)]);
    let held = wish(1, 64).decoded_by(101).prefill(&mut router);
    let mut seen = Vec::new();
    for (ms, of_103) in [(5_000, 4), (9_000, 20), (12_000, 4), (21_500, 2)] {
        router.advance(at(ms));
        router.apply_reports(&[running(103, ms, of_103)]);
        seen.push([101, 102].map(|id| believed(&router, id)));
    }
    // Fresh; silent: the larger of its last figure and the median, twice; expired: the median. One request on 101 is booked
    // here.
    assert_eq!(seen, [[10, 1], [21, 20], [10, 4], [3, 2]]);
    drop(held);
}

#[test]
fn found_w1_a_figure_that_cannot_be_read_is_not_zero() {
    let mut router = router(&wholes(3), policy("kv"), 1);
    router.advance(at(1_000));
    let all = [engine(201, 1_000, 60, 0.9), engine(202, 1_000, 2, 0.5)];
    router.apply_reports(&all);
    router.apply_reports(&[engine(203, 1_000, 0, 0.1)]);
    // The engine still answers, but with no usable figure, or only some.
    router.apply_reports(&[report(201, 2_000)]);
    assert_eq!(believed(&router, 201), 60);
    let part = Report {
        waiting: Some(1),
        running: Some(0),
        ..report(201, 3_000)
    };
    router.apply_reports(&[part]);
    let worker = router.fleet().get(WorkerId(201)).unwrap();
    let load = router.worker_load_in_all(worker);
    assert_eq!((load.decodes, load.decode_blocks), (1, 900));
}

#[test]
fn found_w1_who_is_too_busy_by_its_last_word_is_refused_no_longer_than_that_means_anything() {
    let fields = json!({"admission": {"decode": {"fraction": 0.5}}});
    let mut router = router(&pairs(1, 1), fields, 1);
    router.advance(at(1_000));
    router.apply_reports(&[engine(101, 1_000, 0, 0.9)]);
    wish(1, 64).at(250_000).refused(&mut router);
    drop(wish(1, 64).at(301_000).prefill(&mut router));
}

#[test]
fn found_w1_what_waits_counts_before_any_prompt_has_been_read_here() {
    let mut router = router(&pairs(2, 1), policy("kv"), 1);
    router.advance(at(1_000));
    router.apply_reports(&[engine(1, 1_000, 60, 0.0), engine(2, 1_000, 0, 0.0)]);
    assert_eq!(wish(1, 64).prefillers(&mut router, 8, 2), [0, 8]);
}
