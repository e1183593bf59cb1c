//! Requests that the gateway sends itself: their headers are its own, except for a listed few of the client's.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Failure, Reply, chat_body};
use pd_router_e2e::engines::{
    FAST, Fleet, RecordedRequest, Role, in_turns, named, static_config, with,
};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::scripted::{Answer, ScriptedWorker};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";

/// Client headers that are copied to a call.
const ALONG: [(&str, &str); 10] = [
    ("authorization", "Bearer the-clients-own"),
    (
        "traceparent",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    ("tracestate", "a=1"),
    ("baggage", "b=2"),
    ("b3", "80f198ee56343ba864fe8b2a57d3eff7-e457b5a2e4d86bd1-1"),
    ("x-b3-traceid", "80f198ee56343ba864fe8b2a57d3eff7"),
    ("x-b3-spanid", "e457b5a2e4d86bd1"),
    ("user-agent", "a client"),
    ("accept-language", "en-GB"),
    ("x-api-key", "what the pool adds"),
];

/// Client headers that are not copied to a call.
const BEHIND: [(&str, &str); 6] = [
    ("cookie", "session=1"),
    ("x-mine", "1"),
    ("grpc-timeout", "1n"),
    ("content-language", "en"),
    ("x-forwarded-proto", "ftp"),
    ("te", "trailers"),
];

fn call_with(content_type: &str, prompt: &str) -> Ask {
    let mut body = chat_body(prompt);
    body["stream"] = json!(true);
    Ask::post(CHAT, body.to_string()).content_type(content_type)
}

fn assert_is_a_calls(got: &RecordedRequest) {
    for (name, value) in ALONG {
        assert_eq!(got.values(name), [value], "{name} in {got:?}");
    }
    for (name, value) in BEHIND {
        assert!(!got.values(name).contains(&value), "{name} in {got:?}");
    }
    assert_eq!(got.values("content-type"), ["application/json"], "{got:?}");
}

pub async fn found_b17_a_call_carries_what_is_listed_and_nothing_else(proxy: Proxy) {
    let fleet = Fleet::start(1, 2, FAST).await;
    let pool = with(in_turns(), json!({"call_headers": ["X-Api-Key"]}));
    let gateway = Gateway::start_on_one_thread(proxy, &fleet.config_with(pool), &[]).await;
    // A call replaces the leg that fails.
    let once = json!({"kind": "status", "status": 500, "times": 1});
    fleet.decode[0].fault(&once).await;
    let all = ALONG.iter().chain(&BEHIND);
    let ask = all.fold(call_with("text/plain", "hello"), |ask, (name, value)| {
        ask.header(name, value)
    });
    for _ in 0..2 {
        gateway.send(ask.clone()).await.expect_tokens(4);
    }
    for got in fleet.prefill[0].requests().await {
        assert_is_a_calls(&got);
    }
    let mut called = 0;
    for engine in &fleet.decode {
        for got in engine.requests().await {
            // The forwarded leg has all headers of the client.
            if got.values("x-mine").is_empty() {
                assert_is_a_calls(&got);
                called += 1;
            }
        }
    }
    assert_eq!(called, 1, "one decode worker is called");
    gateway.assert_comes_to_rest().await;
}

/// SGLang's legs run at once: if a failed prefill counted as a success, decode's answer would end well.
pub async fn found_b17_grpc_in_a_content_type_hides_no_failure(proxy: Proxy) {
    let options = [FAST, &["--dialect", "sglang"]].concat();
    let mut fleet = Fleet::start(1, 0, &options).await;
    // Decode answers without anything that prefill computed.
    let event = r#"{"choices":[{"index":0,"delta":{"content":"yes"},"finish_reason":null}]}"#;
    let good = Answer::stream([format!("data: {event}\n\n"), "data: [DONE]\n\n".to_owned()]);
    let decode = ScriptedWorker::start(move |_| good.clone()).await;
    let mut workers = named(&fleet.prefill, "p", 1);
    workers.push(decode.listed(Role::Decode));
    let pool = json!({"protocol": "sglang", "bootstrap": {"port": 1}});
    let gateway = Gateway::start(proxy, &static_config(workers, pool), &[]).await;
    fleet.prefill[0].kill();
    for content_type in [
        "application/json",
        "application/grpc",
        "application/grpc+proto",
        "application/grpc-web",
    ] {
        match gateway.try_send(call_with(content_type, "hello")).await {
            Ok(reply) => assert!(!reply.text().contains("[DONE]"), "{reply:?}"),
            Err(Failure::BreaksOff(_) | Failure::NoAnswer(_)) => {}
            Err(failure) => panic!("{failure}"),
        }
    }
    gateway.assert_comes_to_rest().await;
}

/// A dead worker is detected for any content type of its clients.
pub async fn found_b17_grpc_in_a_content_type_lets_no_dead_worker_in(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (2, 2)).pool(in_turns());
    let mut fixture = Fixture::acquire(spec).await;
    fixture.engines.prefill[0].kill().await;
    fixture.engines.decode[0].kill().await;
    for _ in 0..12 {
        fixture
            .send(call_with("application/grpc", "hello"))
            .await
            .expect_tokens(4);
    }
    assert_eq!(fixture.decode(1).state().await.refused(), 0);
    // The leg's content type describes its body.
    for got in fixture.decode(1).requests().await {
        assert_eq!(got.values("content-type"), ["application/json"], "{got:?}");
    }
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

/// The id that all legs of a request share.
fn only_id(legs: &[RecordedRequest]) -> String {
    let ids: BTreeSet<String> = legs
        .iter()
        .map(|leg| leg.values("x-request-id").join(","))
        .collect();
    assert_eq!(ids.len(), 1, "{legs:?}");
    ids.into_iter().next().unwrap_or_default()
}

/// Engines may key their hand-offs by this id.
pub async fn found_ids_a_client_that_sends_its_id_twice_at_once_has_two_of_ours(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let ask = Ask::chat("hello").header("x-request-id", "client-7");
    let twice = join_all([fixture.send(ask.clone()), fixture.send(ask.clone())]).await;
    for reply in twice {
        reply.expect_tokens(4);
    }
    fixture.send(Ask::chat("hello")).await.expect_tokens(4);
    let [prefills, decodes] = [
        fixture.prefill(0).requests().await,
        fixture.decode(0).requests().await,
    ];
    let ids = |legs: &[RecordedRequest]| -> BTreeSet<String> {
        let ids = legs.iter().map(|leg| only_id(std::slice::from_ref(leg)));
        ids.collect()
    };
    assert_eq!(ids(&prefills).len(), 3, "{prefills:?}");
    assert_eq!(ids(&prefills), ids(&decodes));
    assert!(!ids(&prefills).contains("client-7"));
    fixture.release();
}

/// The lines of the gateway's log with this text, once there are at least `least`: lines are written after the answer.
async fn lines_with(gateway: &mut Gateway, part: &str, least: usize) -> Vec<String> {
    eventually("the log has it", GENEROUS, || {
        let log = gateway.process().log();
        let lines = log.lines().filter(|line| line.contains(part));
        let lines: Vec<String> = lines.map(str::to_owned).collect();
        std::future::ready(match lines.len() >= least {
            true => Ok(lines),
            false => Err(log),
        })
    })
    .await
}

pub async fn found_ids_a_line_of_the_log_has_the_clients_id_and_ours(proxy: Proxy) {
    let fleet = Fleet::start(2, 1, FAST).await;
    let mut gateway =
        Gateway::start_on_one_thread(proxy, &fleet.config_with(in_turns()), &[]).await;
    let once = json!({"kind": "status", "status": 500, "times": 1});
    fleet.prefill[0].fault(&once).await;
    for _ in 0..2 {
        let ask = Ask::chat("hello").header("x-request-id", "client] -7");
        gateway.send(ask).await.expect_tokens(4);
    }
    let failed = fleet.prefill[0].requests().await.remove(0);
    let beginning = format!(r"[client\u{{5d}}\u{{20}}-7 {}]", only_id(&[failed]));
    lines_with(&mut gateway, &beginning, 1).await;
}

/// Text that a client must not get onto a log line of its own.
const FORGED: &str = "[critical] all is lost";

pub async fn found_b10_a_clients_words_are_on_one_line_and_cut(proxy: Proxy) {
    let mut fixture = Fixture::one_of_each(proxy).await;
    for model in [
        format!("m\n{FORGED}"),
        format!("m\u{2028}{FORGED}\u{202e}\r\0"),
        format!("m\n{FORGED}{}", "x".repeat(2 << 20)),
    ] {
        let body = with(chat_body("hello"), json!({"model": model}));
        let reply = fixture.send(Ask::post(CHAT, body.to_string())).await;
        assert_eq!(reply.status, 404, "{reply:?}");
        let message = reply.json()["error"]["message"].to_string();
        assert!(reply.body.len() < 2048, "{} bytes", reply.body.len());
        assert!(!message.contains(['\n', '\r', '\u{2028}', '\u{202e}']));
    }
    // The wasmtime host writes warnings only, and a refusal is not one.
    let written = match proxy {
        Proxy::Envoy => 3,
        Proxy::Wasmtime => 0,
    };
    let lines = lines_with(&mut fixture.gateway, FORGED, written).await;
    assert_eq!(lines.len(), written, "{lines:?}");
    for line in lines {
        assert!(line.contains("does not exist"), "{line}");
        assert!(line.len() < 1024, "{} bytes", line.len());
        assert!(!line.contains(['\u{2028}', '\u{202e}', '\0']), "{line}");
    }
    fixture.gateway.assert_serves().await;
    fixture.release();
}

/// A good answer with headers of the worker's own, some of them about its connection.
fn a_workers_answer(got: &RecordedRequest) -> Answer {
    let content = r#"{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}"#;
    let event =
        r#"{"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"yes"}}]}"#;
    let answer = match got.text().contains("\"stream\":true") {
        true => Answer::stream([format!("data: {event}\n\n"), "data: [DONE]\n\n".to_owned()]),
        false => Answer::json(content),
    };
    let own = [
        ("x-worker-says", "one"),
        ("x-worker-says", "two"),
        ("set-cookie", "a=1"),
        ("openai-processing-ms", "7"),
        ("x-hop", "of the connection"),
        ("connection", "x-hop"),
        ("keep-alive", "timeout=5"),
    ];
    own.into_iter()
        .fold(answer, |answer, (name, value)| answer.header(name, value))
}

/// All headers of an answer, except those that vary from one answer to the next.
fn lasting(reply: &Reply) -> BTreeSet<(String, String)> {
    let headers = reply.headers.iter();
    let all = headers.map(|(name, value)| {
        let value = String::from_utf8_lossy(value.as_bytes());
        (name.to_string(), value.into_owned())
    });
    // Either worker may answer, and each frames its body in its own way.
    let of_a_moment = [
        "date",
        "x-envoy-upstream-service-time",
        "content-length",
        "transfer-encoding",
        "x-hop",
        "x-gateway-destination-endpoint-served",
        "x-pd-router-decode",
    ];
    all.filter(|(name, _)| !of_a_moment.contains(&name.as_str()))
        .collect()
}

pub async fn found_l3_an_answer_by_a_recovery_has_its_workers_own_headers(proxy: Proxy) {
    for ask in [Ask::chat("hello"), Ask::chat_stream("hello")] {
        let calls = Arc::new(AtomicUsize::new(0));
        let script = |got: &RecordedRequest, before: usize| match before {
            0 => Answer::json("{}").status(500),
            _ => a_workers_answer(got),
        };
        let spec = FixtureSpec::of(proxy, Protocol::Aggregated).workers((0, 0));
        let mut fixture = Fixture::acquire(spec).await;
        for _ in 0..2 {
            let calls = Arc::clone(&calls);
            let next = move || calls.fetch_add(1, Ordering::SeqCst);
            let script = move |got: &RecordedRequest| script(got, next());
            fixture.play(Role::Aggregated, script).await;
        }
        fixture.list_scripted().await;
        let recovered = fixture.send(ask.clone()).await.expect(200);
        assert_eq!(calls.load(Ordering::SeqCst), 2, "it is recovered");
        let at_once = fixture.send(ask).await.expect(200);
        assert_eq!(recovered.body, at_once.body);
        let [by_recovery, at_once] = [&recovered, &at_once].map(lasting);
        assert_eq!(by_recovery, at_once);
        let says = |value: &str| ("x-worker-says".to_owned(), value.to_owned());
        assert!(by_recovery.contains(&says("one")) && by_recovery.contains(&says("two")));
        for name in ["x-hop", "keep-alive"] {
            assert_eq!(recovered.header(name), None, "{recovered:?}");
        }
        fixture.release();
    }
}
