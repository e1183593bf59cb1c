//! The model's name: the workers' name towards them, the client's own in the answer, and every other byte unchanged.

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply};
use pd_router_e2e::engines::{RecordedRequest, Role, static_config, with};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::json_text::members_without;
use pd_router_e2e::scripted::{Answer, ScriptedWorker};
use serde_json::{Value, json};

use crate::rig::CHAT;

/// Headers by which a gateway in front overrides the model; the first one takes precedence.
const BY_LLMD: &str = "x-llm-d-model-name-rewrite";
const BY_GATEWAY: &str = "x-gateway-model-name-rewrite";

/// The client's name, with characters that JSON escapes; and the workers' name.
const CLIENTS: &str = "the \"client's\" <own>";
const WORKERS: &str = "workers/name";

/// Text that looks like the model's field and is not.
const DECOY: &str = r#"\"model\":\"workers/name\", \"model\": \"the own\""#;

const PARAMS: &str = r#""kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e"}"#;

/// Concurrent requests.
const AT_ONCE: usize = 24;

/// A prefill and a decode worker; decode answers by the number in the request.
struct ScriptedPair {
    fixture: Fixture,
}

impl ScriptedPair {
    async fn start(
        proxy: Proxy,
        pool: Value,
        answer: impl Fn(&RecordedRequest) -> Answer + Send + Sync + 'static,
    ) -> ScriptedPair {
        let spec = FixtureSpec::nixl(proxy, (0, 0)).pool(pool);
        let mut fixture = Fixture::acquire(spec).await;
        let prefill = |_: &_| Answer::json(whole(PARAMS));
        fixture.play(Role::Prefill, prefill).await;
        fixture.play(Role::Decode, answer).await;
        // The workers serve any model: the requested name is under test.
        for entry in &mut fixture.engines.others {
            entry.as_object_mut().map(|entry| entry.remove("model"));
        }
        fixture.list_scripted().await;
        ScriptedPair { fixture }
    }

    fn prefill(&self) -> &ScriptedWorker {
        &self.fixture.scripted[0]
    }

    fn decode(&self) -> &ScriptedWorker {
        &self.fixture.scripted[1]
    }

    async fn send(&self, ask: Ask) -> Reply {
        self.fixture.send(ask).await
    }

    /// Releases the gateway to the next test, once no booking is open.
    async fn ends(self) {
        self.fixture.gateway.assert_comes_to_rest().await;
        self.fixture.release();
    }
}

fn as_asked(got: &RecordedRequest) -> Answer {
    match is_streamed(got.text()) {
        true => Answer::stream([stream()]),
        false => Answer::json(whole(r#""z":9007199254740993"#)),
    }
}

fn is_streamed(body: &str) -> bool {
    body.contains("\"stream\":true")
}

/// An answer under the workers' name, with everything that re-writing JSON loses.
fn whole(member: &str) -> String {
    format!(
        r#"{{ "z":1.0, "model" : "{WORKERS}","id":9007199254740993,"choices":[{{"index":0,"message":{{"role":"assistant","content":"<&> {DECOY} \u00e9"}},"finish_reason":"length"}}],"usage":{{"prompt_tokens":4,"completion_tokens":4,"total_tokens":8}},{member} }}"#
    )
}

/// A streamed one.
fn stream() -> String {
    let event = |text: &str| {
        format!(
            "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"model\":\"{WORKERS}\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}],\"seed\":9007199254740993}}\n\n"
        )
    };
    format!(
        ": \"model\":\"{WORKERS}\"\n\n{}{}data: [DONE]\n\n",
        event(DECOY),
        event("<&>")
    )
}

/// The same answer as the client should get it.
fn restored(text: &str) -> String {
    let name = json!(CLIENTS).to_string();
    let named = format!("\"{WORKERS}\"");
    // The name follows an unescaped key; a comment has no key.
    let lines = text.split_inclusive('\n').map(|line| {
        if line.starts_with(':') {
            return line.to_owned();
        }
        let spaced = line.replacen(
            &format!("\"model\" : {named}"),
            &format!("\"model\" : {name}"),
            1,
        );
        spaced.replacen(
            &format!("\"model\":{named}"),
            &format!("\"model\":{name}"),
            1,
        )
    });
    lines.collect()
}

/// A request with the client's name and everything that re-writing JSON loses, and with the decoy in its text.
fn body(text: &str, streamed: bool) -> String {
    let name = json!(CLIENTS).to_string();
    format!(
        "{{ \"z\":1.0,\"seed\": 9007199254740993, \"messages\":[{{\"role\":\"user\",\"content\":\"<&> {DECOY} \\u00e9 {text}\"}}],\"model\" : {name},\"stream\":{streamed},\"max_tokens\":4,\"a\":1e0}} \n"
    )
}

/// The body that a worker should get, without the hand-off's members.
fn renamed(body: &str, name: &str) -> String {
    let from = format!("\"model\" : {}", json!(CLIENTS));
    assert!(body.contains(&from), "{body}");
    body.replacen(&from, &format!("\"model\" : {}", json!(name)), 1)
}

fn rewritten() -> Value {
    json!({"model_rewrites": [{"model": CLIENTS, "targets": [{"model": WORKERS}]}]})
}

fn assert_length_is_right(got: &RecordedRequest) {
    assert_eq!(got.values("content-length"), [got.body_bytes.to_string()]);
    assert!(got.values("transfer-encoding").is_empty(), "{got:?}");
}

pub async fn both_legs_get_the_workers_name_and_the_client_reads_its_own(proxy: Proxy) {
    let pair = ScriptedPair::start(proxy, rewritten(), as_asked).await;
    for streamed in [false, true] {
        let sent = body("hello", streamed);
        let reply = pair.send(Ask::post(CHAT, sent.clone())).await.expect(200);
        let expected = match streamed {
            true => stream(),
            false => whole(r#""z":9007199254740993"#),
        };
        assert_eq!(reply.text(), restored(&expected));
        if let Some(length) = reply.header("content-length") {
            assert_eq!(length, reply.body.len().to_string());
        }
        let (prefill, decode) = (pair.prefill().last(), pair.decode().last());
        // Only the hand-off and, for prefill, the limits differ from the client's body.
        let added = ["kv_transfer_params"];
        let wanted = renamed(&sent, WORKERS);
        assert_eq!(
            members_without(decode.text(), &added),
            members_without(&wanted, &added)
        );
        let added = ["kv_transfer_params", "max_tokens", "stream"];
        assert_eq!(
            members_without(prefill.text(), &added),
            members_without(&wanted, &added)
        );
        for got in [&prefill, &decode] {
            assert_length_is_right(got);
        }
    }
    pair.ends().await;
}

/// An aggregated worker gets every byte but the name unchanged.
pub async fn every_other_byte_is_as_it_was(proxy: Proxy) {
    let worker = ScriptedWorker::start(as_asked).await;
    let listed = json!({"address": worker.address.to_string(), "role": "aggregated"});
    let pool = with(rewritten(), json!({"protocol": "aggregated"}));
    let gateway = Gateway::start(proxy, &static_config(vec![listed], pool), &[]).await;
    for streamed in [false, true] {
        let sent = body("hello", streamed);
        gateway
            .send(Ask::post(CHAT, sent.clone()))
            .await
            .expect(200);
        let got = worker.last();
        assert_eq!(got.text(), renamed(&sent, WORKERS));
        assert_length_is_right(&got);
    }
    // A name without a rule passes unchanged in both directions.
    let other = r#"{"model":"another", "messages":[{"role":"user","content":"hi"}]}"#;
    let reply = gateway.send(Ask::post(CHAT, other)).await.expect(200);
    assert_eq!(worker.last().text(), other);
    assert_eq!(reply.text(), whole(r#""z":9007199254740993"#));
}

/// The number in a request, which gives the cut of its answer.
fn cut_at(got: &RecordedRequest) -> usize {
    let number = got.text().split("cut at ").nth(1);
    let digits = number.and_then(|rest| rest.split('.').next());
    let number = digits.and_then(|digits| digits.parse().ok());
    number.unwrap_or_else(|| panic!("no number in {got:?}"))
}

async fn cut_answers(pair: &ScriptedPair, count: usize, streamed: bool) -> Vec<Reply> {
    let mut replies = Vec::new();
    for first in (0..count).step_by(AT_ONCE) {
        let some = (first..count.min(first + AT_ONCE)).map(|at| {
            let ask = Ask::post(CHAT, body(&format!("cut at {at}."), streamed));
            pair.send(ask)
        });
        replies.extend(join_all(some).await);
    }
    replies
}

/// GAIE #2769: the name is split over chunks, at every byte.
pub async fn the_clients_name_is_read_wherever_a_stream_is_cut(proxy: Proxy) {
    let pair = ScriptedPair::start(proxy, rewritten(), |got| {
        let all = stream();
        let (one, two) = all.split_at(cut_at(got).min(all.len()));
        Answer::stream([one.to_owned(), two.to_owned()])
    })
    .await;
    let all = stream();
    // Cuts up to the end of the first event, which holds the name and its decoy.
    let end = all.find("<&>").unwrap_or(all.len());
    for (at, reply) in cut_answers(&pair, end, true).await.into_iter().enumerate() {
        assert_eq!(reply.expect(200).text(), restored(&all), "cut at {at}");
    }
    pair.ends().await;
}

/// The same for an unstreamed answer.
pub async fn the_clients_name_is_read_wherever_an_answer_is_cut(proxy: Proxy) {
    let pair = ScriptedPair::start(proxy, rewritten(), |got| {
        let all = whole(r#""end":1"#);
        let (one, two) = all.split_at(cut_at(got).min(all.len()));
        Answer::json_in_pieces([one.to_owned(), two.to_owned()])
    })
    .await;
    let all = whole(r#""end":1"#);
    let end = all.find("finish_reason").unwrap_or(all.len());
    for (at, reply) in cut_answers(&pair, end, false).await.into_iter().enumerate() {
        let reply = reply.expect(200);
        assert_eq!(reply.text(), restored(&all), "cut at {at}");
        if let Some(length) = reply.header("content-length") {
            assert_eq!(length, reply.body.len().to_string());
        }
    }
    pair.ends().await;
}

/// Every byte of a stream in a piece of its own.
pub async fn a_stream_of_single_bytes_reads_the_same(proxy: Proxy) {
    let pair = ScriptedPair::start(proxy, rewritten(), |_| {
        Answer::stream(stream().chars().map(String::from))
    })
    .await;
    let ask = Ask::post(CHAT, body("hello", true));
    let reply = pair.send(ask).await.expect(200);
    assert_eq!(reply.text(), restored(&stream()));
    pair.ends().await;
}

/// An answer that is not JSON, or has no name, passes unchanged (GAIE #1436).
pub async fn what_has_no_name_is_left_alone(proxy: Proxy) {
    const ANSWERS: [&str; 4] = [
        "no healthy upstream",
        r#"{"model":null,"choices":[{"index":0,"text":"a"}]}"#,
        r#"{"model":"workers/name""#,
        r#"["model","workers/name"]"#,
    ];
    let pair =
        ScriptedPair::start(proxy, rewritten(), |got| Answer::json(ANSWERS[cut_at(got)])).await;
    for (answer, reply) in ANSWERS
        .iter()
        .zip(cut_answers(&pair, ANSWERS.len(), false).await)
    {
        assert_eq!(reply.expect(200).text(), *answer);
    }
    pair.ends().await;
}

/// The model requested of the decode worker.
fn asked_for(pair: &ScriptedPair) -> String {
    let name = pair.decode().last().json()["model"].clone();
    name.as_str().unwrap_or_default().to_owned()
}

pub async fn a_header_comes_before_an_exact_rule_and_that_before_any(proxy: Proxy) {
    let rules = json!({"trust_clients": true, "model_rewrites": [
        {"targets": [{"model": "by-any"}]},
        {"model": "exact", "targets": [{"model": "by-exact"}]},
        {"model": "exact", "targets": [{"model": "by-second"}]},
    ]});
    let pair = ScriptedPair::start(proxy, rules, as_asked).await;
    let ask = |model: Value| {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "hi"}]});
        Ask::post(CHAT, body.to_string())
    };
    for (ask, wanted, clients) in [
        (ask(json!("exact")), "by-exact", "exact"),
        (ask(json!("other")), "by-any", "other"),
        (
            ask(json!("exact")).header(BY_GATEWAY, "by-gateway"),
            "by-gateway",
            "exact",
        ),
        (
            ask(json!("other")).header(BY_LLMD, "by-llmd"),
            "by-llmd",
            "other",
        ),
        (
            ask(json!("exact"))
                .header(BY_GATEWAY, "by-gateway")
                .header(BY_LLMD, "by-llmd"),
            "by-llmd",
            "exact",
        ),
        // An empty header has no effect.
        (ask(json!("exact")).header(BY_LLMD, ""), "by-exact", "exact"),
    ] {
        let reply = pair.send(ask.clone()).await.expect(200);
        assert_eq!(asked_for(&pair), wanted, "{ask:?}");
        assert_eq!(pair.prefill().last().json()["model"], wanted, "{ask:?}");
        assert_eq!(reply.json()["model"], clients, "{ask:?}");
        for got in [pair.prefill().last(), pair.decode().last()] {
            assert!(got.values(BY_LLMD).is_empty() && got.values(BY_GATEWAY).is_empty());
        }
    }
    // A request without a model gets one.
    let nameless = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
    pair.send(Ask::post(CHAT, nameless)).await.expect(200);
    assert_eq!(asked_for(&pair), "by-any");
    // A model that is not a text is refused.
    pair.send(ask(json!(7))).await.expect_error(400);
    pair.ends().await;
}

pub async fn targets_have_their_share_by_weight(proxy: Proxy) {
    const REQUESTS: usize = 320;
    const SHARE: f64 = 0.75;
    // Beyond these a share is bad luck once in 10^7 times.
    const SIGMAS: f64 = 6.0;
    let targets = json!([{"model": "large", "weight": 3}, {"model": "small"}]);
    let rules = json!({"model_rewrites": [{"model": "public", "targets": targets}]});
    let pair = ScriptedPair::start(proxy, rules, as_asked).await;
    let body = r#"{"model":"public","messages":[{"role":"user","content":"hi"}],"max_tokens":4}"#;
    for reply in pd_router_e2e::client::crowd(
        pair.fixture.gateway.listen,
        8,
        REQUESTS / 8,
        &Ask::post(CHAT, body),
    )
    .await
    {
        assert_eq!(reply.expect(200).json()["model"], "public");
    }
    let got = pair.decode().requests();
    assert_eq!(got.len(), REQUESTS);
    let large = got
        .iter()
        .filter(|got| got.json()["model"] == "large")
        .count();
    let small = got
        .iter()
        .filter(|got| got.json()["model"] == "small")
        .count();
    assert_eq!(large + small, REQUESTS);
    let sigma = (SHARE * (1.0 - SHARE) / REQUESTS as f64).sqrt();
    let share = large as f64 / REQUESTS as f64;
    assert!((share - SHARE).abs() <= SIGMAS * sigma, "{share}");
    pair.ends().await;
}

/// From an untrusted caller the header is removed and has no effect.
pub async fn a_name_in_a_header_of_anybody_is_nothing(proxy: Proxy) {
    let pair = ScriptedPair::start(proxy, rewritten(), as_asked).await;
    for name in [BY_GATEWAY, BY_LLMD, "X-LLM-D-Model-Name-Rewrite"] {
        let ask = Ask::post(CHAT, body("hello", false)).header(name, "forged");
        pair.send(ask).await.expect(200);
        for got in [pair.prefill().last(), pair.decode().last()] {
            assert_eq!(got.json()["model"], WORKERS);
            assert!(got.values(name).is_empty(), "{got:?}");
        }
    }
    pair.ends().await;
}
