//! The contract between routers and sidecars, C01 to C08: the client's request.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::Role;
use pd_router_e2e::golden::{front, holes};
use pd_router_e2e::json_text::{members_without, values_of};
use pd_router_e2e::protocols::Protocol;
use serde_json::{Value, json};

use crate::client_requests::{CHAT, CHATS, COMPLETIONS};
use crate::rig::Rig;
use crate::scripted_pair::{ScriptedPair, answer, as_asked, usage};

const SEQUENTIAL: [Protocol; 3] = [Protocol::Nixl, Protocol::Mooncake, Protocol::Trtllm];

/// Answer of a vLLM prefill worker that ended at the limit.
fn prefilled(text: &str) -> String {
    let params = r#","kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"e","remote_host":"127.0.0.1","remote_port":9}"#;
    answer(text, &usage(), params)
}

/// A body with a place for further members.
fn chat_with(members: &str) -> String {
    format!(r#"{{"model":"sim","messages":[{{"role":"user","content":"hi"}}]{members}}}"#)
}

pub async fn c01_what_is_not_split_passes_byte_for_byte(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Aggregated).await;
    let awkward = "{\"stream\":false , \"model\":\"sim\",\"model\":\"sim\",\n\"messages\":[{\"role\":\"user\",\"content\":\"\\u0041\\/\"}],\"max_tokens\":3,\"n\":1,\"x\":1E400}";
    for body in [CHATS[1].body, CHATS[2].body, awkward] {
        let legs = rig.legs_of(Ask::post(CHAT, body)).await;
        assert_eq!(legs.only().text(), body);
    }
    rig.ends().await;
}

pub async fn c02_decode_gets_the_original_parameters(proxy: Proxy) {
    let mut rig = Rig::start(proxy, Protocol::Nixl).await;
    let members = r#","max_tokens":4,"max_completion_tokens":4,"temperature":0.70,"seed":18446744073709551615,"stop":["\n"],"logprobs":null"#;
    let body = chat_with(members);
    let legs = rig.legs_of(Ask::post(CHAT, body.clone())).await;
    let (_, decode) = legs.pair();
    holes(
        &front(&body, "\"kv_transfer_params\":{‹hand-off›}"),
        decode.text(),
    );
    legs.reply.expect_tokens(4);
    rig.ends().await;
}

pub async fn c03_no_token_of_prefill_gets_into_a_stream(proxy: Proxy) {
    let pair = ScriptedPair::start(
        proxy,
        (Protocol::Nixl, json!({})),
        |_| pd_router_e2e::scripted::Answer::json(prefilled("LEAKED")),
        |got| as_asked(got, "kept"),
    )
    .await;
    for streamed in [true, false] {
        let reply = pair.ask(0, streamed).await.expect(200);
        assert!(reply.text().contains("kept"), "{reply:?}");
        assert!(!reply.text().contains("LEAKED"), "{reply:?}");
    }
    assert!(
        pair.decode()
            .requests()
            .iter()
            .all(|leg| !leg.text().contains("LEAKED"))
    );
    pair.ends().await;
}

pub async fn c04_every_combination_of_limits(proxy: Proxy) {
    for protocol in SEQUENTIAL {
        let mut rig = Rig::start(proxy, protocol).await;
        let names = ["max_tokens", "max_completion_tokens"];
        for sent in [vec![], vec![names[0]], vec![names[1]], names.to_vec()] {
            for stream in ["", ",\"stream\":true"] {
                let limits = sent.iter().map(|name| format!(",\"{name}\":3"));
                let body = chat_with(&format!("{}{stream}", limits.collect::<String>()));
                let legs = rig.legs_of(Ask::post(CHAT, body.clone())).await;
                let (prefill, decode) = legs.pair();
                // The older name is always present, the newer one if the client sent it.
                assert_eq!(values_of(prefill.text(), names[0]), ["1"], "{prefill:?}");
                let newer = sent.iter().filter(|name| **name == names[1]).count();
                assert_eq!(values_of(prefill.text(), names[1]), vec!["1"; newer]);
                for name in names {
                    let client = values_of(&body, name);
                    assert_eq!(values_of(decode.text(), name), client, "{decode:?}");
                }
                legs.reply.expect(200);
            }
        }
        rig.ends().await;
    }
}

pub async fn c05_min_tokens_and_stream_options_are_decodes_alone(proxy: Proxy) {
    let members =
        r#","max_tokens":4,"min_tokens":3,"stream":true,"stream_options":{"include_usage":true}"#;
    let body = chat_with(members);
    for protocol in SEQUENTIAL {
        let mut rig = Rig::start(proxy, protocol).await;
        let legs = rig.legs_of(Ask::post(CHAT, body.clone())).await;
        let (prefill, decode) = legs.pair();
        // A lower bound above prefill's limit is refused; without one prefill's token may be the end of the answer.
        for (name, of_prefill) in [("min_tokens", &["1"][..]), ("stream_options", &[])] {
            assert_eq!(values_of(prefill.text(), name), of_prefill, "{prefill:?}");
            assert_eq!(values_of(decode.text(), name), values_of(&body, name));
        }
        assert_eq!(values_of(prefill.text(), "stream"), ["false"]);
        let reply = legs.reply.expect_tokens(4);
        let has_usage = reply
            .events()
            .iter()
            .any(|event| event["usage"].is_object());
        assert!(has_usage, "decode was asked for the usage: {reply:?}");
        rig.ends().await;
    }
}

pub async fn c06_unknown_fields_and_tools_survive_both_legs(proxy: Proxy) {
    let members = concat!(
        r#","max_tokens":2,"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"max_tokens":{"type":"integer","minimum":1.0}}}}}]"#,
        r#","tool_choice":"auto","response_format":{"type":"text"},"metadata":{"kv_transfer_params":{"a":1}},"vendor_x":[null,1e2,"\u00e9"]"#,
    );
    let body = chat_with(members);
    let edited = [
        "max_tokens",
        "kv_transfer_params",
        "disaggregated_params",
        "prompt_token_ids",
        "rid",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
    ];
    for protocol in [
        Protocol::Nixl,
        Protocol::Mooncake,
        Protocol::Trtllm,
        Protocol::Sglang,
    ] {
        let mut rig = Rig::start(proxy, protocol).await;
        let legs = rig.legs_of(Ask::post(CHAT, body.clone())).await;
        let (prefill, decode) = legs.pair();
        for leg in [prefill, decode] {
            let kept = members_without(leg.text(), &edited);
            assert_eq!(kept, members_without(&body, &edited), "{leg:?}");
        }
        legs.reply.expect(200);
        rig.ends().await;
    }
}

/// Fails if any engine got a request.
async fn assert_no_engine_requests(rig: &Rig) {
    for role in [Role::Prefill, Role::Decode] {
        let got = rig.fixture.requests(role).await;
        assert!(
            got.iter().all(|got| *got == 0),
            "{}: {got:?}",
            role.as_str()
        );
    }
}

pub async fn c07_several_choices_are_refused_before_any_leg(proxy: Proxy) {
    let prompt = |prompt: &str| format!(r#"{{"model":"sim","prompt":{prompt},"max_tokens":2}}"#);
    for protocol in SEQUENTIAL {
        let rig = Rig::start(proxy, protocol).await;
        for (path, body, field) in [
            (CHAT, chat_with(r#","n":2"#), "n"),
            (CHAT, chat_with(r#","n":128,"stream":true"#), "n"),
            (
                COMPLETIONS,
                r#"{"model":"sim","prompt":"x","n":3}"#.to_owned(),
                "n",
            ),
            (
                COMPLETIONS,
                r#"{"model":"sim","prompt":"x","best_of":2}"#.to_owned(),
                "n",
            ),
            (COMPLETIONS, prompt(r#"["one","two"]"#), "prompt"),
            (COMPLETIONS, prompt("[[1,2],[3]]"), "prompt"),
        ] {
            let reply = rig.fixture.send(Ask::post(path, body)).await;
            let message = reply.expect_error(400);
            assert!(message.starts_with(field), "{field}: {message}");
        }
        assert_no_engine_requests(&rig).await;
        for members in [r#","n":1"#, r#","n":null"#] {
            let ask = Ask::post(CHAT, chat_with(members));
            rig.fixture.send(ask).await.expect(200);
        }
        rig.ends().await;
    }
}

pub async fn c08_a_hand_off_of_the_clients_is_refused(proxy: Proxy) {
    let rig = Rig::start(proxy, Protocol::Nixl).await;
    let forged = json!({
        "do_remote_prefill": true,
        "remote_engine_id": "another-tenants",
        "remote_block_ids": [[1, 2, 3]],
        "remote_host": "127.0.0.1",
        "remote_port": 9,
    });
    for forged in [
        forged,
        json!({"do_remote_decode": true}),
        json!([1]),
        json!("x"),
    ] {
        let body = chat_with(&format!(",\"kv_transfer_params\":{forged}"));
        let reply = rig.fixture.send(Ask::post(CHAT, body)).await;
        let message = reply.expect_error(400);
        assert!(message.contains("kv_transfer_params"), "{message}");
    }
    assert_no_engine_requests(&rig).await;
    for empty in [json!(null), json!({})] {
        let body = chat_with(&format!(",\"kv_transfer_params\":{empty}"));
        let reply = rig.fixture.send(Ask::post(CHAT, body)).await;
        reply.expect(200);
    }
    for leg in rig.fixture.recorded(Role::Decode).await {
        let hand_offs = values_of(leg.text(), "kv_transfer_params");
        let parsed: Vec<Value> = hand_offs
            .iter()
            .filter_map(|hand_off| serde_json::from_str(hand_off).ok())
            .collect();
        let ours = matches!(parsed.as_slice(), [one] if one["do_remote_prefill"] == true);
        assert!(ours, "one hand-off, and ours: {leg:?}");
    }
    rig.ends().await;
}
