//! What engines tell of themselves: it counts on top of what is booked, for as long as it is fresh, and changes no booking.

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
fn what_an_engine_has_from_elsewhere_counts_until_the_report_is_old() {
    let mut router = router(&pairs(1, 2), least_loaded(), 1);
    router.advance(at(1_000));
    router.hear_reports(&[running(101, 1_000, 3), running(102, 1_000, 0)]);
    assert_eq!(on_first(&mut router, 1_000), 0);
    assert!(load(&router, 101).is_idle() && router.total_load().is_idle());
    assert_eq!(on_first(&mut router, 5_999), 0);
    // Unknown, not idle: chance decides as where nothing was ever told.
    let old = on_first(&mut router, 6_000);
    assert!((1..16).contains(&old), "{old}");
    assert_eq!(router.report_of(WorkerId(101)).unwrap().running, Some(3));
}

#[test]
fn what_is_booked_here_is_not_foreign() {
    let mut router = router(&pairs(1, 2), least_loaded(), 1);
    let held = wish(1, 64).decoded_by(101).prefill(&mut router);
    router.hear_reports(&[running(101, 1_000, 1)]);
    let other = wish(2, 64).decoded_by(102).prefill(&mut router);
    let even = on_first(&mut router, 1_100);
    assert!((1..16).contains(&even), "{even}");
    // An older report than the last one says nothing, and nor does one of a worker that is not there.
    router.hear_reports(&[running(101, 900, 9), running(999, 2_000, 9)]);
    let even = on_first(&mut router, 1_100);
    assert!((1..16).contains(&even), "{even}");
    router.hear_reports(&[running(101, 1_200, 2)]);
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
    router.hear_reports(&[used(101, 1_000, 0.2), used(102, 1_000, 0.1)]);
    assert_eq!(on_first(&mut router, 1_000), 0);
    router.hear_reports(&[used(101, 1_500, 0.1), used(102, 1_500, 0.6)]);
    assert_eq!(on_first(&mut router, 1_500), 16);
    router.hear_reports(&[used(101, 2_000, 0.7), used(102, 2_000, 0.6)]);
    wish(1, 64).at(2_000).refused(&mut router);
}

#[test]
fn foreign_prompts_wait_as_long_as_ones_own_do() {
    let mut router = router(&pairs(2, 1), policy("kv"), 1);
    for nth in 0..4 {
        wish(nth, 1600).at(1_000 * (nth + 1)).served(&mut router);
    }
    router.advance(at(10_000));
    router.hear_reports(&[Report {
        waiting: Some(2),
        ..report(1, 10_000)
    }]);
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
    router.hear_reports(&[running(101, 1_000, 4), running(102, 1_000, 3)]);
    assert_eq!(on_first(&mut router, 1_000), 16);
    router.hear_reports(&[running(101, 2_000, 6), running(102, 2_000, 1)]);
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
    router.hear_reports(&[fits(2_000, 100)]);
    assert_eq!(remembered(&router, 1), 80);
    router.hear_reports(&[fits(3_000, 50)]);
    assert_eq!(remembered(&router, 1), 50);
    // A report that lacks it does not take it back.
    router.hear_reports(&[report(1, 4_000)]);
    wish(3, 640).served(&mut router);
    assert_eq!(remembered(&router, 1), 50);
    // In blocks of another size there is room for more of ours.
    router.hear_reports(&[Report {
        block_tokens: Some(32),
        ..fits(5_000, 40)
    }]);
    wish(4, 640).served(&mut router);
    assert_eq!(remembered(&router, 1), 80);
    // What its source says comes first.
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
    router.hear_reports(&[sized(1, 1_000, 16), sized(101, 1_000, 64)]);
    let warnings = router.take_warnings();
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].contains("64") && warnings[0].contains("16"));
    router.hear_reports(&[sized(101, 2_000, 64)]);
    assert!(router.take_warnings().is_empty());
}

#[test]
fn an_engine_that_has_started_anew_is_another_worker() {
    let mut router = router(&pairs(1, 1), policy("kv"), 1);
    let started = |ms, seconds: u64| Report {
        started: Some(Duration::from_secs(seconds)),
        ..report(1, ms)
    };
    router.hear_reports(&[started(1_000, 500)]);
    wish(1, 640).served(&mut router);
    assert_eq!(remembered(&router, 1), 40);
    // Some engines work the time out anew for each answer.
    router.hear_reports(&[Report {
        started: Some(Duration::from_millis(500_400)),
        ..report(1, 2_000)
    }]);
    router.hear_reports(&[report(1, 3_000)]);
    assert_eq!(remembered(&router, 1), 40);
    router.hear_reports(&[started(4_000, 900)]);
    assert_eq!(remembered(&router, 1), 0);
}
