//! Tests of how a hand-off ends: completed, with another decode worker than the picked one, or without its client.

use routing::fleet::WorkerId;
use routing::request::Generation;
use routing::route::{
    AfterPrefill, Assignment, CallEnd, Client, Plan, PlanInput, PrefillFailure, PrefillPhase,
    Refusal, Router,
};
use serde_json::{Value, json};

use crate::support::*;

const ENDED: &str = r#"{"id":"c1","object":"chat.completion","created":9007199254740993,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"No."},"finish_reason":"stop"}],"usage":{"total_tokens":3},"kv_transfer_params":null}"#;

fn whole(body: &str) -> CallEnd<'_> {
    CallEnd::Whole {
        status: 200,
        body: body.as_bytes(),
    }
}

fn start(router: &mut Router, body: &Value) -> (PrefillPhase, Assignment) {
    let input = PlanInput {
        headers: &[],
        now: std::time::Duration::from_secs(1),
        ..PlanInput::default()
    };
    prefill(router.plan(Generation::Chat, body.to_string().as_bytes(), input))
}

#[test]
fn an_answer_that_ended_by_itself_is_the_clients_as_json_or_as_a_stream() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (phase, assignment) = start(&mut router, &json!({"model": "m", "messages": []}));
    let AfterPrefill::Terminal(terminal) = phase.answered(whole(ENDED), Client::Waits, &mut router)
    else {
        panic!("not the whole answer");
    };
    assert_eq!(terminal.content_type, "application/json");
    let text = String::from_utf8(terminal.body).unwrap();
    assert_eq!(text, ENDED.replace(r#","kv_transfer_params":null"#, ""));

    let asked = json!({"model": "m", "messages": [], "stream": true, "stream_options": {"include_usage": true}});
    let (phase, other) = start(&mut router, &asked);
    let AfterPrefill::Terminal(terminal) = phase.answered(whole(ENDED), Client::Waits, &mut router)
    else {
        panic!("not the whole answer");
    };
    assert_eq!(terminal.content_type, "text/event-stream");
    let text = String::from_utf8(terminal.body).unwrap();
    assert!(
        text.ends_with("data: [DONE]\n\n") && !text.contains("kv_transfer"),
        "{text}"
    );
    assert_eq!(text.matches("data: ").count(), 3);
    assert_eq!(router.total_load().prefills, 0);
    drop((assignment, other));

    // No client waits, and nothing is staged.
    let (phase, _assignment) = start(&mut router, &json!({"model": "m", "messages": []}));
    let after = phase.answered(whole(ENDED), Client::Left, &mut router);
    assert_eq!(word(&after), "nothing");
}

#[test]
fn the_length_limit_without_a_handoff_is_a_failure_and_never_a_bare_decode() {
    let cut = ENDED.replace("\"stop\"", "\"length\"");
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (phase, _assignment) = start(&mut router, &json!({"model": "m", "messages": []}));
    let AfterPrefill::Again(phase) = phase.answered(whole(&cut), Client::Waits, &mut router) else {
        panic!("not tried again");
    };
    let AfterPrefill::Refused(refused) = phase.answered(whole(&cut), Client::Waits, &mut router)
    else {
        panic!("not refused");
    };
    let cause = PrefillFailure::NoHandoff;
    assert_eq!(refused, Refusal::PrefillFailed { tried: 2, cause });
    assert_eq!(refused.status(), 502);
}

/// vLLM hands over after a stop, too: the client gets the answer, and a clean-up leg fetches the blocks.
#[test]
fn found_v7_what_ended_by_itself_and_was_staged_is_answered_and_cleaned_up() {
    let staged = ENDED.replace(
        "\"kv_transfer_params\":null",
        r#""kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1,2,3]]}"#,
    );
    let mut router = router("nixl", &two_by_two(), json!({}));
    let asked = json!({"model": "m", "messages": []});
    let (phase, _assignment) = start(&mut router, &asked);
    let AfterPrefill::TerminalStaged(terminal, rest) =
        phase.answered(whole(&staged), Client::Waits, &mut router)
    else {
        panic!("not the whole answer");
    };
    let text = String::from_utf8(terminal.body).unwrap();
    assert_eq!(text, ENDED.replace(r#","kv_transfer_params":null"#, ""));
    let AfterPrefill::CleanUp(clean_up) = *rest else {
        panic!("nothing fetches the blocks");
    };
    assert_eq!(clean_up.blocks, 3);
    let fetched = leg(&clean_up.dispatch, asked.to_string().as_bytes());
    assert_eq!(fetched["kv_transfer_params"]["do_remote_prefill"], true);
    assert_eq!(fetched["max_tokens"], 1);
    assert_eq!(router.total_load().prefills, 0);
}

/// An engine whose responses are always called complete, and never hand over.
#[test]
fn found_l2_one_token_is_no_whole_answer_of_the_responses_interface() {
    let answer = r#"{"object":"response","status":"completed","output":[{"type":"message","content":[{"type":"output_text","text":"No"}]}],"usage":{"input_tokens":9,"output_tokens":1}}"#;
    let mut router = router("nixl", &two_by_two(), json!({}));
    let asked = json!({"model": "m", "input": "p"}).to_string();
    let input = PlanInput {
        headers: &[],
        now: std::time::Duration::from_secs(1),
        ..PlanInput::default()
    };
    let (phase, _assignment) = prefill(router.plan(Generation::Responses, asked.as_bytes(), input));
    let AfterPrefill::Again(phase) = phase.answered(whole(answer), Client::Waits, &mut router)
    else {
        panic!("not tried again");
    };
    let AfterPrefill::Refused(refused) = phase.answered(whole(answer), Client::Waits, &mut router)
    else {
        panic!("not refused");
    };
    let cause = PrefillFailure::NoHandoff;
    assert_eq!(refused, Refusal::PrefillFailed { tried: 2, cause });
}

/// A prefill answer that reports a failure is no good prefill, whatever its status: decode's normal end must not pass.
#[test]
fn found_b12_a_prefill_beside_that_failed_inside_is_not_good() {
    for (answer, followed) in [
        (
            r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"no"}}}"#,
            "failed beside",
        ),
        (r#"{"error":{"message":"no"}}"#, "failed beside"),
        (
            r#"{"text":"a","meta_info":{"finish_reason":{"type":"length"},"completion_tokens":1}}"#,
            "good",
        ),
        (r#"{"choices":[{"finish_reason":"length"}]}"#, "good"),
        ("", "good"),
    ] {
        let mut router = router("sglang", &two_by_two(), json!({}));
        let (phase, _assignment) = start(&mut router, &json!({"model": "m", "messages": []}));
        let after = phase.answered(whole(answer), Client::Waits, &mut router);
        assert_eq!(word(&after), followed, "{answer}");
    }
}

#[test]
fn the_decode_leg_has_the_clients_own_limits_again_and_what_was_absent_stays_so() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    for asked in [
        json!({"model": "m", "messages": [], "max_tokens": 100, "min_tokens": 5, "stream": true, "stream_options": {"include_usage": true}}),
        json!({"model": "m", "messages": [], "max_completion_tokens": 7}),
        json!({"model": "m", "messages": []}),
    ] {
        let (phase, _assignment) = start(&mut router, &asked);
        let sent: Value =
            serde_json::from_slice(&phase.body(asked.to_string().as_bytes())).unwrap();
        assert!(
            sent["max_tokens"] == 1 && sent.get("min_tokens").is_none_or(|least| least == 1),
            "{sent}"
        );
        assert!(
            sent.get("stream").is_none_or(|stream| stream == false),
            "{sent}"
        );
        let AfterPrefill::Decode { dispatch, .. } =
            phase.answered(GOOD, Client::Waits, &mut router)
        else {
            panic!("no decode");
        };
        let mut decode = leg(&dispatch, asked.to_string().as_bytes());
        decode
            .as_object_mut()
            .unwrap()
            .remove("kv_transfer_params")
            .unwrap();
        assert_eq!(decode, asked);
    }
}

#[test]
fn a_decode_worker_that_left_meanwhile_is_replaced_and_the_charge_goes_along() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (phase, mut assignment) = prefill(ask(&mut router, json!({})));
    let left = assignment.decode.as_ref().unwrap().id.0;
    let other = 23 - left;
    leave(&mut router, &[left]);
    let AfterPrefill::Decode {
        dispatch,
        target,
        staged,
        ..
    } = phase.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    assert_eq!(target.0.id, WorkerId(other));
    let ports: Vec<u16> = dispatch.destinations.iter().map(|to| to.port()).collect();
    assert_eq!(
        ports
            .iter()
            .map(|port| u64::from(*port))
            .collect::<Vec<_>>(),
        [other]
    );
    router.assign_decode(&mut assignment, &target.0, target.1, staged);
    assert_eq!(router.total_load().decodes, 1);
    assert_eq!(
        router
            .worker_load(router.fleet().get(WorkerId(other)).unwrap())
            .decodes,
        1
    );
    drop(assignment);
    assert!(router.total_load().is_idle());

    // Without a decode worker the request is refused, and may be retried.
    let (phase, _assignment) = prefill(ask(&mut router, json!({})));
    leave(&mut router, &[other]);
    let AfterPrefill::Refused(refused) = phase.answered(GOOD, Client::Waits, &mut router) else {
        panic!("not refused");
    };
    assert_eq!(
        (refused.status(), refused.code()),
        (503, "no_decode_worker")
    );
}

#[test]
fn one_of_the_others_that_left_meanwhile_is_not_tried() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let (phase, assignment) = prefill(ask(&mut router, json!({})));
    let picked = assignment.decode.as_ref().unwrap().id.0;
    leave(&mut router, &[23 - picked]);
    let AfterPrefill::Decode { dispatch, .. } = phase.answered(GOOD, Client::Waits, &mut router)
    else {
        panic!("no decode");
    };
    assert_eq!(dispatch.destinations.len(), 1);
    assert_eq!(u64::from(dispatch.destinations[0].port()), picked);
}

#[test]
fn a_client_that_leaves_before_prefill_is_called_leaves_nothing() {
    for protocol in ["nixl", "sglang"] {
        let mut router = router(protocol, &two_by_two(), json!({}));
        let (phase, assignment) = prefill(ask(&mut router, json!({})));
        drop((phase, assignment));
        assert!(router.total_load().is_idle());
    }
}

#[test]
fn blocks_that_a_client_left_behind_are_fetched_by_a_leg_of_one_token() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    let asked =
        json!({"model": "m", "messages": [], "stream": true, "max_tokens": 100, "min_tokens": 9});
    let (phase, assignment) = start(&mut router, &asked);
    let decode = assignment.decode.as_ref().unwrap().address.unwrap();
    drop(assignment);
    let AfterPrefill::CleanUp(leg) = phase.answered(GOOD, Client::Left, &mut router) else {
        panic!("no clean-up");
    };
    assert_eq!((leg.dispatch.destinations[0], leg.blocks), (decode, 2));
    let sent = crate::support::leg(&leg.dispatch, asked.to_string().as_bytes());
    let handoff = json!({"do_remote_prefill": true, "remote_block_ids": [[4, 5]]});
    let expected = json!({"model": "m", "messages": [], "stream": false, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": handoff});
    assert_eq!(sent, expected);
    assert!(router.total_load().is_idle());

    // By another worker where the picked one has left; not at all where all have.
    let (phase, assignment) = start(&mut router, &asked);
    let picked = assignment.decode.as_ref().unwrap().id.0;
    leave(&mut router, &[picked]);
    let AfterPrefill::CleanUp(leg) = phase.answered(GOOD, Client::Left, &mut router) else {
        panic!("no clean-up");
    };
    assert_eq!(u64::from(leg.dispatch.destinations[0].port()), 23 - picked);
    let (phase, _assignment) = start(&mut router, &asked);
    leave(&mut router, &[23 - picked]);
    let after = phase.answered(GOOD, Client::Left, &mut router);
    assert!(matches!(after, AfterPrefill::Leaked { blocks: 2 }));
}

#[test]
fn what_ran_whole_has_nothing_staged() {
    let mut router = router("nixl", &[worker("aggregated", 21)], json!({}));
    // No phase exists that could clean up.
    assert!(matches!(ask(&mut router, json!({})), Ok(Plan::Forward(..))));
}

#[test]
fn a_client_error_of_prefill_is_nobodys_where_nobody_waits() {
    let mut router = router("nixl", &two_by_two(), json!({}));
    for (client, expected) in [(Client::Waits, "answer"), (Client::Left, "nothing")] {
        let (phase, _assignment) = prefill(ask(&mut router, json!({})));
        let after = phase.answered(status(422), client, &mut router);
        assert_eq!(word(&after), expected);
    }
}
