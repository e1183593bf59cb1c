//! Tests of injected faults, in every leg and dialect.

use super::*;

impl Probe {
    /// Injects a fault into an engine that has none.
    async fn order(&self, engine: &Engine, fault: Value) {
        let cleared = self.send(Method::DELETE, engine.address, "/__fault", "");
        assert_eq!(cleared.await.0, 200);
        let (status, body) = self.post(engine.address, "/__fault", &fault).await;
        assert_eq!(status, 200, "{body}");
    }

    /// A decode leg whose prefill is done.
    async fn decode(&self, prefill: &Engine, stream: bool) -> Value {
        let prompt = "x".repeat(4 * 40);
        let handoff = self.prefill(prefill, &prompt).await;
        let leg = decode_leg(&prompt, &handoff);
        with(&leg, "stream", json!(stream))
    }
}

/// Whether an answer, or the rest of it, stays out although the connection is open.
async fn is_silent(probe: &Probe, to: SocketAddr, leg: &Value) -> bool {
    let request = Request::post(format!("http://{to}{CHAT}"))
        .body(Full::from(leg.to_string()))
        .expect("a request");
    let answer = tokio::time::timeout(SOON, probe.client.request(request));
    let mut answer = answer.await.expect("headers in time").expect("an answer");
    assert_eq!(answer.status(), StatusCode::OK);
    let more = tokio::time::timeout(Duration::from_millis(50), answer.frame());
    more.await.is_err()
}

#[tokio::test]
async fn faults_are_added_listed_and_cleared() {
    let (probe, _, decode) = pair().await;
    let at = decode.address;
    let delay = json!({"kind": "delay", "ms": 1, "share": 0.5});
    let (_, first) = probe.post(at, "/__fault", &delay).await;
    let hang = json!({"kind": "hang", "times": 3, "leg": "prefill"});
    let (_, second) = probe.post(at, "/__fault", &hang).await;
    assert_eq!([&*first, &*second], [r#"{"id":1}"#, r#"{"id":2}"#]);
    let listed = parsed(&probe.get(at, "/__fault").await);
    let want = json!([
        {"id": 1, "kind": "delay", "ms": 1, "share": 0.5, "times": null, "leg": null, "hits": 0},
        {"id": 2, "kind": "hang", "share": 1.0, "times": 3, "leg": "prefill", "hits": 0},
    ]);
    assert_eq!(listed, want);
    let unknown = json!({"kind": "hang", "ms": 3});
    let (status, body) = probe.post(at, "/__fault", &unknown).await;
    assert_eq!(status, 400);
    assert!(body.contains("`ms`"), "{body}");
    assert_eq!(probe.send(Method::DELETE, at, "/__fault", "").await.0, 200);
    assert_eq!(probe.get(at, "/__fault").await, "[]");
}

/// A request on a connection that is kept for the next one.
async fn ask_on(stream: &mut TcpStream, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
    let _ = stream.write_all(request.as_bytes()).await;
    let mut answer = vec![0; 16 * 1024];
    let read = tokio::time::timeout(SOON, stream.read(&mut answer)).await;
    // A reset is an end as well.
    let length = read.expect("an end in time").unwrap_or_default();
    String::from_utf8_lossy(&answer[..length]).into_owned()
}

#[tokio::test]
async fn an_idle_connection_is_closed_and_one_in_use_is_not() {
    let (probe, _, decode) = pair().await;
    let mut kept = TcpStream::connect(decode.address).await.expect("a door");
    assert!(ask_on(&mut kept, "/health").await.contains("200"));
    probe
        .order(&decode, json!({"kind": "close_idle", "ms": 20}))
        .await;
    let mut unused = TcpStream::connect(decode.address).await.expect("a door");
    assert!(ask_on(&mut kept, "/health").await.contains("200"), "again");
    let mut byte = [0];
    let closed = tokio::time::timeout(SOON, kept.read(&mut byte)).await;
    assert_eq!(closed.expect("a close in time").unwrap_or_default(), 0);
    assert!(ask_on(&mut unused, "/health").await.contains("200"), "new");
    let faults = parsed(&probe.get(decode.address, "/__fault").await);
    assert_ne!(faults[0]["hits"], 0);
}

#[tokio::test]
async fn a_kept_alive_connection_is_reset_at_its_second_request() {
    let (probe, prefill, decode) = pair().await;
    let legs = [
        probe.decode(&prefill, false).await,
        probe.decode(&prefill, false).await,
    ];
    probe
        .order(&decode, json!({"kind": "reset_kept_alive", "times": 1}))
        .await;
    // The injection itself came on the probe's own connection, which is kept.
    let first = probe.broken(decode.address, &legs[0]).await;
    assert_eq!(first.status, None);
    assert_eq!(probe.state(prefill.address).await["pulled"], 0);
    assert_eq!(probe.post(decode.address, CHAT, &legs[1]).await.0, 200);
}

#[tokio::test]
async fn metrics_that_hang_leave_the_rest_alone() {
    let (probe, prefill, _) = pair().await;
    probe.order(&prefill, json!({"kind": "hang_metrics"})).await;
    let poll = probe.send(Method::GET, prefill.address, "/metrics", "");
    assert!(
        tokio::time::timeout(Duration::from_millis(50), poll)
            .await
            .is_err()
    );
    assert_eq!(
        probe
            .send(Method::GET, prefill.address, "/health", "")
            .await
            .0,
        200
    );
    probe.prefill(&prefill, "x").await;
}

#[tokio::test]
async fn a_status_comes_before_any_work() {
    let (probe, prefill, decode) = pair().await;
    let leg = probe.decode(&prefill, true).await;
    let fault = json!({"kind": "status", "status": 429, "times": 1,
        "headers": {"retry-after": "7", "content-type": "text/x"}, "body": "{\"busy\": 1}"});
    probe.order(&decode, fault).await;
    let request = Request::post(format!("http://{}{CHAT}", decode.address))
        .body(Full::from(leg.to_string()))
        .expect("a request");
    let (head, body) = probe.raw(request).await;
    assert_eq!(head.status(), 429);
    assert_eq!(head.headers()["retry-after"], "7");
    assert_eq!(head.headers()["content-type"], "text/x");
    assert_eq!(&body[..], b"{\"busy\": 1}");
    assert_eq!(probe.state(prefill.address).await["pulled"], 0);
    assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 200, "once");

    probe
        .order(&prefill, json!({"kind": "status", "status": 500}))
        .await;
    let (status, body) = probe.post(prefill.address, CHAT, &prefill_leg("x")).await;
    assert_eq!(
        (status, &parsed(&body)["error"]["code"]),
        (500, &json!(500))
    );
    let state = probe.state(prefill.address).await;
    assert_eq!(state["failed_by_fault"], 1);
    assert_eq!(state["prompt_tokens_computed"], 40);
}

#[tokio::test]
async fn a_request_is_delayed_or_hangs() {
    let (probe, prefill, decode) = pair().await;
    probe
        .order(&prefill, json!({"kind": "delay", "ms": 60}))
        .await;
    let sent = Instant::now();
    let leg = probe.decode(&prefill, false).await;
    assert!(sent.elapsed() >= Duration::from_millis(60));
    probe.order(&decode, json!({"kind": "hang"})).await;
    let hung = probe.post(decode.address, CHAT, &leg);
    let hung = tokio::time::timeout(Duration::from_millis(60), hung);
    assert!(hung.await.is_err());
    probe.until(&decode, "aborted", 1).await;
    assert_eq!(probe.state(prefill.address).await["pulled"], 0);
}

#[tokio::test]
async fn a_decode_answer_is_spoilt_after_the_pull() {
    let (probe, prefill, decode) = pair().await;
    for (pulled, stream) in [(1, false), (5, true)] {
        let leg = probe.decode(&prefill, stream).await;
        probe
            .order(&decode, json!({"kind": "reset_before_headers"}))
            .await;
        assert_eq!(probe.broken(decode.address, &leg).await.status, None);
        assert_eq!(probe.state(prefill.address).await["pulled"], pulled);

        let leg = probe.decode(&prefill, stream).await;
        probe
            .order(&decode, json!({"kind": "reset_after_headers"}))
            .await;
        let broken = probe.broken(decode.address, &leg).await;
        assert_eq!(broken.status, Some(StatusCode::OK));
        assert_eq!(broken.text, "");

        let leg = probe.decode(&prefill, stream).await;
        probe.order(&decode, json!({"kind": "empty"})).await;
        let answer = probe.post(decode.address, CHAT, &leg).await;
        assert_eq!(answer, (200, String::new()));

        let leg = probe.decode(&prefill, stream).await;
        probe.order(&decode, json!({"kind": "silent"})).await;
        assert!(is_silent(&probe, decode.address, &leg).await);
        assert_eq!(probe.state(prefill.address).await["pulled"], pulled + 3);
    }
    probe.until(&decode, "aborted", 2).await;
    let state = probe.state(decode.address).await;
    let want = json!({"failed_by_fault": 6, "blocks_used": 0, "running": 0, "answered": 0, "recomputed": 0,
        "prompt_tokens_computed": 8});
    for (field, value) in want.as_object().expect("an object") {
        assert_eq!(&state[field], value, "{field}");
    }
}

#[tokio::test]
async fn tokens_drip_and_end() {
    let (probe, prefill, decode) = pair().await;
    let leg = probe.decode(&prefill, true).await;
    let faults = [
        json!({"kind": "slow_drip", "ms": 30}),
        json!({"kind": "die_mid_stream", "tokens": 2}),
    ];
    for fault in &faults {
        probe.post(decode.address, "/__fault", fault).await;
    }
    let sent = Instant::now();
    let broken = probe.broken(decode.address, &leg).await;
    assert_eq!(tokens(&broken.text), 2, "{}", broken.text);
    assert!(sent.elapsed() >= Duration::from_millis(60));
    assert_eq!(probe.state(decode.address).await["failed_by_fault"], 1);
}

#[tokio::test]
async fn a_prefill_answer_that_is_spoilt_hands_nothing_off() {
    let (probe, prefill, _) = pair().await;
    let leg = prefill_leg("hello");
    probe
        .order(&prefill, json!({"kind": "reset_before_headers"}))
        .await;
    assert_eq!(probe.broken(prefill.address, &leg).await.status, None);
    probe
        .order(&prefill, json!({"kind": "reset_after_headers"}))
        .await;
    let broken = probe.broken(prefill.address, &leg).await;
    assert_eq!((broken.status, &*broken.text), (Some(StatusCode::OK), ""));
    probe.order(&prefill, json!({"kind": "empty"})).await;
    let answer = probe.post(prefill.address, CHAT, &leg).await;
    assert_eq!(answer, (200, String::new()));
    probe.order(&prefill, json!({"kind": "silent"})).await;
    assert!(is_silent(&probe, prefill.address, &leg).await);
    probe.until(&prefill, "blocks_used", 0).await;
    let state = probe.state(prefill.address).await;
    assert_eq!(state["issued"], 0);
    assert_eq!(state["prompt_tokens_computed"], 8);

    probe.order(&prefill, json!({"kind": "no_handoff"})).await;
    let (_, body) = probe.post(prefill.address, CHAT, &leg).await;
    let answer = parsed(&body);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["kv_transfer_params"], Value::Null);
    assert_eq!(probe.state(prefill.address).await["issued"], 0);
}

#[tokio::test]
async fn a_lost_handoff_is_issued_and_leaks() {
    let (probe, prefill, decode) = pair().await;
    probe.order(&prefill, json!({"kind": "lose_handoff"})).await;
    let leg = probe.decode(&prefill, false).await;
    let (status, body) = probe.post(decode.address, CHAT, &leg).await;
    assert_eq!(status, 500, "{body}");
    let state = probe.state(decode.address).await;
    assert_eq!(
        (&state["refused"], &state["refused_lost_handoff"]),
        (&json!(1), &json!(1))
    );
    let want = json!({"issued": 1, "pulled": 0, "expired": 0, "leaked": 1, "blocks_used": 0});
    let state = probe.state(prefill.address).await;
    for (field, value) in want.as_object().expect("an object") {
        assert_eq!(&state[field], value, "{field}");
    }
    probe
        .send(Method::DELETE, prefill.address, "/__fault", "")
        .await;
    probe.prefill(&prefill, "left behind").await;
    let last = prefill.stop().await.expect("the last counts");
    assert_eq!((last.issued, last.pulled, last.leaked), (2, 0, 1));
    assert_eq!(last.counts.answered, 2);
}

#[tokio::test]
async fn a_fault_of_an_sglang_prefill_fails_its_decode() {
    let (probe, prefill, decode) = sglang_pair().await;
    let faults = [
        (json!({"kind": "lose_handoff"}), "length", 1),
        (json!({"kind": "no_handoff"}), "length", 1),
        (json!({"kind": "empty"}), "", 1),
    ];
    for (room, (fault, holds, leaked)) in (1..).zip(faults) {
        probe.order(&prefill, fault).await;
        let leg = room_leg(&prefill, room, "hello");
        let (prefilled, decoded) = tokio::join!(
            probe.post(prefill.address, CHAT, &leg),
            probe.post(decode.address, CHAT, &leg)
        );
        assert_eq!((prefilled.0, decoded.0), (200, 500), "{prefilled:?}");
        assert!(prefilled.1.contains(holds), "{prefilled:?}");
        assert_eq!(probe.state(prefill.address).await["leaked"], leaked);
    }
    probe.order(&prefill, json!({"kind": "silent"})).await;
    let leg = with(&room_leg(&prefill, 9, "hello"), "stream", json!(true));
    let decoded = probe.broken(decode.address, &leg);
    let (silent, decoded) = tokio::join!(is_silent(&probe, prefill.address, &leg), decoded);
    assert!(silent);
    assert_eq!(
        decoded.status,
        Some(StatusCode::OK),
        "broken when the silent prefill is left"
    );
}

#[tokio::test]
async fn an_sglang_decode_is_reset_before_or_after_its_headers() {
    let (probe, prefill, decode) = sglang_pair().await;
    for (room, kind, status) in [
        (1, "reset_before_headers", None),
        (2, "reset_after_headers", Some(StatusCode::OK)),
    ] {
        probe.order(&decode, json!({"kind": kind})).await;
        let leg = with(&room_leg(&prefill, room, "hello"), "stream", json!(true));
        let (prefilled, broken) = tokio::join!(
            probe.post(prefill.address, CHAT, &leg),
            probe.broken(decode.address, &leg)
        );
        assert_eq!(prefilled.0, 200);
        assert_eq!((broken.status, &*broken.text), (status, ""), "{kind}");
        assert_eq!(probe.state(prefill.address).await["pulled"], room);
    }
}

#[tokio::test]
async fn faults_meet_whole_requests() {
    let probe = Probe::new();
    let engine = start(quick(Role::Aggregated)).await;
    let whole = with(&chat("hello"), "stream", json!(true));
    probe
        .order(
            &engine,
            json!({"kind": "empty", "leg": "whole", "times": 1}),
        )
        .await;
    let answer = probe.post(engine.address, CHAT, &whole).await;
    assert_eq!(answer, (200, String::new()));
    let (_, body) = probe.post(engine.address, CHAT, &whole).await;
    assert!(body.ends_with("[DONE]\n\n"), "{body}");
}
