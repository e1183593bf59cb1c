//! Tests of traces against real engines.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::engine::{Engine, EngineConfig, PrefixCache};

const LINES: &str = r#"{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}
{"timestamp": 2000, "input_length": 48, "output_length": 1, "hash_ids": [1, 2, 4]}
{"timestamp": 4000, "input_length": 32, "output_length": 1, "hash_ids": [7, 8]}"#;

fn trace() -> Trace {
    Trace::read(LINES.as_bytes(), 16, None).expect("a trace")
}

fn options() -> PlayOptions {
    PlayOptions {
        speedup: 10.0,
        requests: usize::MAX,
        model: "sim".into(),
        max_tokens: 2,
        block_tokens: 16,
        patience: Duration::from_secs(10),
    }
}

async fn engine() -> Engine {
    let config = EngineConfig {
        prefix_cache: PrefixCache::Lru,
        speedup: 10.0,
        ..EngineConfig::new(Role::Aggregated)
    };
    Engine::start(config).await.expect("an engine")
}

#[tokio::test]
async fn what_engines_kept_is_the_hit_rate() {
    let engine = engine().await;
    let begun = Instant::now();
    let played = play(&trace(), engine.address, &options(), |_| {}).await;
    assert!(begun.elapsed() >= Duration::from_millis(400), "in its time");
    let states = states(&[engine.address]).await.expect("a state");
    let row = row("itself", &played, &states);
    assert_eq!((row.requests, row.success_rate), (3, 1.0));
    assert_eq!(row.hit_rate, 32.0 / 120.0);
    assert_eq!(row.imbalance, 1.0);
    // In the trace's time: 40 tokens take 5 ms.
    assert!(
        row.ttft_p50_ms >= 5.0 && row.ttft_mean_ms < 5000.0,
        "{row:?}"
    );
}

#[tokio::test]
async fn so_many_requests_are_sent_and_no_more() {
    let engine = engine().await;
    let some = PlayOptions {
        requests: 2,
        ..options()
    };
    let played = play(&trace(), engine.address, &some, |_| {}).await;
    assert_eq!(played.outcomes.len(), 2);
    let wrong = PlayOptions {
        model: "other".into(),
        ..some
    };
    let played = play(&trace(), engine.address, &wrong, |_| {}).await;
    let refused = RequestEnd::Refused(StatusCode::NOT_FOUND);
    assert!(played.outcomes.iter().all(|one| one.end == refused));
    let row = row("wrong", &played, &[]);
    assert_eq!(
        (row.success_rate, row.hit_rate, row.imbalance),
        (0.0, 0.0, 0.0)
    );
}

/// A server that sends these words on each connection and closes it.
async fn saying(words: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream.write_all(words.as_bytes()).await;
        }
    });
    address
}

#[tokio::test]
async fn an_answer_cut_short_is_no_success() {
    const CUT: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n\
        4e\r\ndata: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n\r\n";
    const CLEAN: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 14\r\nconnection: close\r\n\r\ndata: [DONE]\n\n";
    for (words, end) in [
        (CUT, RequestEnd::CutShort),
        (CLEAN, RequestEnd::CutShort),
        ("", RequestEnd::Unanswered),
    ] {
        let at = saying(words).await;
        let played = play(&trace(), at, &options(), |_| {}).await;
        let ends: Vec<RequestEnd> = played.outcomes.iter().map(|one| one.end).collect();
        assert_eq!(ends, [end; 3], "{words}");
        assert_eq!(row("cut", &played, &[]).success_rate, 0.0);
    }
}

#[tokio::test]
async fn nobody_waits_for_ever() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let at = listener.local_addr().expect("an address");
    let hasty = PlayOptions {
        patience: Duration::from_millis(50),
        ..options()
    };
    let played = play(&trace(), at, &hasty, |_| {}).await;
    assert!(
        played
            .outcomes
            .iter()
            .all(|one| one.end == RequestEnd::GivenUp)
    );
}

#[test]
fn times_are_the_traces() {
    let outcome = |end, ms| RequestOutcome {
        end,
        ttft: Some(Duration::from_millis(ms)),
        late: Duration::ZERO,
    };
    let played = PlayedTrace {
        speedup: 40.0,
        outcomes: vec![
            outcome(RequestEnd::Complete, 10),
            outcome(RequestEnd::Complete, 30),
            outcome(RequestEnd::CutShort, 900),
        ],
    };
    let engine = |role, cached_tokens, computed_tokens| EngineState {
        role,
        cached_tokens,
        computed_tokens,
    };
    let engines = [
        engine(Role::Prefill, 50, 100),
        engine(Role::Prefill, 0, 50),
        engine(Role::Decode, 0, 1_000_000),
    ];
    let row = row("someone", &played, &engines);
    assert_eq!((row.ttft_mean_ms, row.ttft_p99_ms), (800.0, 1200.0));
    assert_eq!(row.hit_rate, 0.25);
    assert_eq!(row.imbalance, 100.0 / 75.0);
    assert!((row.success_rate - 2.0 / 3.0).abs() < 1e-9);
}
