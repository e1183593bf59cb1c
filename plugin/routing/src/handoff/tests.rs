//! Checks of what holds for each protocol: a row of the table for every name that configuration takes.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::binding::{Binding, Bootstrap, EngineIds};
use super::rooms::Rooms;
use super::{Handoff, HandoffPair, LegOrder, Prefill};
use crate::config::ProtocolName;
use crate::fleet::{Role, Target, Worker, WorkerId};
use crate::request::{Generation, Request};
use crate::transfer::{IN_ANSWERS, IN_REQUESTS};

const BODY: &str = r#"{"model":"m","messages":[],"stream":true}"#;

/// What the legs of [`BODY`] are sent.
struct Row {
    order: LegOrder,
    /// Body of the prefill leg; none where the backend runs it.
    prefill: Option<&'static str>,
    /// An answer of the prefill worker.
    answer: &'static str,
    /// Body of the decode leg, at once or after that answer.
    decode: Option<&'static str>,
    /// Headers of the request.
    headers: &'static [&'static str],
}

fn row(name: ProtocolName) -> Row {
    let backend = Row {
        order: LegOrder::Backend,
        prefill: None,
        answer: "",
        decode: None,
        headers: &[],
    };
    match name {
        ProtocolName::Nixl => Row {
            order: LegOrder::Sequential,
            prefill: Some(
                r#"{"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null},"model":"m","messages":[],"stream":false}"#,
            ),
            answer: r#"{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[7]}}"#,
            decode: Some(
                r#"{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[7]},"model":"m","messages":[],"stream":true}"#,
            ),
            ..backend
        },
        ProtocolName::Mooncake => Row {
            order: LegOrder::Sequential,
            prefill: Some(
                r#"{"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-0"},"model":"m","messages":[],"stream":false}"#,
            ),
            answer: r#"{"choices":[{"message":{"content":"a"},"finish_reason":"length"}]}"#,
            decode: Some(
                r#"{"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":"http://10.0.0.1:8998","remote_engine_id":"e","transfer_id":"xfer-0"},"model":"m","messages":[],"stream":true}"#,
            ),
            ..backend
        },
        ProtocolName::Sglang => Row {
            order: LegOrder::Concurrent,
            prefill: Some(
                r#"{"max_tokens":1,"rid":"pd-router-0000000000000000000","bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":0,"model":"m","messages":[],"stream":false}"#,
            ),
            decode: Some(
                r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":0,"model":"m","messages":[],"stream":true}"#,
            ),
            ..backend
        },
        ProtocolName::Trtllm => Row {
            order: LegOrder::Sequential,
            prefill: Some(
                r#"{"max_tokens":1,"disaggregated_params":{"request_type":"context_only","disagg_request_id":4611686018427387904,"schedule_style":0},"model":"m","messages":[],"stream":false}"#,
            ),
            answer: r#"{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":1}}]}"#,
            decode: Some(
                r#"{"disaggregated_params":{"request_type":"generation_only","ctx_request_id":1},"model":"m","messages":[],"stream":true}"#,
            ),
            ..backend
        },
        ProtocolName::Llmd => Row {
            headers: &["x-prefiller-host-port: 10.0.0.1:8000"],
            ..backend
        },
        ProtocolName::Direct => Row {
            headers: &[
                "x-dynamo-worker-instance-id: 2",
                "x-worker-instance-id: 2",
                "x-dynamo-prefill-instance-id: 1",
                "x-prefill-instance-id: 1",
            ],
            ..backend
        },
        ProtocolName::Aggregated => Row {
            order: LegOrder::NoHandoff,
            ..backend
        },
    }
}

/// The names that configuration takes, as its error for another one lists them.
fn names() -> Vec<String> {
    let error = serde_json::from_str::<ProtocolName>(r#""?""#).unwrap_err();
    let text = error.to_string();
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.skip(1).map(str::to_owned).collect()
}

fn target(id: u64, role: Role) -> Target {
    let address = format!("10.0.0.{id}:8000").parse().ok();
    let worker = Worker::new(WorkerId(id), role, address);
    Target::whole(&Arc::new(worker))
}

fn applied(edits: crate::json::Edits) -> String {
    String::from_utf8(edits.apply(BODY.as_bytes())).unwrap()
}

fn decode_leg(handoff: &dyn Handoff, answer: &str) -> Option<String> {
    let staged = || handoff.staged(answer.as_bytes(), 16);
    let edits = handoff
        .decode_at_once()
        .or_else(|| Some(staged()?.decode))?;
    Some(applied(edits))
}

/// Fails where a client could set a field that hands over, or would find one in an answer that prefill has ended.
fn assert_reserved(decode_leg: &str, answer: &str) {
    let leg: BTreeMap<String, Value> = serde_json::from_str(decode_leg).unwrap();
    for field in leg.keys().filter(|field| !BODY.contains(field.as_str())) {
        let quoted = format!("\"{field}\"");
        assert!(IN_REQUESTS.contains(&field.as_str()), "{field}");
        let is_from_answer = answer.contains(&quoted);
        assert!(
            !is_from_answer || IN_ANSWERS.contains(&field.as_str()),
            "{field}"
        );
    }
}

#[test]
fn each_protocol_sends_its_legs_golden_bytes() {
    let (prefill, decode) = (target(1, Role::Prefill), target(2, Role::Decode));
    let binding = Binding {
        bootstrap: Bootstrap::beside("10.0.0.1:8000".parse().unwrap(), 8998),
        engines: EngineIds::from([(0, "e".to_owned())]),
    };
    let pair = HandoffPair {
        prefill: Prefill {
            target: &prefill,
            binding: Some(&binding),
        },
        decode_rank: None,
    };
    let request = Request::parse(Generation::Chat, BODY.as_bytes()).unwrap();
    let names = names();
    assert!(names.len() >= 7, "{names:?}");
    for name in names {
        let protocol: ProtocolName = serde_json::from_str(&format!("\"{name}\"")).unwrap();
        let expected = row(protocol);
        let engine = protocol.engine();
        assert_eq!(
            (engine.rules().name, engine.rules().order),
            (name.as_str(), expected.order)
        );
        let handoff = engine.handoff(&pair, &request, &mut Rooms::new(0)).ok();
        assert_eq!(handoff.is_some(), expected.order.is_ours(), "{name}");
        let prefill_leg = handoff.as_ref().map(|handoff| applied(handoff.prefill()));
        assert_eq!(prefill_leg.as_deref(), expected.prefill, "{name}");
        let decode_leg = handoff.and_then(|one| decode_leg(one.as_ref(), expected.answer));
        assert_eq!(decode_leg.as_deref(), expected.decode, "{name}");
        assert_reserved(decode_leg.as_deref().unwrap_or("{}"), expected.answer);
        let headers = engine.pair_headers(&prefill, &decode);
        let headers: Vec<_> = headers.iter().map(|(k, v)| format!("{k}: {v}")).collect();
        assert_eq!(headers, expected.headers, "{name}");
    }
}

#[test]
fn a_binding_that_is_needed_is_never_done_without() {
    let prefill = target(1, Role::Prefill);
    let unbound = Prefill {
        target: &prefill,
        binding: None,
    };
    let pair = HandoffPair {
        prefill: unbound,
        decode_rank: None,
    };
    let request = Request::parse(Generation::Chat, BODY.as_bytes()).unwrap();
    for name in names() {
        let protocol: ProtocolName = serde_json::from_str(&format!("\"{name}\"")).unwrap();
        let engine = protocol.engine();
        let handoff = engine.handoff(&pair, &request, &mut Rooms::new(0));
        let lacks_binding = engine.binder().is_some();
        let is_refused = lacks_binding || !engine.rules().order.is_ours();
        assert_eq!(handoff.is_err(), is_refused, "{name}");
    }
}
