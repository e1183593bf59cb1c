//! Tests of workers that drain or are unhealthy according to their source: which requests they still get, and what they keep.

use std::net::SocketAddr;

use routing::fleet::{Condition, Fleet, Worker, WorkerId};
use routing::rendezvous::NotServed;
use routing::route::{AfterPrefill, Client, PinProblem, Refusal, Router};
use serde_json::{Value, json};

use crate::support::*;

/// Sets the condition of these workers.
fn say(router: &mut Router, condition: Condition, of: &[u64]) {
    let said = router.fleet().workers().map(|worker| {
        let mut worker = Worker::clone(worker);
        if of.contains(&worker.id.0) {
            worker.condition = condition;
        }
        worker
    });
    let said: Vec<Worker> = said.collect();
    let version = router.fleet().version() + 1;
    router.adopt(Fleet::new(version, said));
}

fn drain(router: &mut Router, who: &[u64]) {
    say(router, Condition::Draining, who);
}

const POLICIES: [&str; 7] = [
    "kv",
    "round_robin",
    "random",
    "power_of_two",
    "least_loaded",
    "prefix_hash",
    "session",
];

/// A router with this policy for both roles.
fn under(policy: &str) -> Router {
    let fields = json!({"selection": {"prefill": policy, "decode": policy}});
    router("nixl", &two_by_two(), fields)
}

/// The ports that a plain request, and the decode leg of another, may go to.
fn ports(router: &mut Router) -> (Vec<u16>, Vec<u16>) {
    let (plain, _) = router.plain(None).unwrap();
    let (phase, assignment) = prefill(ask(router, json!({})));
    let AfterPrefill::Decode { dispatch, .. } = phase.answered(GOOD, Client::Waits, router) else {
        panic!("no decode");
    };
    drop(assignment);
    let ports = |to: &[SocketAddr]| to.iter().map(SocketAddr::port).collect();
    (ports(&plain.destinations), ports(&dispatch.destinations))
}

#[test]
fn one_that_drains_gets_nothing_new_under_any_policy() {
    for policy in POLICIES {
        let mut router = under(policy);
        drain(&mut router, &[2, 12]);
        for _ in 0..20 {
            assert_eq!(pair(ask(&mut router, json!({}))), (1, 11), "{policy}");
            assert_eq!(who(&mut router), (1, 11), "{policy}");
            assert_eq!(ports(&mut router), (vec![11], vec![11]), "{policy}");
        }
    }
}

#[test]
fn one_that_may_be_listed_as_draining_is_so_from_the_beginning() {
    let mut workers = two_by_two();
    workers[0] = worker_with("prefill", 1, json!({"draining": true}));
    let mut router = router("nixl", &workers, json!({}));
    for _ in 0..4 {
        assert_eq!(pair(ask(&mut router, json!({}))).0, 2);
    }
}

#[test]
fn a_role_whose_workers_all_drain_counts_as_absent_though_the_model_is_known() {
    let refused = |who: &[u64], fields: Value| {
        let mut router = router("nixl", &two_by_two(), fields);
        drain(&mut router, who);
        (refusal(ask(&mut router, json!({}))), router)
    };
    let not_served = Refusal::NotServed;
    let (why, _) = refused(&[1, 2], json!({}));
    assert_eq!(why, not_served(NotServed::NotActivated));
    let (why, _) = refused(&[11, 12], json!({}));
    assert_eq!(why, not_served(NotServed::NoDecode));
    let (why, mut router) = refused(&[1, 2, 11, 12], json!({}));
    assert_eq!(why, not_served(NotServed::Vacant));
    assert!(router.plain(None).is_err() && !router.can_serve_any());
    assert_eq!(why.status(), 503);
    // Also where the model was unknown before.
    let all = two_by_two().into_iter();
    let all: Vec<Value> = all
        .map(|worker| with(worker, json!({"draining": true})))
        .collect();
    let mut fresh = self::router("nixl", &all, json!({}));
    assert_eq!(
        refusal(ask(&mut fresh, json!({}))),
        not_served(NotServed::Vacant)
    );
    // A decode worker that runs whole requests takes them meanwhile.
    let mut router = self::router(
        "nixl",
        &two_by_two(),
        json!({"decode": {"runs_whole_requests": true}}),
    );
    drain(&mut router, &[1, 2, 11]);
    let (dispatch, _) = forward(ask(&mut router, json!({})));
    assert_eq!(dispatch.destinations[0].port(), 12);
    assert_eq!(dispatch.destinations.len(), 1);
}

#[test]
fn two_sets_are_no_longer_ambiguous_once_one_of_them_drains() {
    let mut workers = two_by_two();
    workers[2] = worker_with("decode", 11, json!({"set": "old"}));
    let mut router = router("nixl", &workers, json!({}));
    let why = refusal(ask(&mut router, json!({})));
    assert_eq!(why, Refusal::NotServed(NotServed::Ambiguous));
    drain(&mut router, &[11]);
    assert_eq!(pair(ask(&mut router, json!({}))).1, 12);
}

#[test]
fn who_names_one_that_drains_is_told_so() {
    for protocol in ["nixl", "sglang", "direct"] {
        let mut router = router(protocol, &two_by_two(), json!({"on_stale_pin": "reject"}));
        drain(&mut router, &[2, 12]);
        for (field, id) in [
            ("prefill_worker_id", 2),
            ("decode_worker_id", 12),
            ("backend_instance_id", 12),
        ] {
            for annotations in [json!([]), json!(["query_instance_id:"])] {
                let refused = refusal(ask(
                    &mut router,
                    json!({field: id, "annotations": annotations}),
                ));
                let problem = PinProblem::Draining;
                let id = WorkerId(id);
                assert_eq!(refused, Refusal::Pin { field, id, problem });
                assert!(refused.to_string().contains("draining"), "{refused}");
            }
        }
        assert!(router.total_load().is_idle());
    }
}

#[test]
fn it_keeps_what_it_has_until_it_leaves() {
    let mut router = under("kv");
    let (phase, mut assignment) = prefill(ask(&mut router, json!({})));
    let (prefill_id, decode_id) = (phase.worker().id, assignment.decode.as_ref().unwrap().id);
    let booked = |router: &Router, id: WorkerId| {
        let worker = router.fleet().get(id).unwrap();
        (router.worker_load(worker), router.remembered_blocks(worker))
    };
    let before = (booked(&router, prefill_id), booked(&router, decode_id));
    assert!(!before.0.0.is_idle() && !before.1.0.is_idle());
    drain(&mut router, &[prefill_id.0, decode_id.0]);
    let after = (booked(&router, prefill_id), booked(&router, decode_id));
    assert_eq!(before, after);
    // An answer from a draining worker is booked there.
    let other = 23 - decode_id.0;
    let address = |router: &Router, id: u64| router.fleet().get(WorkerId(id)).unwrap().address;
    let (here, there) = (address(&router, decode_id.0), address(&router, other));
    router.served_by(&mut assignment, there.unwrap());
    assert_eq!(assignment.decode.as_ref().unwrap().id.0, other);
    router.served_by(&mut assignment, here.unwrap());
    assert_eq!(assignment.decode.as_ref().unwrap().id, decode_id);
    drop((phase, assignment));
    assert!(router.total_load().is_idle());
}

#[test]
fn a_decode_leg_that_is_yet_to_go_goes_elsewhere_if_it_can_and_there_if_it_must() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    for others_too in [false, true] {
        let (phase, assignment) = prefill(ask(&mut router, json!({})));
        let picked = assignment.decode.as_ref().unwrap().id.0;
        match others_too {
            false => drain(&mut router, &[picked]),
            true => drain(&mut router, &[11, 12]),
        }
        let wanted = if others_too { picked } else { 23 - picked };
        let AfterPrefill::Decode {
            dispatch, target, ..
        } = phase.answered(GOOD, Client::Waits, &mut router)
        else {
            panic!("no decode");
        };
        assert_eq!(target.0.id.0, wanted);
        assert_eq!(dispatch.destinations.len(), 1);
        assert_eq!(u64::from(dispatch.destinations[0].port()), wanted);
        say(&mut router, Condition::Ready, &[11, 12]);
    }
    // The caller named the worker before it drained, so the worker still finishes the request.
    let (phase, _assignment) = prefill(ask(&mut router, json!({"decode_worker_id": 11})));
    drain(&mut router, &[11]);
    let AfterPrefill::Decode { target, .. } = phase.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    assert_eq!(target.0.id.0, 11);
}

#[test]
fn one_that_drains_takes_no_second_try() {
    let workers = [
        worker("prefill", 1),
        worker("prefill", 2),
        worker("decode", 11),
    ];
    let mut router = router("nixl", &workers, json!({}));
    let (phase, _assignment) = prefill(ask(&mut router, json!({})));
    let first = phase.worker().id.0;
    drain(&mut router, &[3 - first]);
    let after = phase.answered(status(500), Client::Waits, &mut router);
    assert_eq!(word(&after), "refused");
}

#[test]
fn one_that_is_not_well_is_passed_over_while_another_is() {
    for policy in POLICIES {
        let mut router = under(policy);
        say(&mut router, Condition::Unhealthy, &[1, 11]);
        for _ in 0..20 {
            assert_eq!(pair(ask(&mut router, json!({}))), (2, 12), "{policy}");
            let (plain, decode) = ports(&mut router);
            assert_eq!((plain[0], decode), (12, vec![12]), "{policy}");
        }
        // Not an outage: where all are unhealthy, all serve; and an unhealthy worker is used where named.
        let named = json!({"prefill_worker_id": 1, "decode_worker_id": 11});
        assert_eq!(pair(ask(&mut router, named)), (1, 11), "{policy}");
        say(&mut router, Condition::Unhealthy, &[1, 2, 11, 12]);
        assert!(router.can_serve_any());
        let served: Vec<_> = (0..20).map(|_| pair(ask(&mut router, json!({})))).collect();
        assert!(served.iter().all(|(p, d)| *p < 3 && *d > 10), "{policy}");
    }
}

#[test]
fn all_of_one_kind_may_be_unwell_and_the_other_kind_is_still_chosen_well() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    say(&mut router, Condition::Unhealthy, &[1, 2, 11]);
    for _ in 0..8 {
        assert_eq!(pair(ask(&mut router, json!({}))).1, 12);
    }
}

#[test]
fn an_adapter_is_served_by_its_model_when_the_one_that_has_it_drains() {
    let mut workers = two_by_two();
    workers[2] = worker_with("decode", 11, json!({"adapters": ["tuned"]}));
    let mut router = router("nixl", &workers, json!({}));
    assert!(router.can_serve_requests("tuned").is_ok());
    drain(&mut router, &[11]);
    assert!(router.can_serve_requests("tuned").is_ok());
}

#[test]
fn where_any_address_can_be_reached_a_leg_has_one_destination() {
    let networks = json!({"destinations": {"original_dst": {"networks": ["127.0.0.0/8"]}}, "decode": {"attempts": 3}});
    let mut router = router("nixl", &two_by_two(), networks);
    for _ in 0..4 {
        let (plain, decode) = ports(&mut router);
        assert_eq!((plain.len(), decode.len()), (1, 1));
    }
    let mut members = self::router("nixl", &two_by_two(), json!({}));
    let (plain, decode) = ports(&mut members);
    assert_eq!((plain.len(), decode.len()), (2, 2));
}
