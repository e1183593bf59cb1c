//! Tests of SGLang's protocol: both legs at once, which meet in a room, once; and the effect of one leg's failure on the other.

use super::*;

/// Sends a request and leaves when the state of `engine` has this value.
async fn leave_when(to: &Engine, leg: &Value, engine: &Engine, field: &str, value: u64) {
    let probe = Probe::new();
    let client = Probe::new();
    tokio::select! {
        answer = client.post(to.address, CHAT, leg) => panic!("{answer:?}"),
        () = probe.until(engine, field, value) => {}
    }
}

#[tokio::test]
async fn the_legs_meet_in_a_room_whichever_comes_first() {
    let (probe, prefill, decode) = sglang_pair().await;
    let prompt = "x".repeat(4 * 40);
    let leg = room_leg(&prefill, i64::MAX as u64, &prompt);
    let (status, body) = probe.post(prefill.address, CHAT, &leg).await;
    assert_eq!(status, 200, "{body}");
    let answer = parsed(&body);
    assert_eq!(
        answer["usage"]["completion_tokens"], 1,
        "whatever max_tokens is"
    );
    assert!(answer.get("kv_transfer_params").is_none());
    assert_eq!(probe.state(prefill.address).await["blocks_unpulled"], 3);
    let (status, body) = probe.post(decode.address, CHAT, &leg).await;
    assert_eq!(status, 200, "{body}");
    let content = &parsed(&body)["choices"][0]["message"]["content"];
    assert_eq!(content, "token0 token1 token2");

    let leg = with(&room_leg(&prefill, 0, &prompt), "stream", json!(true));
    let ((status, body), (prefilled, of_prefill)) =
        tokio::join!(probe.post(decode.address, CHAT, &leg), async {
            probe.until(&decode, "waiting", 1).await;
            probe.post(prefill.address, CHAT, &leg).await
        });
    assert_eq!((status, prefilled), (200, 200), "{body}");
    assert_eq!(events(&body).len(), 5, "{body}");
    assert_eq!(events(&of_prefill).len(), 3, "{of_prefill}");

    let mut completion = room_leg(&prefill, 2, "");
    completion["prompt"] = json!([1, 2, 3]);
    let path = "/v1/completions";
    let (one, other) = tokio::join!(
        probe.post(decode.address, path, &completion),
        probe.post(prefill.address, path, &completion)
    );
    assert_eq!((one.0, other.0), (200, 200));

    let state = probe.state(prefill.address).await;
    let want = json!({"answered": 3, "handoffs_consumed": 3, "blocks_unpulled": 0, "blocks_used": 0,
        "prompt_tokens_computed": 83, "requests_by_leg": {"prefill": 3, "decode": 0, "whole": 0}});
    for (field, value) in want.as_object().expect("an object") {
        assert_eq!(&state[field], value, "{field}");
    }
    let state = probe.state(decode.address).await;
    assert_eq!(state["prompt_tokens_computed"], 0);
    assert_eq!(state["answered"], 3);
    assert_eq!(state["refused_handoffs"], 0);
}

#[tokio::test]
async fn a_decode_stream_has_headers_before_its_prefill_comes() {
    let (probe, prefill, decode) = sglang_pair().await;
    let leg = with(&room_leg(&prefill, 1, "hello"), "stream", json!(true));
    let request = Request::post(format!("http://{}{CHAT}", decode.address))
        .body(Full::from(leg.to_string()))
        .expect("a request");
    let answer = tokio::time::timeout(SOON, probe.client.request(request))
        .await
        .expect("headers in time")
        .expect("an answer");
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(probe.state(decode.address).await["waiting"], 1);
    assert_eq!(probe.post(prefill.address, CHAT, &leg).await.0, 200);
    let body = answer.into_body().collect().await.expect("a whole stream");
    assert!(body.to_bytes().ends_with(b"data: [DONE]\n\n"));
}

#[tokio::test]
async fn faulty_rooms_are_refused_and_told_apart() {
    let (probe, prefill, decode) = sglang_pair().await;
    let good = room_leg(&prefill, 7, "hello");
    let missing = [chat("hello"), with(&good, "bootstrap_room", Value::Null)];
    let bad = [
        with(&good, "bootstrap_room", json!(-1)),
        with(&good, "bootstrap_room", json!(1u64 << 63)),
        with(&good, "bootstrap_room", json!(1.5)),
        with(&good, "bootstrap_room", json!("7")),
        with(&good, "bootstrap_room", json!([7])),
        with(&good, "n", json!(2)),
    ];
    let no_address = [
        with(&good, "bootstrap_host", Value::Null),
        with(&good, "bootstrap_port", Value::Null),
        with(&good, "bootstrap_port", json!("8998")),
    ];
    for engine in [&prefill, &decode] {
        for leg in missing.iter().chain(&bad).chain(&no_address) {
            for leg in [leg, &with(leg, "stream", json!(true))] {
                let (status, body) = probe.post(engine.address, CHAT, leg).await;
                assert_eq!(status, 400, "{leg}: {body}");
                assert_eq!(parsed(&body)["code"], 400);
            }
        }
    }
    let others = [
        with(&good, "bootstrap_host", json!("127.0.0.2")),
        with(&good, "bootstrap_port", json!(prefill.address.port())),
    ];
    for leg in &others {
        assert_eq!(probe.post(prefill.address, CHAT, leg).await.0, 400, "{leg}");
    }
    let not_bootstrap = with(&others[1], "bootstrap_room", json!(8));
    assert_eq!(
        probe.post(decode.address, CHAT, &not_bootstrap).await.0,
        400
    );
    for (engine, wrong) in [(&prefill, 8), (&decode, 7)] {
        let state = probe.state(engine.address).await;
        assert_eq!(state["refused_missing_room"], 4);
        assert_eq!(state["refused_bad_room"], 12);
        assert_eq!(state["refused_wrong_bootstrap"], wrong);
        assert_eq!(state["refused_handoffs"], 16 + wrong);
        assert_eq!(state["answered"], 0);
    }
    let (one, other) = tokio::join!(
        probe.post(decode.address, CHAT, &good),
        probe.post(prefill.address, CHAT, &good)
    );
    assert_eq!((one.0, other.0), (200, 200), "a refusal uses no room");
}

#[tokio::test]
async fn a_room_is_used_once_by_either_leg() {
    let (probe, prefill, decode) = sglang_pair().await;
    let other_decode = start(sglang(Role::Decode)).await;
    let leg = room_leg(&prefill, 7, "hello");
    for want in [200, 400] {
        assert_eq!(probe.post(prefill.address, CHAT, &leg).await.0, want);
    }
    for want in [200, 400] {
        assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, want);
    }
    let (status, body) = probe.post(other_decode.address, CHAT, &leg).await;
    assert_eq!(status, 400, "{body}");
    assert!(body.contains("already used"), "{body}");
    assert_eq!(probe.post(prefill.address, CHAT, &leg).await.0, 400);
    for (engine, used) in [(&prefill, 2), (&decode, 1), (&other_decode, 1)] {
        let state = probe.state(engine.address).await;
        assert_eq!(state["refused_used_room"], used);
        assert_eq!(state["refused_handoffs"], used);
    }
}

#[tokio::test]
async fn the_room_names_the_rank() {
    let prefill = start(EngineConfig {
        dp_size: 4,
        ..sglang(Role::Prefill)
    })
    .await;
    let decode = start(EngineConfig {
        dp_size: 2,
        ..sglang(Role::Decode)
    })
    .await;
    let probe = Probe::new();
    let leg = room_leg(&prefill, 7, "hello");
    let routed = |rank: u64| with(&leg, "routed_dp_rank", json!(rank));
    for rank in [2, 4] {
        let (status, body) = probe.post(prefill.address, CHAT, &routed(rank)).await;
        assert_eq!(status, 400, "{body}");
    }
    let by_header = |rank: &str, leg: &Value| {
        Request::post(format!("http://{}{CHAT}", prefill.address))
            .header("x-data-parallel-rank", rank)
            .body(Full::from(leg.to_string()))
            .expect("a request")
    };
    for (rank, leg) in [("2", &leg), ("x", &leg), ("2", &routed(3))] {
        let (head, body) = probe.raw(by_header(rank, leg)).await;
        assert_eq!(head.status(), 400, "{body:?}");
    }
    assert_eq!(probe.raw(by_header("3", &routed(3))).await.0.status(), 200);
    assert_eq!(
        probe.state(prefill.address).await["refused_rank_conflict"],
        5
    );

    let decode_leg = |routed: u64, prefill: u64| {
        let leg = with(&leg, "routed_dp_rank", json!(routed));
        with(&leg, "disagg_prefill_dp_rank", json!(prefill))
    };
    let (status, _) = probe.post(decode.address, CHAT, &decode_leg(2, 3)).await;
    assert_eq!(status, 400, "the decode has two ranks");
    let (status, body) = probe.post(decode.address, CHAT, &decode_leg(1, 3)).await;
    assert_eq!(status, 200, "{body}");
    let conflict = with(&decode_leg(0, 3), "bootstrap_room", json!(8));
    let (status, body) = probe.post(decode.address, CHAT, &conflict).await;
    assert_eq!(status, 400);
    assert!(body.contains("follow_bootstrap_room conflict"), "{body}");
    assert_eq!(
        probe.state(decode.address).await["refused_rank_conflict"],
        2
    );
}

#[tokio::test]
async fn a_prefill_that_fails_fails_its_decode() {
    let (probe, prefill, decode) = sglang_pair().await;
    let prompt = "<|fail-prefill|>";
    let leg = room_leg(&prefill, 1, prompt);
    let (one, other) = tokio::join!(
        probe.post(decode.address, CHAT, &leg),
        probe.post(prefill.address, CHAT, &leg)
    );
    assert_eq!((one.0, other.0), (500, 500));

    let leg = with(&room_leg(&prefill, 2, prompt), "stream", json!(true));
    let (broken, (status, _)) = tokio::join!(
        probe.broken(decode.address, &leg),
        probe.post(prefill.address, CHAT, &leg)
    );
    assert_eq!(broken.status, Some(StatusCode::OK));
    assert_eq!(broken.text, "");
    assert_eq!(
        status, 500,
        "a failing prefill is a status, streamed or not"
    );

    let state = probe.state(decode.address).await;
    assert_eq!(state["failed_partner"], 2);
    assert_eq!(state["refused_handoffs"], 0);
    assert_eq!(state["blocks_used"], 0);
    assert_eq!(state["waiting"], 0);
    assert_eq!(probe.state(prefill.address).await["failed_as_marked"], 2);
}

#[tokio::test]
async fn a_prefill_fails_after_its_decode_has_run() {
    let (probe, prefill, decode) = sglang_pair().await;
    let leg = room_leg(&prefill, 1, "<|fail-prefill-late|>");
    let sent = Instant::now();
    let (one, other) = tokio::join!(
        async {
            let (status, _) = probe.post(decode.address, CHAT, &leg).await;
            let state = probe.state(prefill.address).await;
            (status, state["failed_as_marked"].clone())
        },
        probe.post(prefill.address, CHAT, &leg)
    );
    assert_eq!(one.0, 200);
    assert_eq!(other.0, 500);
    assert!(sent.elapsed() >= Duration::from_millis(300));
    let state = probe.state(prefill.address).await;
    assert_eq!(state["failed_as_marked"], 1);
    assert_eq!(state["blocks_unpulled"], 0);
}

#[tokio::test]
async fn a_prefill_whose_client_leaves_or_whose_engine_ends_fails_its_decode() {
    let probe = Probe::new();
    let slow = EngineConfig {
        prefill_rate: 1.0,
        speedup: 1.0,
        ..sglang(Role::Prefill)
    };
    let prefill = start(slow).await;
    let decode = start(sglang(Role::Decode)).await;
    let leg = room_leg(&prefill, 1, &"x".repeat(4000));
    let ((status, body), ()) = tokio::join!(probe.post(decode.address, CHAT, &leg), async {
        probe.until(&decode, "waiting", 1).await;
        leave_when(&prefill, &leg, &prefill, "running", 1).await;
    });
    assert_eq!(status, 500, "{body}");
    probe.until(&prefill, "aborted", 1).await;

    let leg = with(&leg, "bootstrap_room", json!(2));
    let ((status, body), ()) = tokio::join!(probe.post(decode.address, CHAT, &leg), async {
        probe.until(&prefill, "rooms_open", 1).await;
        prefill.stop().await;
    });
    assert_eq!(status, 500, "{body}");
    let leg = with(&leg, "bootstrap_room", json!(3));
    assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 500);
    let state = probe.state(decode.address).await;
    assert_eq!(state["failed_partner"], 2, "{state}");
    assert_eq!(state["refused_unreachable_handoff"], 1, "{state}");
    assert_eq!(state["blocks_used"], 0);
}

#[tokio::test]
async fn a_leg_waits_for_the_other_only_so_long() {
    let probe = Probe::new();
    let hasty = |role| EngineConfig {
        partner_timeout: Duration::from_millis(50),
        ..sglang(role)
    };
    let prefill = start(hasty(Role::Prefill)).await;
    let decode = start(hasty(Role::Decode)).await;
    let leg = room_leg(&prefill, 1, "hello");
    assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 500);
    let stream = with(&room_leg(&prefill, 2, "hello"), "stream", json!(true));
    assert_eq!(probe.broken(decode.address, &stream).await.text, "");
    let state = probe.state(decode.address).await;
    assert_eq!(state["refused_partner_timeout"], 2);
    assert_eq!(state["blocks_used"], 0);

    let leg = room_leg(&prefill, 3, "hello");
    assert_eq!(probe.post(prefill.address, CHAT, &leg).await.0, 200);
    sleep(Duration::from_millis(60)).await;
    let state = probe.state(prefill.address).await;
    assert_eq!(state["handoffs_expired"], 1);
    assert_eq!(state["blocks_unpulled"], 1);
    assert_eq!(state["blocks_used"], 0);
    assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 500);
    let state = probe.state(decode.address).await;
    assert_eq!(state["refused_expired_handoff"], 1);
}

#[tokio::test]
async fn kv_of_a_decode_that_left_waits_for_an_abort() {
    let (probe, prefill, decode) = sglang_pair().await;
    let leg = with(&room_leg(&prefill, 1, "hello"), "rid", json!("r1"));
    leave_when(&decode, &leg, &prefill, "rooms_open", 1).await;
    probe.until(&decode, "aborted", 1).await;
    assert_eq!(probe.post(prefill.address, CHAT, &leg).await.0, 200);
    assert_eq!(probe.state(prefill.address).await["blocks_used"], 1);
    let abort = async |rid: &str| {
        let body = json!({"rid": rid});
        assert_eq!(
            probe.post(prefill.address, "/abort_request", &body).await.0,
            200
        );
    };
    abort("other").await;
    abort("").await;
    assert_eq!(probe.state(prefill.address).await["blocks_used"], 1);
    abort("r1").await;
    abort("r1").await;
    let state = probe.state(prefill.address).await;
    let want = json!({"aborted_by_request": 1, "handoffs_aborted": 1, "blocks_used": 0, "blocks_unpulled": 1});
    for (field, value) in want.as_object().expect("an object") {
        assert_eq!(&state[field], value, "{field}");
    }
}

#[tokio::test]
async fn running_requests_are_aborted() {
    let probe = Probe::new();
    let slow = |role| EngineConfig {
        prefill_rate: 1.0,
        token_ms: 60_000.0,
        ..sglang(role)
    };
    let prefill = start(slow(Role::Prefill)).await;
    let decode = start(slow(Role::Decode)).await;
    let abort = async |engine: &Engine, body: Value| {
        let (status, _) = probe.post(engine.address, "/abort_request", &body).await;
        assert_eq!(status, 200);
    };

    // By the header's id if the body has none; the decode that waits for the prefill fails with it.
    let leg = room_leg(&prefill, 1, &"x".repeat(40_000));
    let request = Request::post(format!("http://{}{CHAT}", prefill.address))
        .header("x-request-id", "r1")
        .body(Full::from(leg.to_string()))
        .expect("a request");
    let stream = with(&leg, "stream", json!(true));
    let (broken, (head, body), ()) = tokio::join!(
        probe.broken(decode.address, &stream),
        probe.raw(request),
        async {
            probe.until(&prefill, "running", 1).await;
            abort(&prefill, json!({"rid": "r1"})).await;
        }
    );
    assert_eq!(head.status(), 500, "{body:?}");
    assert_eq!(broken.text, "");

    // A running stream.
    let leg = with(&room_leg(&prefill, 2, "x"), "stream", json!(true));
    let (broken, (status, _), ()) = tokio::join!(
        probe.broken(decode.address, &leg),
        probe.post(prefill.address, CHAT, &leg),
        async {
            probe.until(&decode, "running", 1).await;
            abort(&decode, json!({"abort_all": true})).await;
        }
    );
    assert_eq!(status, 200);
    assert!(!broken.text.contains("[DONE]"), "{}", broken.text);
    for engine in [&prefill, &decode] {
        let state = probe.state(engine.address).await;
        assert_eq!(state["aborted_by_request"], 1, "{state}");
        assert_eq!(state["aborted"], 1, "{state}");
        assert_eq!(state["blocks_used"], 0, "{state}");
        assert_eq!(state["running"], 0, "{state}");
    }
    assert_eq!(probe.state(decode.address).await["failed_partner"], 1);
}

#[tokio::test]
async fn kv_of_another_prompt_is_noticed() {
    let (probe, prefill, decode) = sglang_pair().await;
    let leg = room_leg(&prefill, 1, "hello");
    assert_eq!(probe.post(prefill.address, CHAT, &leg).await.0, 200);
    let other = room_leg(&prefill, 1, "hullo");
    let (status, body) = probe.post(decode.address, CHAT, &other).await;
    assert_eq!(status, 500);
    assert!(body.contains("another prompt"), "{body}");
    let state = probe.state(decode.address).await;
    assert_eq!(state["refused_wrong_handoff"], 1);
}
