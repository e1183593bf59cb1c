//! SGLang only: batches, `/generate`, ranks in the body, log probabilities of the prompt.

use std::collections::BTreeSet;

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::RecordedRequest;
use pd_router_e2e::fixture::FixtureSpec;
use pd_router_e2e::golden::{front, holes, number};
use pd_router_e2e::json_text::values_of;
use pd_router_e2e::protocols::Protocol;
use serde_json::{Value, json};

use crate::client_requests::{CHAT, COMPLETIONS};
use crate::rig::Rig;

const GENERATE: &str = "/generate";

fn chat(members: &str) -> String {
    format!(
        r#"{{"model":"sim","messages":[{{"role":"user","content":"hi"}}],"max_tokens":2{members}}}"#
    )
}

/// The rooms of a leg; fails unless there are `sequences` of them, and as many hosts and ports.
fn rooms(leg: &RecordedRequest, sequences: usize) -> Vec<u64> {
    let body = leg.json();
    for field in ["bootstrap_host", "bootstrap_port", "bootstrap_room"] {
        let list = body[field].as_array().map(Vec::len);
        assert_eq!(list, Some(sequences), "{field} in {leg:?}");
    }
    let rooms = body["bootstrap_room"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    rooms.iter().filter_map(Value::as_u64).collect()
}

pub async fn batches_and_choices_have_a_room_each(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Sglang).await;
    let completion = |members: &str| format!(r#"{{"model":"sim","max_tokens":2,{members}}}"#);
    let mut used = BTreeSet::new();
    for (path, body, sequences) in [
        (
            COMPLETIONS,
            completion(r#""prompt":["one","two","three"]"#),
            3,
        ),
        (COMPLETIONS, completion(r#""prompt":[[1,2],[3,4,5]]"#), 2),
        (
            COMPLETIONS,
            completion(r#""prompt":["one","two"],"n":2"#),
            4,
        ),
        (
            COMPLETIONS,
            completion(r#""prompt":["one","two"],"stream":true"#),
            2,
        ),
        (CHAT, chat(r#","n":2"#), 2),
        (CHAT, chat(r#","n":3,"stream":true"#), 3),
        (
            GENERATE,
            r#"{"text":["one","two"],"sampling_params":{"max_new_tokens":2}}"#.to_owned(),
            2,
        ),
        (
            GENERATE,
            r#"{"input_ids":[[1,2],[3]],"sampling_params":{"max_new_tokens":2}}"#.to_owned(),
            2,
        ),
        (
            GENERATE,
            r#"{"text":"one","sampling_params":{"max_new_tokens":2,"n":2}}"#.to_owned(),
            2,
        ),
    ] {
        let legs = rig.legs_of(Ask::post(path, body.clone())).await;
        let (prefill, decode) = legs.pair();
        let met = rooms(prefill, sequences);
        assert_eq!(met, rooms(decode, sequences), "{body}");
        for room in met {
            assert!(
                room <= i64::MAX.unsigned_abs() && used.insert(room),
                "{room}: {body}"
            );
        }
        legs.reply.expect(200);
    }
    // A single sequence has a single room, not a list of one.
    for body in [chat(""), chat(r#","n":1"#)] {
        let legs = rig.legs_of(Ask::post(CHAT, body)).await;
        let (prefill, decode) = legs.pair();
        let room = prefill.json()["bootstrap_room"].clone();
        assert!(room.is_u64(), "{prefill:?}");
        assert_eq!(decode.json()["bootstrap_room"], room);
        legs.reply.expect(200);
    }
    rig.ends().await;
}

pub async fn generate_is_handed_off_like_the_rest(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Sglang).await;
    let bootstrap = r#""bootstrap_host":"‹host›","bootstrap_port":‹port›,"bootstrap_room":‹room›"#;
    let cases = [
        (
            r#"{"text":"Once upon a time", "sampling_params":{"max_new_tokens" : 4,"temperature":0.0},"x":9007199254740993}"#,
            r#"{"text":"Once upon a time", "sampling_params":{"max_new_tokens" : 1,"temperature":0.0},"x":9007199254740993}"#,
        ),
        (
            r#"{"input_ids":[1,2,3,4],"sampling_params":{"min_new_tokens":2,"max_new_tokens":4},"stream":true}"#,
            r#"{"input_ids":[1,2,3,4],"sampling_params":{"min_new_tokens":1,"max_new_tokens":1},"stream":false}"#,
        ),
    ];
    for (body, one) in cases {
        let legs = rig.legs_of(Ask::post(GENERATE, body)).await;
        let (prefill, decode) = legs.pair();
        assert_eq!(
            (prefill.path.as_str(), decode.path.as_str()),
            (GENERATE, GENERATE)
        );
        let sent = holes(
            &front(one, &format!("\"rid\":\"‹rid›\",{bootstrap}")),
            prefill.text(),
        );
        let found = holes(&front(body, bootstrap), decode.text());
        assert_eq!(number(&sent, "room"), number(&found, "room"));
        let reply = legs.reply.expect(200);
        match body.contains("\"stream\":true") {
            true => assert!(!reply.events().is_empty()),
            false => assert!(reply.json()["meta_info"].is_object(), "{}", reply.text()),
        }
    }
    // Prefill's limit is one token for any limit of the client.
    for body in [r#"{"text":"hi"}"#, r#"{"text":"hi","sampling_params":{}}"#] {
        let legs = rig.legs_of(Ask::post(GENERATE, body)).await;
        let (prefill, decode) = legs.pair();
        assert_eq!(
            prefill.json()["sampling_params"]["max_new_tokens"],
            1,
            "{prefill:?}"
        );
        holes(&front(body, bootstrap), decode.text());
        legs.reply.expect(200);
    }
    rig.ends().await;
}

pub async fn ranks_are_named_on_both_legs(proxy: Proxy) {
    const RANKS: u64 = 4;
    let spec = FixtureSpec::of(proxy, Protocol::Sglang);
    let mut rig = Rig::on(spec.engines(&["--dp-size", "4"], json!({"dp_size": RANKS}))).await;
    let mut seen = BTreeSet::new();
    for _ in 0..12 {
        let legs = rig.legs_of(Ask::post(CHAT, chat(""))).await;
        let (prefill, decode) = legs.pair();
        let rank = |leg: &RecordedRequest, name: &str| {
            let values = values_of(leg.text(), name);
            let rank = values.first().and_then(|rank| rank.parse::<u64>().ok());
            assert!(
                values.len() == 1 && rank.is_some_and(|rank| rank < RANKS),
                "{name}: {leg:?}"
            );
            rank.unwrap_or_default()
        };
        let prefills = rank(prefill, "routed_dp_rank");
        assert_eq!(rank(decode, "disagg_prefill_dp_rank"), prefills);
        rank(decode, "routed_dp_rank");
        assert!(
            values_of(prefill.text(), "disagg_prefill_dp_rank").is_empty(),
            "{prefill:?}"
        );
        let room = prefill.json()["bootstrap_room"].as_u64();
        assert_eq!(room.map(|room| room % RANKS), Some(prefills), "{prefill:?}");
        seen.insert(prefills);
        legs.reply.expect(200);
    }
    assert!(seen.len() > 1, "one rank alone is used: {seen:?}");
    rig.ends().await;
}

/// The entries of the prompt's log probabilities.
fn of_prompt(answer: &Value) -> usize {
    let entries = answer["meta_info"]["input_token_logprobs"].as_array();
    entries.map(Vec::len).unwrap_or_default()
}

pub async fn log_probabilities_of_the_prompt_are_prefills(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Sglang).await;
    let ids = [11, 12, 13, 14, 15];
    let mut body = json!({
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 3},
        "return_logprob": true,
        "logprob_start_len": 0,
    });
    let legs = rig.legs_of(Ask::post(GENERATE, body.to_string())).await;
    let reply = legs.reply.expect(200);
    let answer = reply.json();
    assert_eq!(of_prompt(&answer), ids.len(), "{answer}");
    if let Some(length) = reply.header("content-length") {
        assert_eq!(length, reply.body.len().to_string());
    }

    body["stream"] = json!(true);
    let legs = rig.legs_of(Ask::post(GENERATE, body.to_string())).await;
    let events = legs.reply.expect(200).events();
    let with_text = events.iter().filter(|event| event["meta_info"].is_object());
    let counts: Vec<usize> = with_text.map(of_prompt).collect();
    assert!(
        !counts.is_empty() && counts.iter().all(|count| *count == ids.len()),
        "{events:?}"
    );

    let batch = json!({
        "input_ids": [ids, ids],
        "sampling_params": {"max_new_tokens": 3},
        "return_logprob": true,
        "logprob_start_len": 0,
    });
    let legs = rig.legs_of(Ask::post(GENERATE, batch.to_string())).await;
    let answers = legs.reply.expect(200).json();
    let counts: Vec<usize> = answers
        .as_array()
        .into_iter()
        .flatten()
        .map(of_prompt)
        .collect();
    assert_eq!(counts, [ids.len(); 2], "{answers}");
    rig.ends().await;
}
