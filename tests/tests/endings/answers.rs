//! Content of answers: an answer without content is none, and a good end waits for the concurrent prefill.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::engines::{Role, static_config};
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::gateway::{Gateway, GatewayParts};
use pd_router_e2e::paths;
use pd_router_e2e::process::unique_name;
use pd_router_e2e::protocols::Protocol;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::scripted::{Answer, HttpVersion, ScriptedWorker};
use pd_router_e2e::trailer_worker::TrailerWorker;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TOKEN: &str =
    r#"data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}"#;
const DONE: &str = "data: [DONE]";

/// Envoy's option to accept trailers from workers.
const TRAILERS: &str = "http_protocol_options: { enable_trailers: true }";

/// Pieces of an answer, sent one after the other: together they take longer than all of decode's answer.
const LATE: usize = 40;

/// Prefill's answer that fails after decode has ended.
fn fails_late() -> Answer {
    Answer::json_in_pieces(vec![" ".to_owned(); LATE]).status(500)
}

/// A fixture without workers, for scripted ones whose legs run at once.
async fn for_side_by_side(proxy: Proxy) -> Fixture {
    let spec = FixtureSpec::of(proxy, Protocol::Sglang).workers((0, 0));
    Fixture::acquire(spec.pool(json!({"bootstrap": {"port": 1}}))).await
}

/// A pool of a prefill and a decode worker whose legs run at once.
fn side_by_side(prefill: &ScriptedWorker, decode: Value) -> Value {
    let workers = vec![prefill.listed(Role::Prefill), decode];
    static_config(
        workers,
        json!({"protocol": "sglang", "bootstrap": {"port": 1}}),
    )
}

/// The shipped bootstrap with these protocol options towards workers.
fn speaking(options: &str) -> GatewayParts {
    let plain = "explicit_http_config: { http_protocol_options: {} }";
    let shipped = std::fs::read_to_string(paths::bootstrap())
        .unwrap_or_else(|error| panic!("no bootstrap: {error}"));
    assert!(shipped.contains(plain));
    let spoken = format!("explicit_http_config: {{ {options} }}");
    let file = paths::scratch().join(format!("{}.yaml", unique_name("trailers")));
    std::fs::write(&file, shipped.replace(plain, &spoken))
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    GatewayParts {
        bootstrap: file,
        ..GatewayParts::on_threads(2)
    }
}

/// Requests a stream whose prefill fails: a part of it may arrive, but never its end.
async fn assert_no_good_end(gateway: &Gateway, case: &str) {
    let mut body = chat_body("hello");
    body["stream"] = json!(true);
    let body = body.to_string();
    let request = raw::post(CHAT, &[("connection", "close")], body.as_bytes());
    let mut client = Raw::connect(gateway.listen).await;
    client.write(&request).await;
    let read = client.read_rest().await;
    assert!(!read.contains("[DONE]"), "{case}: {read}");
    gateway.assert_comes_to_rest().await;
}

/// HTTP/2 passes trailers on from any engine.
pub async fn found_b11_an_answer_over_http_2_that_ends_with_trailers_is_judged(proxy: Proxy) {
    let speaks = |answer: Answer| {
        let here = Ipv4Addr::LOCALHOST.into();
        ScriptedWorker::start_at(here, HttpVersion::Http2, move |_| answer.clone())
    };
    let build = speaking("http2_protocol_options: {}");
    let ping = Answer::stream([": ping\n\n".to_owned()]).trailer("x-end", "1");
    let empty = speaks(ping).await;
    let workers = vec![empty.listed(Role::Aggregated)];
    let config = static_config(workers, json!({"protocol": "aggregated"}));
    let gateway = Gateway::build(proxy, &build, &config, &[]).await;
    let reply = gateway.send(Ask::chat_stream("hello")).await;
    reply.expect_code(502, "empty_answer");

    let prefill = speaks(fails_late()).await;
    let good = Answer::stream([format!("{TOKEN}\n\n"), format!("{DONE}\n\n")]);
    let good = speaks(good.trailer("x-end", "1")).await;
    let config = side_by_side(&prefill, good.listed(Role::Decode));
    let gateway = Gateway::build(proxy, &build, &config, &[]).await;
    assert_no_good_end(&gateway, "trailers over HTTP/2").await;
    assert_eq!(good.requests().len(), 1, "decode was asked");
}

pub async fn found_b11_an_answer_that_ends_with_trailers_is_judged(proxy: Proxy) {
    let empty = TrailerWorker::start(": ping\n\n").await;
    let config = static_config(
        vec![empty.listed(Role::Aggregated)],
        json!({"protocol": "aggregated"}),
    );
    let gateway = Gateway::build(proxy, &speaking(TRAILERS), &config, &[]).await;
    let reply = gateway.send(Ask::chat_stream("hello")).await;
    reply.expect_code(502, "empty_answer");

    let prefill = ScriptedWorker::start(move |_| fails_late()).await;
    let good = TrailerWorker::start(&format!("{TOKEN}\n\n{DONE}\n\n")).await;
    let config = side_by_side(&prefill, good.listed(Role::Decode));
    let gateway = Gateway::build(proxy, &speaking(TRAILERS), &config, &[]).await;
    assert_no_good_end(&gateway, "trailers").await;
}

pub async fn found_b12_no_part_of_a_good_end_passes_before_prefill_is_good(proxy: Proxy) {
    let pieces = |pieces: &[&str]| Answer::stream(pieces.iter().map(|piece| (*piece).to_owned()));
    let begun = format!("{TOKEN}\n\n");
    let carriage = format!("{TOKEN}\r\r{DONE}\r\r");
    let whole = format!("{TOKEN}\n\n{DONE}\n\n");
    for (case, answer) in [
        ("the line end comes later", pieces(&[&begun, DONE, "\n\n"])),
        (
            "the line comes in parts",
            pieces(&[&begun, "data: [DO", "NE]", "\n\n"]),
        ),
        ("lines end with CR", pieces(&[&carriage])),
        ("the last line does not end", pieces(&[&begun, DONE])),
        (
            "compressed",
            pieces(&[&whole]).header("content-encoding", "gzip"),
        ),
    ] {
        let mut fixture = for_side_by_side(proxy).await;
        fixture.play(Role::Prefill, move |_| fails_late()).await;
        fixture.play(Role::Decode, move |_| answer.clone()).await;
        fixture.list_scripted().await;
        assert_no_good_end(&fixture.gateway, case).await;
        fixture.release();
    }
}

/// The first prefill fails at once, so that a recovery answers; the prefill beside the recovery is late.
pub async fn found_b12_a_recovered_answer_waits_for_its_own_prefill(proxy: Proxy) {
    let pieces = vec![" ".to_owned(); LATE];
    let good = Answer::json_in_pieces([pieces.clone(), vec!["{}".to_owned()]].concat());
    let bad = Answer::json_in_pieces(pieces).status(500);
    for (second, is_good) in [(good, true), (bad, false)] {
        let calls = Arc::new(AtomicUsize::new(0));
        let mut fixture = for_side_by_side(proxy).await;
        for _ in 0..2 {
            let (calls, second) = (Arc::clone(&calls), second.clone());
            let script = move |_: &_| match calls.fetch_add(1, Ordering::Relaxed) {
                0 => Answer::json("{}").status(500),
                _ => second.clone(),
            };
            fixture.play(Role::Prefill, script).await;
        }
        let answer = Answer::stream([format!("{TOKEN}\n\n{DONE}\n\n")]);
        fixture.play(Role::Decode, move |_| answer.clone()).await;
        fixture.list_scripted().await;
        match is_good {
            true => {
                let reply = fixture.send(Ask::chat_stream("hello")).await;
                let reply = reply.expect(200);
                assert!(reply.text().contains("[DONE]"), "{reply:?}");
            }
            false => assert_no_good_end(&fixture.gateway, "by a recovery").await,
        }
        fixture.gateway.assert_comes_to_rest().await;
        fixture.release();
        assert!(
            calls.load(Ordering::Relaxed) > 1,
            "both prefills were asked"
        );
    }
}

pub async fn found_w2_another_worker_answers_where_one_says_nothing(proxy: Proxy) {
    let good = json!({"object": "chat.completion", "choices": [{"index": 0,
        "message": {"role": "assistant", "content": "No."}, "finish_reason": "stop"}]});
    for empty in [
        json!({"object": "chat.completion", "choices": [], "usage": {"completion_tokens": 0}}),
        json!({"choices": [{"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "abort"}],
            "usage": {"completion_tokens": 0}}),
    ] {
        let spec = FixtureSpec::of(proxy, Protocol::Aggregated).workers((0, 0));
        let turns = json!({"selection": {"decode": "round_robin"}});
        let mut fixture = Fixture::acquire(spec.pool(turns)).await;
        for answer in [&empty, &good] {
            let answer = answer.to_string();
            let script = move |_: &_| Answer::json(answer.clone());
            fixture.play(Role::Aggregated, script).await;
        }
        fixture.list_scripted().await;
        for _ in 0..4 {
            let reply = fixture.send(Ask::chat("hello")).await.expect(200);
            assert_eq!(reply.json(), good);
        }
        assert!(!fixture.scripted[0].requests().is_empty(), "{empty}");
        fixture.gateway.assert_comes_to_rest().await;
        fixture.release();
    }
}
