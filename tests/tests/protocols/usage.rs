//! `usage.prompt_tokens_details.cached_tokens`: decode pulled all it has, so that only prefill knows what was cached.

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

/// Prefill had 48 of 64 tokens cached.
const CACHED: u64 = 48;

/// What decode says of the prompt, by case.
const SAID: [&str; 4] = [
    r#"{ "prompt_tokens":64,"total_tokens":68,"completion_tokens":4,"prompt_tokens_details":{ "cached_tokens" : 0 },"x":1.0}"#,
    r#"{"prompt_tokens":64,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":1234567},"total_tokens":68,"completion_tokens":4}"#,
    r#"{"prompt_tokens":64,"total_tokens":68,"completion_tokens":4,"prompt_tokens_details":null}"#,
    r#"{"prompt_tokens":64,"total_tokens":68,"completion_tokens":4}"#,
];

/// How the first two of those read with prefill's number.
const TOLD: [&str; 2] = [
    r#"{ "prompt_tokens":64,"total_tokens":68,"completion_tokens":4,"prompt_tokens_details":{ "cached_tokens" : 48 },"x":1.0}"#,
    r#"{"prompt_tokens":64,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":48},"total_tokens":68,"completion_tokens":4}"#,
];

/// A prompt may speak of cached tokens too.
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

/// The whole stream.
fn stream(usage: &str) -> String {
    format!(
        "{}{}{DONE}",
        event("\"cached_tokens\":7"),
        last_event(usage)
    )
}

/// The stream in pieces that end in the middle of everything.
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
        json!({"report_cached_tokens": reports}),
        move |_| Answer::json(answer("one", &of_prefill, PARAMS)),
        |got| {
            let said = SAID[case_of(got)];
            match got.text().contains("\"stream\":true") {
                true => Answer::stream(pieces(said)),
                false => Answer::json(whole(said)),
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
    for (case, said) in SAID.iter().enumerate() {
        let reply = pair.ask(case, false).await.expect(200);
        assert_framed(&reply);
        match TOLD.get(case) {
            Some(told) => assert_eq!(reply.text(), whole(told)),
            None => assert_eq!(cached(&reply.json()["usage"]), Some(CACHED), "{said}"),
        }
    }
    pair.gateway.assert_comes_to_rest().await;
}

pub async fn cached_tokens_are_prefills_in_a_stream(proxy: Proxy) {
    let pair = scripted_pair(proxy, true).await;
    for (case, said) in SAID.iter().enumerate() {
        let reply = pair.ask(case, true).await.expect(200);
        assert_framed(&reply);
        match TOLD.get(case) {
            Some(told) => assert_eq!(reply.text(), stream(told)),
            None => {
                let events = reply.events();
                let last = events.last().map(|event| cached(&event["usage"]));
                assert_eq!(last, Some(Some(CACHED)), "{said}: {events:?}");
            }
        }
    }
    pair.gateway.assert_comes_to_rest().await;
}

pub async fn cached_tokens_are_decodes_where_nothing_is_configured(proxy: Proxy) {
    let pair = scripted_pair(proxy, false).await;
    for (case, said) in SAID.iter().enumerate() {
        let reply = pair.ask(case, false).await.expect(200);
        assert_eq!(reply.text(), whole(said));
        let reply = pair.ask(case, true).await.expect(200);
        assert_eq!(reply.text(), stream(said));
    }
    pair.gateway.assert_comes_to_rest().await;
}

/// Those that wait for prefill's answer.
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
            let reply = rig
                .fixture
                .gateway
                .send(Ask::post(CHAT, body.to_string()))
                .await;
            let reply = reply.expect_tokens(2);
            let usage = match stream {
                false => reply.json()["usage"].clone(),
                true => reply
                    .events()
                    .last()
                    .map(|event| event["usage"].clone())
                    .unwrap_or_default(),
            };
            // An engine of the simulation caches nothing between requests: all of it is computed by prefill.
            assert_eq!(cached(&usage), Some(0), "{}: {usage}", protocol.as_str());
        }
        rig.ends().await;
    }
}
