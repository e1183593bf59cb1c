//! Tests with many requests at once, some of whose clients leave: no request is lost, counted twice, or left running.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;

use super::*;

const REQUESTS: u64 = 300;

/// One request through both legs, whose client leaves after `patience`.
async fn request(prefill: SocketAddr, decode: SocketAddr, number: u64, patience: Duration) {
    let probe = Probe::new();
    let legs = async {
        let prompt = format!("{number:0100}");
        let (status, body) = probe.post(prefill, CHAT, &prefill_leg(&prompt)).await;
        assert_eq!(status, 200, "{body}");
        let mut leg = decode_leg(&prompt, &parsed(&body)["kv_transfer_params"]);
        leg["stream"] = json!(number.is_multiple_of(2));
        // On a loaded machine a lease may end first; the counters below show whether it did.
        probe.post(decode, CHAT, &leg).await;
    };
    let _ = tokio::time::timeout(patience, legs).await;
}

#[tokio::test]
async fn a_crowd_leaves_nothing_behind() {
    let probe = Probe::new();
    let small = |role| EngineConfig {
        kv_blocks: 40,
        lease: Duration::from_millis(300),
        prefill_rate: 40_000.0,
        ..EngineConfig::new(role)
    };
    let prefill = start(small(Role::Prefill)).await;
    let decode = start(EngineConfig {
        kv_blocks: 1000,
        ..small(Role::Decode)
    })
    .await;
    let mut random = StdRng::seed_from_u64(1);
    let mut clients = JoinSet::new();
    for number in 0..REQUESTS {
        let patience = match random.random_range(0..3) {
            0 => Duration::from_millis(random.random_range(0..600)),
            _ => SOON,
        };
        clients.spawn(request(prefill.address, decode.address, number, patience));
    }
    while let Some(client) = clients.join_next().await {
        client.expect("no client met an error");
    }

    for engine in [&prefill, &decode] {
        for field in ["running", "waiting", "blocks_used"] {
            probe.until(engine, field, 0).await;
        }
        let state = probe.state(engine.address).await;
        let count = |field: &str| state[field].as_u64().expect("a count");
        assert_eq!(
            count("requests"),
            count("answered") + count("aborted") + count("refused_expired_handoff"),
            "{state}"
        );
        assert_eq!(
            count("handoffs_issued"),
            count("handoffs_consumed") + count("handoffs_expired")
        );
        assert_eq!(
            count("blocks_unpulled"),
            count("blocks_issued") - count("blocks_pulled")
        );
    }
    let prefill = probe.state(prefill.address).await;
    let decode = probe.state(decode.address).await;
    assert_eq!(prefill["handoffs_issued"], prefill["answered"]);
    // A client may leave between its hand-off's pull and its first token.
    let computed = decode["prompt_tokens_computed"].as_u64();
    assert!(prefill["handoffs_consumed"].as_u64() >= computed);
    assert!(computed >= decode["answered"].as_u64());
    assert!(
        decode["answered"].as_u64() >= Some(REQUESTS / 3),
        "{decode}"
    );
    assert!(prefill["aborted"].as_u64() >= Some(1), "{prefill}");
}

/// One SGLang request, both legs at once, whose client leaves after `patience`.
async fn meeting(prefill: SocketAddr, decode: SocketAddr, leg: Value, patience: Duration) {
    let probe = Probe::new();
    let legs = async {
        tokio::join!(
            probe.post(prefill, CHAT, &leg),
            probe.post(decode, CHAT, &leg)
        )
    };
    if let Ok((prefilled, decoded)) = tokio::time::timeout(patience, legs).await {
        assert_eq!(prefilled.0, 200, "{prefilled:?}");
        assert_eq!(decoded.0, 200, "{decoded:?}");
    }
}

#[tokio::test]
async fn a_crowd_in_rooms_leaves_nothing_behind() {
    let probe = Probe::new();
    let small = |role| EngineConfig {
        kv_blocks: 1000,
        prefill_rate: 40_000.0,
        speedup: 1.0,
        ..sglang(role)
    };
    let prefill = start(small(Role::Prefill)).await;
    let decode = start(small(Role::Decode)).await;
    let mut random = StdRng::seed_from_u64(2);
    let mut clients = JoinSet::new();
    for number in 0..REQUESTS {
        let patience = match random.random_range(0..3) {
            0 => Duration::from_millis(random.random_range(0..600)),
            _ => SOON,
        };
        let leg = room_leg(&prefill, number, &format!("{number:0100}"));
        let leg = with(&leg, "stream", json!(number.is_multiple_of(2)));
        clients.spawn(meeting(prefill.address, decode.address, leg, patience));
    }
    while let Some(client) = clients.join_next().await {
        client.expect("no client met an error");
    }
    for engine in [&prefill, &decode] {
        probe.until(engine, "running", 0).await;
        probe.until(engine, "waiting", 0).await;
    }
    // An abort drops the KV that waits for a decode that has left, and nothing else does.
    let all = json!({"abort_all": true});
    probe.post(prefill.address, "/abort_request", &all).await;
    for engine in [&prefill, &decode] {
        let state = probe.state(engine.address).await;
        let count = |field: &str| state[field].as_u64().expect("a count");
        assert_eq!(count("blocks_used"), 0, "{state}");
        assert_eq!(count("refused_handoffs"), 0, "{state}");
        assert_eq!(
            count("requests"),
            count("answered") + count("aborted") + count("failed_partner"),
            "{state}"
        );
        assert_eq!(
            count("handoffs_issued"),
            count("handoffs_consumed") + count("handoffs_aborted")
        );
    }
    let decode = probe.state(decode.address).await;
    assert_eq!(decode["prompt_tokens_computed"], 0);
    assert!(
        decode["answered"].as_u64() >= Some(REQUESTS / 3),
        "{decode}"
    );
    assert!(decode["aborted"].as_u64() >= Some(1), "{decode}");
}
