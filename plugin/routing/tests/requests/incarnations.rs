//! Tests that a prefill worker's binding belongs to one incarnation.

use routing::fleet::{Fleet, Incarnation, Worker, WorkerId};
use routing::outcome::Came;
use routing::rendezvous::NotServed;
use routing::route::{AfterPrefill, Client, Refusal, Router};
use serde_json::{Value, json};

use crate::support::*;

fn sglang() -> Router {
    router("sglang", &two_by_two(), json!({"bootstrap": "ask"}))
}

fn info(port: u16) -> Vec<u8> {
    json!({ "disaggregation_bootstrap_port": port })
        .to_string()
        .into_bytes()
}

fn life(router: &Router, id: u64) -> Incarnation {
    router.fleet().get(WorkerId(id)).unwrap().incarnation()
}

/// Changes a worker and adopts the new fleet.
fn change(router: &mut Router, id: u64, change: impl Fn(&mut Worker)) {
    let mut workers: Vec<Worker> = router.fleet().workers().map(|w| Worker::clone(w)).collect();
    for worker in workers.iter_mut().filter(|worker| worker.id.0 == id) {
        change(worker);
    }
    let version = router.fleet().version() + 1;
    router.adopt(Fleet::new(version, workers));
}

fn moves(router: &mut Router, id: u64, address: &str) {
    change(router, id, |worker| worker.address = address.parse().ok());
}

/// Where the legs of a request that names prefill worker 1 meet.
fn bootstrap(router: &mut Router) -> (Value, Value) {
    let named = json!({"prefill_worker_id": 1});
    let (phase, _assignment) = prefill(ask(router, named.clone()));
    let leg: Value = serde_json::from_slice(&phase.body(&body(&named))).unwrap();
    (leg["bootstrap_host"].clone(), leg["bootstrap_port"].clone())
}

#[test]
fn found_c2_a_binding_ends_with_the_address_it_was_told_at() {
    let mut router = sglang();
    let before = life(&router, 1);
    assert!(router.on_reply(&before, &info(9_000)));
    assert_eq!(bootstrap(&mut router), (json!("127.0.0.1"), json!(9_000)));
    moves(&mut router, 1, "127.0.0.9:1");
    let refused = refusal(ask(&mut router, json!({"prefill_worker_id": 1})));
    assert_eq!(refused, Refusal::NotServed(NotServed::Pending));
    let asked: Vec<String> = router
        .questions()
        .iter()
        .filter(|question| question.worker.id.0 == 1 && !question.is_bound)
        .map(|question| question.destination.to_string())
        .collect();
    assert_eq!(asked, ["127.0.0.9:1"]);
    // An answer from before the move does not count for the new incarnation.
    router.on_reply(&before, &info(9_000));
    let refused = refusal(ask(&mut router, json!({"prefill_worker_id": 1})));
    assert_eq!(refused, Refusal::NotServed(NotServed::Pending));
    let now = life(&router, 1);
    assert!(router.on_reply(&now, &info(9_001)));
    assert_eq!(bootstrap(&mut router), (json!("127.0.0.9"), json!(9_001)));
}

#[test]
fn found_c2_one_that_has_told_is_asked_on_and_another_port_is_another_process() {
    let mut router = sglang();
    let worker = life(&router, 1);
    assert!(router.on_reply(&worker, &info(9_000)));
    let is_asked = |router: &Router| {
        let questions = router.questions();
        let of_it = questions.iter().find(|question| question.worker.id.0 == 1);
        of_it.map(|question| question.is_bound)
    };
    assert_eq!(is_asked(&router), Some(true));
    assert_eq!(bootstrap(&mut router).1, json!(9_000));
    assert!(router.on_reply(&worker, &info(9_000)));
    // An answer without the port changes nothing.
    assert!(!router.on_reply(&worker, b"{}"));
    assert_eq!(bootstrap(&mut router).1, json!(9_000));
    let held = router.remembered_blocks(&router.fleet().get(WorkerId(1)).unwrap().clone());
    assert!(router.on_reply(&worker, &info(9_002)));
    assert_eq!(bootstrap(&mut router).1, json!(9_002));
    assert_eq!(held, 0, "too short a prompt to be remembered");
    // Where the source gives the port, no worker is polled, and a new port is known at once.
    change(&mut router, 1, |worker| worker.bootstrap_port = Some(9_003));
    assert_eq!(is_asked(&router), None);
    assert_eq!(bootstrap(&mut router).1, json!(9_003));
    change(&mut router, 1, |worker| worker.bootstrap_port = Some(9_004));
    assert_eq!(bootstrap(&mut router).1, json!(9_004));
}

#[test]
fn found_c2_one_that_took_no_connection_tells_again_before_it_is_handed_anything() {
    let mut router = sglang();
    for id in [1, 2] {
        let worker = life(&router, id);
        assert!(router.on_reply(&worker, &info(9_000)));
    }
    let (phase, _assignment) = prefill(ask(&mut router, json!({})));
    let failed = phase.worker().id.0;
    drop(phase.answered(UNREACHED, Client::Waits, &mut router));
    let unbound: Vec<u64> = router
        .questions()
        .iter()
        .filter(|question| !question.is_bound)
        .map(|question| question.worker.id.0)
        .collect();
    assert_eq!(unbound, [failed]);
}

#[test]
fn found_c2_a_decode_worker_that_has_moved_gets_no_leg_at_the_address_it_had() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (phase, assignment) = prefill(ask(&mut router, json!({})));
    let decode = assignment.decode.as_ref().unwrap().id.0;
    let other = 23 - decode;
    // All decode workers move: the leg goes to one at its new address.
    moves(&mut router, decode, "127.0.0.9:500");
    moves(&mut router, other, "127.0.0.9:501");
    let AfterPrefill::Decode { dispatch, .. } = phase.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    assert!(!dispatch.destinations.is_empty());
    for destination in dispatch.destinations {
        assert_eq!(destination.ip().to_string(), "127.0.0.9");
    }
}

/// Requests of former incarnations fail, each after the worker has come back at another address.
fn failed_in_a_former_life(came: Came) -> Router {
    let mut router = router("nixl", &two_by_two(), json!({"health": {"eject_after": 1}}));
    for time in 1..=4 {
        let (phase, mut assignment) = prefill(ask(&mut router, json!({"decode_worker_id": 11})));
        let AfterPrefill::Decode {
            target: (worker, key),
            staged,
            ..
        } = phase.answered(GOOD, Client::Waits, &mut router)
        else {
            panic!("no decode");
        };
        router.assign_decode(&mut assignment, &worker, key, staged);
        moves(&mut router, 11, &format!("127.0.0.9:{time}"));
        router.leg_ended(&mut assignment, came);
        router.request_ended(&assignment);
    }
    router
}

#[test]
fn found_c2_what_fails_in_a_former_life_is_not_held_against_the_one_that_came_back() {
    for came in [
        Came::Reset,
        Came::Cut,
        Came::Refused,
        Came::Status(500),
        Came::Status(503),
        Came::TimedOut,
        Came::FailedInside,
    ] {
        let mut router = failed_in_a_former_life(came);
        assert_eq!(router.ejected(), 0, "{came:?}");
        assert!(router.take_ejections().is_empty(), "{came:?}");
        // Not passed over either: both decode workers get requests in turn.
        let mut decoders: Vec<u64> = (0..8)
            .map(|_| pair(ask(&mut router, json!({}))).1)
            .collect();
        decoders.sort_unstable();
        decoders.dedup();
        assert_eq!(decoders, [11, 12], "{came:?}");
    }
}

#[test]
fn found_c2_a_suspicion_that_is_decided_late_dies_with_the_life_it_is_of() {
    let mut router = router("nixl", &two_by_two(), json!({"health": {"eject_after": 1}}));
    let (phase, assignment) = prefill(ask(&mut router, json!({})));
    let failed = phase.worker().id.0;
    let after = phase.answered(status(500), Client::Waits, &mut router);
    assert_eq!(word(&after), "again");
    moves(&mut router, failed, "127.0.0.9:1");
    let AfterPrefill::Again(second) = after else {
        panic!("not asked again");
    };
    // A success of the second worker after the first one's failure would otherwise eject the first.
    drop(second.answered(GOOD, Client::Waits, &mut router));
    router.request_ended(&assignment);
    assert_eq!(router.ejected(), 0);
}
