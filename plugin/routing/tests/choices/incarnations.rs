//! Tests that knowledge of a worker ends with its incarnation: its address, role, ranks and process.

use routing::fleet::WorkerId;
use routing::route::{Client, Report, Router};
use serde_json::{Value, json};

use crate::support::*;

/// Two prefill workers, the second with these fields, and a decode worker.
fn with_second(fields: Value) -> Vec<Value> {
    vec![
        worker("prefill", 1),
        worker_with("prefill", 2, fields),
        worker("decode", 101),
    ]
}

/// A router with all possible knowledge of worker 2: its prefixes, its slowness, its engine's report, and its failures.
fn well_known() -> Router {
    let mut router = router(&with_second(json!({})), json!({}), 1);
    for (id, ms_a_prompt) in [(1, 100), (2, 2_000)] {
        for name in 0..8 {
            let now = id * 100_000 + name * 10_000;
            let (phase, assignment) = wish(name, 800)
                .prefilled_by(id)
                .at(now)
                .prefill(&mut router);
            router.advance(at(now + ms_a_prompt));
            drop(phase.answered(GOOD, Client::Waits, &mut router));
            drop(assignment);
        }
    }
    let slow = slowness(&mut router, 2);
    assert!(slow > 1.3, "{slow}");
    router.apply_reports(&[report(2, 290_000)]);
    for id in [2, 1, 2, 2] {
        let (phase, assignment) = wish(90 + id, 100)
            .prefilled_by(id)
            .at(290_000)
            .prefill(&mut router);
        let answer = if id == 1 { GOOD } else { status(500) };
        drop(phase.answered(answer, Client::Waits, &mut router));
        router.request_ended(&assignment);
    }
    assert!(remembered(&router, 2) > 0 && router.is_ejected(WorkerId(2)));
    assert!(router.report_of(WorkerId(2)).is_some());
    router
}

fn report(worker: u64, ms: u64) -> Report {
    Report {
        worker: WorkerId(worker),
        at: at(ms),
        started: Some(at(500)),
        waiting: Some(7),
        running: Some(3),
        kv_use: None,
        kv_blocks: None,
        block_tokens: None,
    }
}

/// A prefill worker's slowness: its time relative to all workers together.
fn slowness(router: &mut Router, id: u64) -> f64 {
    let body = wish(77, 640).body();
    let input = routing::route::PlanInput {
        now: at(295_000),
        explain: routing::route::Explain::ForCaller,
        ..Default::default()
    };
    let plan = router.plan(routing::request::Generation::Completions, &body, input);
    drop(plan.unwrap());
    let explained: Value = serde_json::from_str(&router.take_explanation().unwrap()).unwrap();
    let candidates = explained[0]["candidates"].as_array().unwrap();
    let of_it = candidates.iter().find(|candidate| {
        let name = candidate["worker"].as_str().unwrap();
        name.ends_with(&format!(":{id}"))
    });
    of_it.unwrap()["terms"]["slowness"].as_f64().unwrap()
}

fn is_a_stranger(router: &mut Router) {
    assert_eq!(remembered(router, 2), 0);
    assert!(!router.is_ejected(WorkerId(2)));
    assert!(load(router, 2).is_idle());
    assert!((slowness(router, 2) - 1.0).abs() < 0.01);
}

#[test]
fn found_c2_what_was_learned_of_a_worker_ends_with_its_address_its_ranks_or_its_role() {
    for change in [json!({"address": "10.0.0.77:2"}), json!({"dp_size": 2})] {
        let mut router = well_known();
        // A request under way on the old incarnation does not count for the new one.
        let (phase, assignment) = wish(3, 400)
            .prefilled_by(2)
            .at(294_000)
            .prefill(&mut router);
        adopt(&mut router, &with_second(change.clone()));
        assert_eq!(router.report_of(WorkerId(2)), None, "{change}");
        is_a_stranger(&mut router);
        drop((phase, assignment));
        is_a_stranger(&mut router);
        assert!(router.total_load().is_idle());
    }
    let mut router = well_known();
    let decoding = [
        worker("prefill", 1),
        worker("decode", 2),
        worker("decode", 101),
    ];
    adopt(&mut router, &decoding);
    assert_eq!(remembered(&router, 2), 0);
    assert!(!router.is_ejected(WorkerId(2)));
    adopt(&mut router, &with_second(json!({})));
    is_a_stranger(&mut router);
    // Changes that do not end an incarnation keep the knowledge.
    let mut router = well_known();
    let before = remembered(&router, 2);
    adopt(
        &mut router,
        &with_second(json!({"name": "another name", "kv_blocks": 90_000})),
    );
    assert_eq!(remembered(&router, 2), before);
    assert!(router.is_ejected(WorkerId(2)));
}

#[test]
fn found_c2_an_engine_that_tells_another_start_is_another() {
    let mut router = well_known();
    let again = Report {
        started: Some(at(293_000)),
        waiting: None,
        running: None,
        ..report(2, 294_000)
    };
    router.apply_reports(&[again]);
    is_a_stranger(&mut router);
}

#[test]
fn found_c2_a_charge_of_a_life_that_has_ended_is_not_the_next_ones() {
    let mut router = router(&with_second(json!({})), json!({}), 1);
    let held: Vec<_> = (0..3)
        .map(|name| wish(name, 400).prefilled_by(2).prefill(&mut router))
        .collect();
    assert_eq!(load(&router, 2).prefills, 3);
    for turn in 0..4 {
        let address = format!("10.0.0.{}:2", 100 + turn);
        adopt(&mut router, &with_second(json!({"address": address})));
        assert!(load(&router, 2).is_idle(), "{turn}");
        let (phase, assignment) = wish(9, 400).prefilled_by(2).prefill(&mut router);
        assert_eq!(load(&router, 2).prefills, 1, "{turn}");
        drop((phase, assignment));
    }
    assert_eq!(router.total_load().prefills, 3);
    drop(held);
    assert!(router.total_load().is_idle() && load(&router, 2).is_idle());
}

/// A bootstrap server at another port is another process: earlier knowledge does not apply to it.
#[test]
fn found_c2_one_that_tells_another_port_is_a_stranger() {
    let asked = json!({"protocol": "sglang", "bootstrap": "ask"});
    let mut router = router(&pairs(1, 1), asked, 1);
    let life = router.fleet().get(WorkerId(1)).unwrap().incarnation();
    let port = |port: u16| json!({"disaggregation_bootstrap_port": port}).to_string();
    let serve = |router: &mut Router| drop(wish(1, 800).prefill(router));
    assert!(router.on_reply(&life, port(9_000).as_bytes()));
    serve(&mut router);
    let held = remembered(&router, 1);
    assert!(held > 0);
    assert!(router.on_reply(&life, port(9_000).as_bytes()));
    assert_eq!(remembered(&router, 1), held, "the same one");
    assert!(router.on_reply(&life, port(9_001).as_bytes()));
    assert_eq!(remembered(&router, 1), 0);
    // The same where the worker's source gives the port.
    for (port, is_kept) in [(9_001, true), (9_002, false)] {
        serve(&mut router);
        assert_eq!(remembered(&router, 1), held);
        let prefill = worker_with("prefill", 1, json!({"bootstrap_port": port}));
        adopt(&mut router, &[prefill, worker("decode", 101)]);
        let left = if is_kept { held } else { 0 };
        assert_eq!(remembered(&router, 1), left, "{port}");
    }
}
