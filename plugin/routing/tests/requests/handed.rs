//! Tests of the hosts that a hand-off may name, and of the records of hand-offs that are never fetched.

use routing::route::{
    AfterPrefill, Assignment, CallEnd, Client, Lost, PrefillFailure, PrefillPhase, Refusal, Router,
};
use serde_json::{Value, json};

use crate::support::*;

const ELSEWHERE: &str = "10.9.9.9";

fn nixl(host: &str) -> String {
    json!({
        "choices": [{"finish_reason": "length"}],
        "kv_transfer_params": {"do_remote_prefill": true, "remote_block_ids": [[4, 5]], "remote_host": host},
    })
    .to_string()
}

fn trtllm(host: &str) -> String {
    let endpoint = format!("tcp://{host}:7000");
    let params = json!({"disagg_request_id": 7, "ctx_info_endpoint": endpoint});
    json!({
        "prompt_token_ids": [1, 2, 3],
        "choices": [{"finish_reason": "length", "disaggregated_params": params}],
    })
    .to_string()
}

fn whole(body: &str) -> CallEnd<'_> {
    CallEnd::Whole {
        status: 200,
        body: body.as_bytes(),
    }
}

fn begin(router: &mut Router) -> (PrefillPhase, Assignment) {
    prefill(ask(router, json!({})))
}

fn networks(list: &[&str]) -> Value {
    json!({"handoff": {"networks": list}})
}

#[test]
fn found_b15_a_hand_off_to_another_network_is_not_carried_out() {
    for protocol in ["nixl", "trtllm"] {
        let answer = match protocol {
            "nixl" => nixl,
            _ => trtllm,
        };
        let fields = networks(&["127.0.0.0/8"]);
        let mut router = router(protocol, &two_by_two(), fields);
        for odd in [ELSEWHERE, "169.254.169.254", "localhost", "fd00::1"] {
            // The next prefill worker is asked, and its hand-off is good.
            let odd = match (protocol, odd.contains(':')) {
                ("trtllm", true) => format!("[{odd}]"),
                _ => odd.to_owned(),
            };
            let (phase, assignment) = begin(&mut router);
            let AfterPrefill::Again(phase) =
                phase.answered(whole(&answer(&odd)), Client::Waits, &mut router)
            else {
                panic!("{protocol}: {odd} is handed over");
            };
            let after = phase.answered(whole(&answer("127.0.0.1")), Client::Waits, &mut router);
            assert_eq!(word(&after), "decode", "{protocol}: {odd}");
            drop(assignment);
            let remarks = router.take_remarks();
            let said = |part: &str| remarks.iter().any(|remark| remark.contains(part));
            assert!(said("handoff.networks"), "{remarks:?}");
            assert_eq!(router.take_lost().handoffs, 1, "{protocol}: {odd}");
        }
    }
}

#[test]
fn found_b15_where_no_other_is_left_the_client_is_told() {
    let mut router = router("nixl", &two_by_two(), networks(&["127.0.0.0/8"]));
    let (mut phase, _assignment) = begin(&mut router);
    let refused = loop {
        match phase.answered(whole(&nixl(ELSEWHERE)), Client::Waits, &mut router) {
            AfterPrefill::Again(next) => phase = next,
            AfterPrefill::Refused(refusal) => break refusal,
            other => panic!("{}", word(&other)),
        }
    };
    let cause = PrefillFailure::ForeignHost;
    assert_eq!(refused, Refusal::PrefillFailed { tried: 2, cause });
    assert_eq!(
        (refused.status(), refused.code()),
        (502, "prefill_no_handoff")
    );
    let lost = Lost {
        handoffs: 2,
        blocks: 4,
    };
    assert_eq!(router.take_lost(), lost);
    assert_eq!(router.take_lost(), Lost::default());
    // Not fetched for a client that has left either.
    let (phase, _assignment) = begin(&mut router);
    let after = phase.answered(whole(&nixl(ELSEWHERE)), Client::Left, &mut router);
    assert_eq!(word(&after), "nothing");
    assert_eq!(router.take_lost().handoffs, 1);
}

#[test]
fn found_b15_another_host_than_the_workers_own_is_told_of_once() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    for host in [ELSEWHERE, "rdma-7.local", ELSEWHERE, "127.0.0.1"] {
        for _ in 0..2 {
            let (phase, _assignment) = begin(&mut router);
            let after = phase.answered(whole(&nixl(host)), Client::Waits, &mut router);
            assert_eq!(word(&after), "decode", "{host}");
        }
    }
    let remarks = router.take_remarks();
    assert_eq!(remarks.len(), 2, "one of each prefill worker: {remarks:?}");
    assert!(remarks.iter().all(|remark| remark.contains(ELSEWHERE)));
    assert_eq!(router.take_lost(), Lost::default());
    // Departed workers cause no remark; a returning one is reported again.
    leave(&mut router, &[1, 2]);
    let gone = router.take_remarks();
    assert!(gone.is_empty(), "{gone:?}");
}

#[test]
fn found_b18_a_hand_off_that_no_decode_worker_is_left_for_is_lost() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (phase, _assignment) = begin(&mut router);
    leave(&mut router, &[11, 12]);
    let after = phase.answered(GOOD, Client::Waits, &mut router);
    assert_eq!(word(&after), "refused");
    let lost = Lost {
        handoffs: 1,
        blocks: 2,
    };
    assert_eq!(router.take_lost(), lost);
}
