//! Tests of the routing of a request, with plain values.

use std::collections::HashMap;
use std::time::Duration;

use super::*;
use crate::config::Config;
use crate::fleet::{Role, TargetKey};
use crate::outcome::{Came, Leg};
use crate::rendezvous::NotServed;
use crate::request::Generation;

const CHAT: &[u8] = br#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;

/// A router over a static fleet, given as (role, port).
fn router(protocol: &str, workers: &[(&str, u16)]) -> Router {
    router_with(protocol, workers, "")
}

/// The same, with further fields of the pool.
fn router_with(protocol: &str, workers: &[(&str, u16)], fields: &str) -> Router {
    let workers: Vec<String> = workers
        .iter()
        .map(|(role, port)| {
            format!(r#"{{"role":"{role}","address":"127.0.0.1:{port}","id":{port},"model":"m"}}"#)
        })
        .collect();
    let frontends = match protocol {
        "direct" => r#","frontends":["127.0.0.1:8000","127.0.0.1:8001"]"#,
        _ => "",
    };
    let document = format!(
        r#"{{"pools":[{{"name":"p","protocol":"{protocol}","discovery":{{"static":{{"workers":[{}]}}}}{frontends}{fields}}}]}}"#,
        workers.join(",")
    );
    let config = Config::parse(document.as_bytes()).unwrap();
    Router::new(config.pools[0].clone(), 42, 7, Duration::ZERO)
}

const UNTOLD: PlanInput<'static> = PlanInput {
    headers: &[],
    now: Duration::from_secs(1),
    session: None,
    tenant: None,
    subset: None,
    explain: Explain::No,
};

const TWO_BY_TWO: &[(&str, u16)] = &[
    ("prefill", 1),
    ("prefill", 2),
    ("decode", 11),
    ("decode", 12),
];

fn prefill_first(router: &mut Router) -> (PrefillPhase, Assignment) {
    match router.plan(Generation::Chat, CHAT, UNTOLD).unwrap() {
        Plan::Prefill(phase, assignment) => (phase, assignment),
        Plan::Forward(..) | Plan::Answer(_) | Plan::Wait(_) => panic!("no prefill"),
    }
}

fn forwarded(plan: Plan) -> (Dispatch, Assignment) {
    match plan {
        Plan::Forward(dispatch, assignment) => (dispatch, assignment),
        Plan::Prefill(..) | Plan::Answer(_) | Plan::Wait(_) => panic!("not forwarded"),
    }
}

fn refusal(outcome: Result<Plan, Refusal>) -> Refusal {
    match outcome {
        Ok(_) => panic!("not refused"),
        Err(refusal) => refusal,
    }
}

const GOOD: CallEnd<'static> = CallEnd::Whole {
    status: 200,
    body: br#"{"choices":[],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[4,5]]}}"#,
};

#[test]
fn prefill_then_decode_and_each_charge_ends_in_its_time() {
    let mut router = router("nixl", TWO_BY_TWO);
    let (phase, mut assignment) = prefill_first(&mut router);
    assert_eq!(
        (router.total_load().prefills, router.total_load().decodes),
        (1, 1)
    );
    assert!([1, 2].contains(&phase.destination().unwrap().port()));

    let AfterPrefill::Decode {
        dispatch, staged, ..
    } = phase.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    assert_eq!(staged.blocks, 2);
    assert_eq!(
        (router.total_load().prefills, router.total_load().decodes),
        (0, 1)
    );
    assert_eq!(dispatch.destinations.len(), 2);
    assert_eq!(
        dispatch.destinations[0],
        assignment.decode.as_ref().unwrap().address.unwrap()
    );
    let body = String::from_utf8(dispatch.edits.unwrap().apply(CHAT)).unwrap();
    assert!(
        body.starts_with(r#"{"kv_transfer_params":{"do_remote_prefill":true,"#),
        "{body}"
    );
    assignment.release();
    assert!(router.total_load().is_idle());
}

#[test]
fn everyone_is_used_evenly_and_all_pairs_meet() {
    let turns = r#","selection":{"prefill":"round_robin","decode":"round_robin"}"#;
    let mut router = router_with("nixl", TWO_BY_TWO, turns);
    let mut pairs: HashMap<(u64, u64), u32> = HashMap::new();
    for _ in 0..200 {
        let (phase, assignment) = prefill_first(&mut router);
        let pair = (
            phase.worker().id.0,
            assignment.decode.as_ref().unwrap().id.0,
        );
        *pairs.entry(pair).or_default() += 1;
    }
    assert_eq!(pairs.len(), 4);
    for id in [1, 2, 11, 12] {
        let count: u32 = pairs
            .iter()
            .filter(|((p, d), _)| *p == id || *d == id)
            .map(|(_, n)| n)
            .sum();
        assert_eq!(count, 100);
    }
    assert!(router.total_load().is_idle());
}

#[test]
fn a_failed_prefill_is_tried_on_another_worker_and_then_refused() {
    for failure in [
        CallEnd::NotSent,
        CallEnd::Broken,
        CallEnd::Whole {
            status: 503,
            body: b"upstream connect error",
        },
        CallEnd::Whole {
            status: 200,
            body: b"{}",
        },
        CallEnd::Whole {
            status: 302,
            body: b"",
        },
    ] {
        let mut router = router("nixl", TWO_BY_TWO);
        let (phase, _assignment) = prefill_first(&mut router);
        let first = phase.worker().id;
        let AfterPrefill::Again(phase) = phase.answered(failure, Client::Waits, &mut router) else {
            panic!("not tried again after {failure:?}");
        };
        assert_ne!(phase.worker().id, first);
        assert_eq!(router.total_load().prefills, 1);
        let AfterPrefill::Refused(refusal) = phase.answered(failure, Client::Waits, &mut router)
        else {
            panic!("not refused after {failure:?}");
        };
        assert!(
            matches!(refusal, Refusal::PrefillFailed { tried: 2, .. }),
            "{refusal}"
        );
        assert_eq!(router.total_load().prefills, 0);
    }
}

#[test]
fn a_client_error_of_prefill_is_the_answer() {
    let mut router = router("nixl", TWO_BY_TWO);
    let (phase, _assignment) = prefill_first(&mut router);
    let answer = CallEnd::Whole {
        status: 400,
        body: b"too long",
    };
    assert!(matches!(
        phase.answered(answer, Client::Waits, &mut router),
        AfterPrefill::Answer
    ));
    assert_eq!(router.total_load().prefills, 0);
}

#[test]
fn a_decode_only_worker_never_gets_a_bare_request() {
    let mut only_decode = router("nixl", &[("decode", 11)]);
    assert_eq!(
        refusal(only_decode.plan(Generation::Chat, CHAT, UNTOLD)),
        Refusal::NotServed(NotServed::NotActivated)
    );
    let mut both = router("nixl", TWO_BY_TWO);
    let body = br#"{"model":"m"}"#;
    assert_eq!(
        refusal(both.plan(Generation::Other, body, UNTOLD)),
        Refusal::NoHandoffForPath
    );
    assert!(matches!(
        refusal(both.plan(Generation::Chat, b"\x1f\x8b", UNTOLD)),
        Refusal::NotJson { .. }
    ));
    assert_eq!(
        refusal(both.plan_unread(Refusal::Encoded, None)),
        Refusal::Encoded
    );
    let mut only_prefill = router("nixl", &[("prefill", 1)]);
    assert_eq!(
        refusal(only_prefill.plan(Generation::Chat, CHAT, UNTOLD)),
        Refusal::NotServed(NotServed::NoDecode)
    );
    assert_eq!(
        refusal(router("nixl", &[]).plan(Generation::Chat, CHAT, UNTOLD)),
        Refusal::NoFleet
    );
}

#[test]
fn workers_that_run_whole_requests_take_what_cannot_be_split() {
    let mut mixed = router(
        "nixl",
        &[("prefill", 1), ("decode", 11), ("aggregated", 21)],
    );
    assert!(matches!(
        mixed.plan(Generation::Chat, CHAT, UNTOLD).unwrap(),
        Plan::Prefill(..)
    ));
    for plan in [
        mixed
            .plan(Generation::Other, br#"{"model":"m"}"#, UNTOLD)
            .unwrap(),
        mixed.plan(Generation::Chat, b"not json", UNTOLD).unwrap(),
        mixed.plan_unread(Refusal::Encoded, None).unwrap(),
    ] {
        let (dispatch, assignment) = forwarded(plan);
        assert_eq!(dispatch.destinations[0].port(), 21);
        assert!(dispatch.edits.is_none());
        assert_eq!(assignment.decode.as_ref().unwrap().role, Role::Aggregated);
    }
}

#[test]
fn direct_mode_names_both_workers_and_goes_to_each_frontend_in_turn() {
    let mut router = router("direct", TWO_BY_TWO);
    let (first, mut assignment) = forwarded(router.plan(Generation::Chat, CHAT, UNTOLD).unwrap());
    let (second, other) = forwarded(router.plan(Generation::Chat, CHAT, UNTOLD).unwrap());
    assert_eq!(first.destinations.len(), 2);
    assert_ne!(first.destinations[0], second.destinations[0]);
    assert!(first.edits.is_none());
    let header = |name: &str| {
        let (_, value) = first.headers.iter().find(|(n, _)| *n == name).unwrap();
        value.parse::<u64>().unwrap()
    };
    assert_eq!(
        header("x-worker-instance-id"),
        assignment.decode.as_ref().unwrap().id.0
    );
    assert_eq!(
        header("x-dynamo-prefill-instance-id"),
        assignment.prefill.as_ref().unwrap().id.0
    );

    drop(other);
    assert_eq!(
        (router.total_load().prefills, router.total_load().decodes),
        (1, 1)
    );
    assignment.first_token(Duration::from_secs(2));
    assert_eq!(
        (router.total_load().prefills, router.total_load().decodes),
        (0, 1)
    );
    assignment.release();
    assert!(router.total_load().is_idle());
}

#[test]
fn the_charge_follows_the_worker_that_really_serves() {
    let mut router = router("nixl", TWO_BY_TWO);
    let (phase, mut assignment) = prefill_first(&mut router);
    let AfterPrefill::Decode { dispatch, .. } = phase.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    router.served_by(&mut assignment, dispatch.destinations[1]);
    assert_eq!(
        assignment.decode.as_ref().unwrap().address,
        Some(dispatch.destinations[1])
    );
    let loads: Vec<u64> = [11, 12]
        .map(|id| {
            let key = TargetKey {
                worker: WorkerId(id),
                rank: 0,
            };
            (
                u64::from(dispatch.destinations[1].port()) == id,
                router.ledger.load(key).decodes,
            )
        })
        .map(|(serves, decodes)| u64::from(serves == (decodes == 1)))
        .to_vec();
    assert_eq!(loads, [1, 1]);
}

#[test]
fn an_unknown_model_is_said_so() {
    let mut router = router("nixl", TWO_BY_TWO);
    let body = br#"{"model":"other","messages":[]}"#;
    assert_eq!(
        refusal(router.plan(Generation::Chat, body, UNTOLD)),
        Refusal::UnknownModel {
            model: "other".to_owned()
        }
    );
}

#[test]
fn plain_requests_go_to_the_least_busy_worker() {
    let mut router = router("nixl", TWO_BY_TWO);
    let (phase, assignment) = prefill_first(&mut router);
    let busy = assignment.decode.as_ref().unwrap().address.unwrap();
    for _ in 0..20 {
        let (dispatch, _) = router.plain(None).unwrap();
        assert_ne!(dispatch.destinations[0], busy);
        assert_eq!(dispatch.destinations.len(), 2);
    }
    drop((phase, assignment));
}

#[test]
fn workers_that_leave_are_not_picked_and_workers_that_come_are() {
    let mut router = router("nixl", TWO_BY_TWO);
    let (_phase, _assignment) = prefill_first(&mut router);
    let staying: Vec<Worker> = router
        .fleet()
        .workers()
        .filter(|worker| ![1, 11].contains(&worker.id.0))
        .map(|worker| Worker::clone(worker))
        .collect();
    let copy = Fleet::decode(&Fleet::new(7, staying).encode()).unwrap();
    assert_eq!(copy.version(), 7);
    router.adopt(copy);
    for _ in 0..10 {
        let (phase, assignment) = prefill_first(&mut router);
        assert_eq!(
            (
                phase.worker().id.0,
                assignment.decode.as_ref().unwrap().id.0
            ),
            (2, 12)
        );
    }
}

fn pool(protocol: &str, workers: &[(&str, u16)], fields: &str) -> Pool {
    router_with(protocol, workers, fields).pool().clone()
}

#[test]
fn a_new_configuration_keeps_bookings_and_what_workers_hold() {
    let mut router = router("nixl", TWO_BY_TWO);
    let long = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"{}"}}]}}"#,
        "word ".repeat(2000)
    );
    let plan = router.plan(Generation::Chat, long.as_bytes(), UNTOLD);
    let Ok(Plan::Prefill(phase, mut assignment)) = plan else {
        panic!("no prefill");
    };
    let worker = Arc::clone(phase.worker());
    let held = router.remembered_blocks(&worker);
    assert!(held > 100, "{held}");

    let turns = r#","selection":{"decode":"round_robin"},"health":{"eject_after":1}"#;
    router.reconfigure(pool("nixl", TWO_BY_TWO, turns));
    assert_eq!(router.total_load().prefills, 1);
    assert_eq!(router.remembered_blocks(&worker), held);
    let after = phase.answered(GOOD, Client::Waits, &mut router);
    assert!(matches!(after, AfterPrefill::Decode { .. }));
    assignment.release();
    assert!(router.total_load().is_idle());

    router.reconfigure(pool("nixl", TWO_BY_TWO, r#","block_tokens":32"#));
    assert_eq!(router.remembered_blocks(&worker), 0, "other blocks");
}

#[test]
fn a_new_configuration_may_list_other_workers() {
    let mut router = router("nixl", TWO_BY_TWO);
    let (phase, mut assignment) = prefill_first(&mut router);
    let others = [("prefill", 3), ("decode", 13)];
    router.reconfigure(pool("nixl", &others, ""));
    let (next, _assignment) = prefill_first(&mut router);
    assert_eq!(next.worker().id.0, 3);
    // The call under way ends as it began, with a decode worker of the new fleet.
    let AfterPrefill::Decode { dispatch, .. } = phase.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    assert_eq!(dispatch.destinations[0].port(), 13);
    assignment.release();
}

/// Where two pairs fail in the same way the request is the cause, also if a call that was given up is answered in between.
#[test]
fn a_late_answer_does_not_settle_who_is_at_fault() {
    for late in [None, Some(Client::Superseded)] {
        let mut router = router("nixl", TWO_BY_TWO);
        let (first, mut assignment) = prefill_first(&mut router);
        let second = first.hedge(&mut router).expect("another worker");
        let mut suspects = Vec::new();
        let mut fails = |router: &mut Router, assignment: &mut Assignment, phase: PrefillPhase| {
            let after = phase.answered(GOOD, Client::Waits, router);
            let AfterPrefill::Decode { target, staged, .. } = after else {
                panic!("no decode");
            };
            router.assign_decode(assignment, &target.0, target.1, staged);
            suspects.push(target.0.id);
            router.leg_ended(assignment, Came::Status(500))
        };
        let meaning = fails(&mut router, &mut assignment, second);
        let failed = Failed {
            leg: Leg::Decode,
            meaning,
            workers: &[assignment.decode.as_ref().unwrap().id],
            frontends: &[],
        };
        let again = router.recover(&mut assignment, &failed, CHAT, Duration::from_secs(1));
        let Some(Plan::Prefill(third, mut assignment)) = again else {
            panic!("not placed again");
        };
        if let Some(client) = late {
            let _ = first.answered(GOOD, client, &mut router);
        }
        fails(&mut router, &mut assignment, third);
        router.request_ended(&assignment);
        assert_ne!(suspects[0], suspects[1]);
        for worker in suspects {
            let penalties = router.health.held(worker, Duration::from_secs(1));
            assert_eq!(penalties, Default::default(), "{late:?}");
        }
    }
}

/// A host with threads may keep a router, or a session, behind a lock of its own.
#[test]
fn a_router_and_a_session_may_change_threads() {
    fn is_send<T: Send>() {}
    is_send::<Router>();
    is_send::<crate::session::Session>();
    is_send::<Plan>();
}
