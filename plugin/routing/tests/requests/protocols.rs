//! Tests of the legs of each protocol, through the router, and of requests that cannot be split.

use routing::fleet::WorkerId;
use routing::request::Generation;
use routing::route::{
    AfterPrefill, CallEnd, Client, Plan, PlanInput, PrefillPhase, Refusal, Router,
};
use serde_json::{Value, json};

use crate::support::*;

fn plan(router: &mut Router, kind: Generation, body: &Value) -> Result<Plan, Refusal> {
    router.plan(kind, body.to_string().as_bytes(), PlanInput::default())
}

fn parsed(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).expect("JSON")
}

fn chat() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9})
}

/// The decode leg that follows a prefill's answer.
fn decode_leg(phase: PrefillPhase, answer: &Value, client: &Value, router: &mut Router) -> Value {
    let body = answer.to_string();
    let answer = CallEnd::Whole {
        status: 200,
        body: body.as_bytes(),
    };
    match phase.answered(answer, Client::Waits, router) {
        AfterPrefill::Decode { dispatch, .. } => leg(&dispatch, client.to_string().as_bytes()),
        other => panic!("{}", word(&other)),
    }
}

fn mooncake() -> Router {
    router(
        "mooncake",
        &two_by_two(),
        json!({"bootstrap": {"port": 9001}}),
    )
}

fn tell(router: &mut Router, id: u64, engine: &str) -> bool {
    let answer = json!({"0": {"engine_id": engine}}).to_string();
    let worker = router.fleet().get(WorkerId(id)).unwrap().incarnation();
    router.on_reply(&worker, answer.as_bytes())
}

#[test]
fn mooncakes_legs_name_one_transfer_and_the_engine_that_was_told() {
    let mut router = mooncake();
    assert!(matches!(
        refusal(plan(&mut router, Generation::Chat, &chat())),
        Refusal::NotServed(_)
    ));
    assert!(tell(&mut router, 1, "e-1"));
    let (phase, _assignment) = prefill(plan(&mut router, Generation::Chat, &chat()));
    assert_eq!(phase.worker().id, WorkerId(1), "only it has told");
    let leg = parsed(&phase.body(chat().to_string().as_bytes()));
    let transfer = leg["kv_transfer_params"]["transfer_id"].clone();
    assert_eq!(leg["max_tokens"], 1);
    let answer = json!({"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens": 33}});
    let decode = decode_leg(phase, &answer, &chat(), &mut router);
    assert_eq!(
        decode["kv_transfer_params"],
        json!({"do_remote_decode": false, "do_remote_prefill": true,
            "remote_bootstrap_addr": "http://127.0.0.1:9001", "remote_engine_id": "e-1",
            "transfer_id": transfer})
    );
    assert_eq!(decode["max_tokens"], 9);
}

#[test]
fn a_mooncake_worker_that_took_no_connection_must_tell_anew() {
    let mut router = mooncake();
    assert!(tell(&mut router, 1, "e-1") && tell(&mut router, 2, "e-2"));
    let bound = |router: &Router| {
        let questions = router.questions();
        let bound = questions.iter().filter(|question| question.is_bound);
        bound
            .map(|question| question.worker.id.0)
            .collect::<Vec<_>>()
    };
    let (phase, _assignment) = prefill(plan(&mut router, Generation::Chat, &chat()));
    let failed = phase.worker().id.0;
    let after = phase.answered(UNREACHED, Client::Waits, &mut router);
    assert!(matches!(after, AfterPrefill::Again(next) if next.worker().id.0 != failed));
    assert_eq!(bound(&router), [3 - failed]);
    // An answer without an engine is ignored.
    let other = router.fleet().get(WorkerId(3 - failed)).unwrap();
    let other = other.incarnation();
    assert!(!router.on_reply(&other, b"{}"));
    assert_eq!(bound(&router), [3 - failed]);
}

#[test]
fn trtllms_ids_pass_as_they_are_written_and_each_try_has_its_own() {
    let mut router = router("trtllm", &two_by_two(), json!({}));
    let client = json!({"model": "m", "prompt": "hello", "max_tokens": 9});
    let text = client.to_string();
    let id = |phase: &PrefillPhase| {
        let leg = parsed(&phase.body(text.as_bytes()));
        leg["disaggregated_params"]["disagg_request_id"]
            .as_u64()
            .unwrap()
    };
    let (phase, _assignment) = prefill(plan(&mut router, Generation::Completions, &client));
    let first = id(&phase);
    assert!((1 << 62..1 << 63).contains(&first));
    let AfterPrefill::Again(phase) = phase.answered(status(500), Client::Waits, &mut router) else {
        panic!("no second try");
    };
    assert_ne!(id(&phase), first);
    let params = json!({"request_type": "context_only", "ctx_request_id": 9_223_372_036_854_775_807_u64,
        "disagg_request_id": 4, "encoded_opaque_state": "x+/="});
    let answer = json!({"choices": [{"finish_reason": "length", "disaggregated_params": params}],
        "prompt_token_ids": [7, 8], "usage": {"prompt_tokens": 2}});
    let decode = decode_leg(phase, &answer, &client, &mut router);
    let sent = &decode["disaggregated_params"];
    assert_eq!(sent["request_type"], "generation_only");
    assert_eq!(sent["ctx_request_id"], 9_223_372_036_854_775_807_u64);
    assert_eq!(
        (&decode["prompt"], &decode["max_tokens"]),
        (&json!([7, 8]), &json!(9))
    );
}

#[test]
fn llmds_sidecar_is_told_who_prefills_and_the_body_is_let_be() {
    let mut router = router("llmd", &two_by_two(), json!({}));
    let (dispatch, assignment) = forward(plan(&mut router, Generation::Chat, &chat()));
    let prefill = assignment.prefill.as_ref().unwrap().address.unwrap();
    let header = ("x-prefiller-host-port", prefill.to_string());
    assert!(dispatch.headers.contains(&header), "{:?}", dispatch.headers);
    assert_eq!(dispatch.destinations[0].port() / 10, 1, "a decode worker");
    assert!(dispatch.edits.is_none());
    assert_eq!(router.total_load().prefills, 1);
}

#[test]
fn several_sequences_have_a_room_each_or_run_whole_or_are_refused() {
    let batch = json!({"model": "m", "prompt": ["a", "b"], "n": 2});
    let mut sglang = router("sglang", &two_by_two(), json!({}));
    let (phase, _assignment) = prefill(plan(&mut sglang, Generation::Completions, &batch));
    let leg = parsed(&phase.body(batch.to_string().as_bytes()));
    let rooms = leg["bootstrap_room"].as_array().expect("a list");
    assert_eq!(rooms.len(), 4);
    for protocol in ["nixl", "trtllm"] {
        let mut strict = router(protocol, &two_by_two(), json!({}));
        assert!(matches!(
            refusal(plan(&mut strict, Generation::Completions, &batch)),
            Refusal::Field { name: "n", .. }
        ));
        let mut whole = two_by_two();
        whole.push(worker("aggregated", 21));
        let mut mixed = router(protocol, &whole, json!({}));
        let (_, assignment) = forward(plan(&mut mixed, Generation::Completions, &batch));
        assert_eq!(assignment.decode.unwrap().id, WorkerId(21));
    }
}

#[test]
fn sglangs_generate_names_no_model_and_others_do_not_split_it() {
    let body = json!({"text": "hello", "sampling_params": {"max_new_tokens": 5}});
    let mut sglang = router("sglang", &two_by_two(), json!({}));
    let (phase, _assignment) = prefill(plan(&mut sglang, Generation::Generate, &body));
    let leg = parsed(&phase.body(body.to_string().as_bytes()));
    assert_eq!(leg["sampling_params"]["max_new_tokens"], 1);
    let mut nixl = router("nixl", &two_by_two(), json!({}));
    let refused = refusal(plan(&mut nixl, Generation::Generate, &body));
    assert_eq!(refused, Refusal::NoHandoffForPath);
}

#[test]
fn a_hand_off_of_ones_own_is_a_trusted_callers_alone() {
    let own =
        json!({"model": "m", "messages": [], "kv_transfer_params": {"do_remote_prefill": true}});
    let mut trusting = router("nixl", &two_by_two(), json!({}));
    let (dispatch, assignment) = forward(plan(&mut trusting, Generation::Chat, &own));
    assert!(dispatch.edits.is_none() && assignment.prefill.is_none());
    assert!(assignment.decode.is_some());
    let mut wary = router("nixl", &two_by_two(), json!({"trust_clients": false}));
    assert!(matches!(
        refusal(plan(&mut wary, Generation::Chat, &own)),
        Refusal::Field {
            name: "kv_transfer_params",
            ..
        }
    ));
}
