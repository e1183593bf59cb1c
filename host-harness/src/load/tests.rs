use std::time::Duration;

use tokio::task::LocalSet;

use super::measured::Sample;
use super::request_spec::BodyWriter;
use super::*;
use crate::engine::{Engine, EngineConfig, InstantSettings, Role};

fn spec(streamed: bool) -> RequestSpec {
    RequestSpec {
        model: "sim".to_owned(),
        body_bytes: 1024,
        streamed,
        tokens: 8,
        prompts: Prompts::AllDifferent { from: 7 },
    }
}

fn plan(to: SocketAddr, pacing: Pacing, streamed: bool) -> LoadPlan {
    LoadPlan {
        to,
        pacing,
        connections: 4,
        warm_up: Duration::from_millis(50),
        lasts: Duration::from_millis(300),
        spec: spec(streamed),
    }
}

async fn instant(gap: Duration) -> Engine {
    let config = EngineConfig {
        instantly: Some(InstantSettings { gap }),
        ..EngineConfig::new(Role::Aggregated)
    };
    Engine::start(config).await.expect("an engine")
}

#[test]
fn bodies_have_the_size_asked_for_and_differ() {
    let mut writer = BodyWriter::new(&spec(true));
    let (one, other) = (writer.next(), writer.next());
    assert_eq!((one.len(), other.len()), (1024, 1024));
    assert_ne!(one, other);
    let read: serde_json::Value = serde_json::from_slice(&one).expect("JSON");
    assert_eq!(read["stream"], true);
    assert_eq!(read["max_tokens"], 8);
    let prompt = read["messages"][0]["content"].as_str().expect("text");
    assert!(prompt.starts_with("0000000000000007"), "{prompt}");

    let turns = RequestSpec {
        prompts: Prompts::InTurn(2),
        ..spec(false)
    };
    let mut writer = BodyWriter::new(&turns);
    let first = writer.next();
    writer.next();
    assert_eq!(writer.next(), first);
}

#[tokio::test(flavor = "current_thread")]
async fn a_closed_loop_measures_whole_answers_and_streams() {
    for streamed in [false, true] {
        let engine = instant(Duration::ZERO).await;
        let plan = plan(engine.address, Pacing::Closed, streamed);
        let mut samples = 0;
        let driven = drive(&plan, || samples += 1);
        let (measured, _) = LocalSet::new().run_until(driven).await;
        assert_eq!(samples, 2);
        assert!(
            measured.requests > 0 && measured.good == measured.requests,
            "{measured:?}"
        );
        assert!(
            measured.ttft_ms.p50 <= measured.latency_ms.p50,
            "{measured:?}"
        );
        engine.stop().await;
    }
}

#[tokio::test(flavor = "current_thread")]
async fn an_open_loop_sends_no_more_than_its_rate() {
    let engine = instant(Duration::ZERO).await;
    let plan = plan(engine.address, Pacing::Open { rate: 100.0 }, false);
    let (measured, _) = LocalSet::new().run_until(drive(&plan, || ())).await;
    assert!((1..=31).contains(&measured.requests), "{measured:?}");
    engine.stop().await;
}

#[tokio::test(flavor = "current_thread")]
async fn events_of_a_stream_come_at_their_gap() {
    let engine = instant(Duration::from_millis(10)).await;
    let plan = plan(engine.address, Pacing::Closed, true);
    let (measured, _) = LocalSet::new().run_until(drive(&plan, || ())).await;
    assert_eq!(measured.good, measured.requests, "{measured:?}");
    // Seven gaps between eight tokens.
    assert!(measured.latency_ms.p50 >= 70.0, "{measured:?}");
    assert!(
        measured.ttft_ms.p50 < measured.latency_ms.p50,
        "{measured:?}"
    );
    engine.stop().await;
}

#[tokio::test(flavor = "current_thread")]
async fn who_does_not_answer_well_is_no_success() {
    // A strict prefill engine refuses a request that is no prefill leg.
    let strict = Engine::start(EngineConfig::new(Role::Prefill))
        .await
        .expect("an engine");
    let refused = plan(strict.address, Pacing::Closed, false);
    let (measured, _) = LocalSet::new().run_until(drive(&refused, || ())).await;
    assert!(measured.requests > 0 && measured.good == 0, "{measured:?}");
    assert_eq!(measured.success_rate(), 0.0);
    strict.stop().await;

    let (measured, _) = LocalSet::new().run_until(drive(&refused, || ())).await;
    assert!(
        measured.requests > 0 && measured.good == 0,
        "gone: {measured:?}"
    );
}

#[tokio::test(flavor = "current_thread")]
async fn so_many_are_sent_and_no_more() {
    let engine = instant(Duration::ZERO).await;
    let plan = LoadPlan {
        lasts: Duration::from_secs(60),
        ..plan(engine.address, Pacing::Closed, false)
    };
    let sent = LocalSet::new().run_until(send(&plan, 101)).await;
    assert_eq!((sent.sent, sent.good), (101, 101));
    engine.stop().await;
}

#[tokio::test(flavor = "current_thread")]
async fn who_answers_nothing_has_no_success() {
    let begins = tokio::time::Instant::now();
    let window = Window {
        begins,
        ends: begins + Duration::from_millis(10),
    };
    let limit = window.ends + Duration::from_millis(10);
    let sample = Sample::of(std::future::pending(), begins, limit).await;
    let measured = Measured::of(vec![sample], window);
    assert_eq!((measured.sent, measured.requests, measured.good), (1, 1, 0));
    assert_eq!(measured.success_rate(), 0.0);
}
