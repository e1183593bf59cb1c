//! `usage.prompt_tokens_details.cached_tokens`: decode pulled the whole prompt, so only prefill has the cached count.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::fixture::FixtureSpec;
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::scripted::Answer;
use serde_json::{Value, json};

use crate::client_requests::CHAT;
use crate::rig::Rig;
use crate::scripted_pair::{DONE, ScriptedPair, answer, case_of, event, usage};

const PARAMS: &str = r#","kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e"}"#;

/// Prefill found 48 of 64 tokens in its cache.
const CACHED: u64 = 48;

/// Decode's usage, by case.
const DECODE_USAGE: [&str; 4] = [
    r#"{ "prompt_tokens":64,"total_tokens":68,"completion_tokens":4,"prompt_tokens_details":{ "cached_tokens" : 0 },"x":1.0}"#,
    r#"{"prompt_tokens":64,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":1234567},"total_tokens":68,"completion_tokens":4}"#,
    r#"{"prompt_tokens":64,"total_tokens":68,"completion_tokens":4,"prompt_tokens_details":null}"#,
    r#"{"prompt_tokens":64,"total_tokens":68,"completion_tokens":4}"#,
];

/// The first two of them with prefill's number.
const REPORTED_USAGE: [&str; 2] = [
    r#"{ "prompt_tokens":64,"total_tokens":68,"completion_tokens":4,"prompt_tokens_details":{ "cached_tokens" : 48 },"x":1.0}"#,
    r#"{"prompt_tokens":64,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":48},"total_tokens":68,"completion_tokens":4}"#,
];

/// Text of an answer that looks like a usage.
const TEXT: &str = r#"\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":7}}"#;

fn whole(usage: &str) -> String {
    format!(
        r#"{{"id":"c","object":"chat.completion","choices":[{{"index":0,"message":{{"role":"assistant","content":"{TEXT}"}},"finish_reason":"length"}}],"usage":{usage} }}"#
    )
}

fn last_event(usage: &str) -> String {
    format!(
        "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[],\"usage\":{usage}}}\n\n"
    )
}

/// The complete stream.
fn stream(usage: &str) -> String {
    format!(
        "{}{}{DONE}",
        event("\"cached_tokens\":7"),
        last_event(usage)
    )
}

/// The stream in pieces cut within events.
fn pieces(usage: &str) -> Vec<String> {
    let whole = stream(usage);
    let bytes: Vec<char> = whole.chars().collect();
    bytes
        .chunks(97)
        .map(|piece| piece.iter().collect())
        .collect()
}

async fn scripted_pair(proxy: Proxy, reports: bool) -> ScriptedPair {
    let of_prefill = json!({"prompt_tokens_details": {"cached_tokens": CACHED}});
    let of_prefill = pd_router_e2e::engines::with(usage(), of_prefill);
    ScriptedPair::start(
        proxy,
        (Protocol::Nixl, json!({"report_cached_tokens": reports})),
        move |_| Answer::json(answer("one", &of_prefill, PARAMS)),
        |got| {
            let usage_of_decode = DECODE_USAGE[case_of(got)];
            match got.text().contains("\"stream\":true") {
                true => Answer::stream(pieces(usage_of_decode)),
                false => Answer::json(whole(usage_of_decode)),
            }
        },
    )
    .await
}

fn assert_framed(reply: &Reply) {
    if let Some(length) = reply.header("content-length") {
        assert_eq!(length, reply.body.len().to_string());
    }
}

fn cached(usage: &Value) -> Option<u64> {
    usage["prompt_tokens_details"]["cached_tokens"].as_u64()
}

pub async fn cached_tokens_are_prefills_in_a_whole_answer(proxy: Proxy) {
    let pair = scripted_pair(proxy, true).await;
    for (case, usage_of_decode) in DECODE_USAGE.iter().enumerate() {
        let reply = pair.ask(case, false).await.expect(200);
        assert_framed(&reply);
        match REPORTED_USAGE.get(case) {
            Some(expected) => assert_eq!(reply.text(), whole(expected)),
            None => assert_eq!(
                cached(&reply.json()["usage"]),
                Some(CACHED),
                "{usage_of_decode}"
            ),
        }
    }
    pair.ends().await;
}

pub async fn cached_tokens_are_prefills_in_a_stream(proxy: Proxy) {
    let pair = scripted_pair(proxy, true).await;
    for (case, usage_of_decode) in DECODE_USAGE.iter().enumerate() {
        let reply = pair.ask(case, true).await.expect(200);
        assert_framed(&reply);
        match REPORTED_USAGE.get(case) {
            Some(expected) => assert_eq!(reply.text(), stream(expected)),
            None => {
                let events = reply.events();
                let last = events.last().map(|event| cached(&event["usage"]));
                assert_eq!(last, Some(Some(CACHED)), "{usage_of_decode}: {events:?}");
            }
        }
    }
    pair.ends().await;
}

pub async fn cached_tokens_are_decodes_where_nothing_is_configured(proxy: Proxy) {
    let pair = scripted_pair(proxy, false).await;
    for (case, usage_of_decode) in DECODE_USAGE.iter().enumerate() {
        let reply = pair.ask(case, false).await.expect(200);
        assert_eq!(reply.text(), whole(usage_of_decode));
        let reply = pair.ask(case, true).await.expect(200);
        assert_eq!(reply.text(), stream(usage_of_decode));
    }
    pair.ends().await;
}

/// Protocols whose decode leg waits for prefill's answer.
pub async fn cached_tokens_are_prefills_under_every_sequential_protocol(proxy: Proxy) {
    for protocol in [Protocol::Nixl, Protocol::Mooncake, Protocol::Trtllm] {
        let spec = FixtureSpec::of(proxy, protocol).pool(json!({"report_cached_tokens": true}));
        let rig = Rig::on(spec).await;
        for stream in [false, true] {
            let body = json!({
                "model": "sim",
                "messages": [{"role": "user", "content": "tell ".repeat(64)}],
                "max_tokens": 2,
                "stream": stream,
            });
            let body = match stream {
                true => pd_router_e2e::engines::with(
                    body,
                    json!({"stream_options": {"include_usage": true}}),
                ),
                false => body,
            };
            let reply = rig.fixture.send(Ask::post(CHAT, body.to_string())).await;
            let reply = reply.expect_tokens(2);
            let usage = match stream {
                false => reply.json()["usage"].clone(),
                true => reply
                    .events()
                    .last()
                    .map(|event| event["usage"].clone())
                    .unwrap_or_default(),
            };
            // A simulated engine caches nothing between requests: prefill computes the whole prompt.
            assert_eq!(cached(&usage), Some(0), "{}: {usage}", protocol.as_str());
        }
        rig.ends().await;
    }
}
