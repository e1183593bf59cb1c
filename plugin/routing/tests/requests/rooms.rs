//! Tests of SGLang's rooms, and of its two legs.

use std::collections::HashSet;
use std::time::Duration;

use routing::config::Pool;
use routing::outcome::{Came, Cost};
use routing::route::{AfterPrefill, CallEnd, Client, PrefillPhase, Router};
use serde_json::{Value, json};

use crate::support::*;

fn pool(ranks: u32) -> Pool {
    let ranks = json!({"dp_size": ranks});
    let workers = [
        worker_with("prefill", 1, ranks.clone()),
        worker_with("prefill", 2, ranks.clone()),
        worker_with("decode", 11, ranks),
    ];
    configured("sglang", &workers, json!({"bootstrap": {"port": 9001}}))
        .unwrap()
        .pools[0]
        .clone()
}

/// The room of a request, checked to be the same on both legs.
fn room(phase: &PrefillPhase, router: &mut Router) -> u64 {
    let client = body(&json!({}));
    let prefill: Value = serde_json::from_slice(&phase.body(&client)).unwrap();
    let beside = phase.decode_beside(router).expect("a leg beside");
    let decode = leg(&beside, &client);
    for field in ["bootstrap_host", "bootstrap_port", "bootstrap_room"] {
        assert_eq!(prefill[field], decode[field], "{field}");
    }
    assert_eq!(
        (&prefill["bootstrap_host"], &prefill["bootstrap_port"]),
        (&json!("127.0.0.1"), &json!(9001))
    );
    // A room is used once: the same bytes fit no other worker.
    assert_eq!(beside.destinations.len(), 1);
    prefill["bootstrap_room"].as_u64().expect("a room")
}

#[test]
fn rooms_are_aligned_bounded_never_used_twice_and_different_in_every_vm() {
    for ranks in [1, 2, 3, 8] {
        let mut seen = HashSet::new();
        for owner in [0, 1, 7, (1 << 24) - 1] {
            let mut router = Router::new(pool(ranks), 42, owner, Duration::ZERO);
            for _ in 0..200 {
                let (phase, _assignment) = prefill(ask(&mut router, json!({})));
                let room = room(&phase, &mut router);
                let rank = match phase.headers().first() {
                    Some((_, rank)) => rank.parse::<u64>().unwrap(),
                    None => 0,
                };
                assert_eq!(room % u64::from(ranks), rank);
                assert!(room <= i64::MAX as u64);
                assert!(seen.insert(room), "{room} is used twice");
            }
        }
    }
}

#[test]
fn a_call_that_was_never_made_is_made_elsewhere_with_a_new_room() {
    let mut router = Router::new(pool(2), 42, 7, Duration::ZERO);
    let (phase, assignment) = prefill(ask(&mut router, json!({})));
    let (first, worker) = (room(&phase, &mut router), phase.worker().id);
    let AfterPrefill::Again(phase) = phase.answered(CallEnd::NotSent, Client::Waits, &mut router)
    else {
        panic!("not tried again");
    };
    assert_ne!(phase.worker().id, worker);
    assert_ne!(room(&phase, &mut router), first);
    drop((phase, assignment));
    assert!(router.total_load().is_idle());
}

#[test]
fn a_failure_under_a_running_decode_ends_it() {
    // No other prefill worker can reach the room, and decode can no longer run the whole request: `decode_only` is refused.
    let fields =
        json!({"on_prefill_failure": ["retry_other"], "decode": {"runs_whole_requests": true}});
    for failure in [status(500), status(503), CallEnd::Broken] {
        let mut router = router("sglang", &two_by_two(), fields.clone());
        let (phase, _assignment) = prefill(ask(&mut router, json!({})));
        let after = phase.answered(failure, Client::Waits, &mut router);
        assert_eq!(word(&after), "failed beside", "{failure}");
    }
    let mut router = router("sglang", &two_by_two(), fields);
    let (phase, _assignment) = prefill(ask(&mut router, json!({})));
    let good = phase.answered(status(200), Client::Waits, &mut router);
    assert_eq!(word(&good), "good");
}

/// A failed concurrent prefill costs the same as one before decode: a closed or refused connection cost no work.
#[test]
fn found_w3_a_prefill_beside_decode_that_never_began_costs_no_recovery() {
    let reset = whole_of(503, RESET);
    for (answer, came, cost) in [
        (UNREACHED, Came::Refused, Cost::Nothing),
        (reset, Came::Reset, Cost::Nothing),
        (status(503), Came::Status(503), Cost::Nothing),
        (status(500), Came::Status(500), Cost::Work),
        (CallEnd::Broken, Came::Cut, Cost::Work),
    ] {
        let mut router = router("sglang", &two_by_two(), json!({}));
        let (phase, _assignment) = prefill(ask(&mut router, json!({})));
        let AfterPrefill::FailedBeside(_, end) = phase.answered(answer, Client::Waits, &mut router)
        else {
            panic!("{answer}");
        };
        assert_eq!((end.came, end.meaning.cost), (came, cost), "{answer}");
    }
}

#[test]
fn a_request_whose_client_left_can_be_dropped_by_the_id_that_was_sent() {
    let mut sglang = Router::new(pool(1), 42, 7, Duration::ZERO);
    let (phase, _assignment) = prefill(ask(&mut sglang, json!({})));
    let sent: Value = serde_json::from_slice(&phase.body(&body(&json!({})))).unwrap();
    let abort = phase.abort_leg().expect("an abort endpoint");
    let said: Value = serde_json::from_str(&abort.call.body).unwrap();
    assert_eq!(
        (said["rid"].clone(), abort.call.path),
        (sent["rid"].clone(), "/abort_request")
    );
    assert_eq!(Some(abort.destination), phase.destination());
    // vLLM has no abort endpoint.
    let mut nixl = router("nixl", &two_by_two(), json!({}));
    assert!(prefill(ask(&mut nixl, json!({}))).0.abort_leg().is_none());
}
