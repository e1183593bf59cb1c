//! Tests of MooncakeConnector's protocol: both legs name a transfer, in any order, and the decode names the prefill's rank.

use super::*;

fn mooncake(role: Role) -> EngineConfig {
    EngineConfig {
        dialect: Dialect::Mooncake,
        partner_timeout: Duration::from_millis(500),
        ..quick(role)
    }
}

async fn mooncake_pair() -> (Probe, Engine, Engine) {
    let prefill = start(mooncake(Role::Prefill)).await;
    let decode = start(mooncake(Role::Decode)).await;
    (Probe::new(), prefill, decode)
}

fn offer(prompt: &str, transfer: &str) -> Value {
    let mut leg = chat(prompt);
    leg["max_tokens"] = json!(1);
    leg["kv_transfer_params"] =
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer});
    leg
}

impl Probe {
    /// The ranks listed by a prefill engine's bootstrap server.
    async fn ranks(&self, prefill: &Engine) -> Value {
        let at = prefill.bootstrap.expect("a bootstrap server");
        parsed(&self.get(at, "/query").await)
    }

    /// A decode leg for a transfer from the rank `rank`.
    async fn taking(&self, prefill: &Engine, rank: &str, prompt: &str, transfer: &str) -> Value {
        let at = prefill.bootstrap.expect("a bootstrap server");
        let engine = self.ranks(prefill).await[rank]["engine_id"].clone();
        let mut leg = chat(prompt);
        leg["kv_transfer_params"] = json!({"do_remote_decode": false, "do_remote_prefill": true,
            "remote_bootstrap_addr": format!("http://{at}"), "remote_engine_id": engine,
            "transfer_id": transfer});
        leg
    }
}

#[tokio::test]
async fn a_transfer_is_offered_and_taken_in_any_order() {
    let (probe, prefill, decode) = mooncake_pair().await;
    assert!(decode.bootstrap.is_none());
    let prompt = "x".repeat(4 * 40);
    let (status, body) = probe
        .post(prefill.address, CHAT, &offer(&prompt, "xfer-1"))
        .await;
    assert_eq!(status, 200, "{body}");
    let answer = parsed(&body);
    let fields = answer.as_object().expect("an object");
    assert_eq!(fields.get("kv_transfer_params"), Some(&Value::Null));
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let leg = probe.taking(&prefill, "0", &prompt, "xfer-1").await;
    let (status, body) = probe.post(decode.address, CHAT, &leg).await;
    assert_eq!(status, 200, "{body}");
    let answer = parsed(&body);
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        "token0 token1 token2"
    );
    assert_eq!(
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        39
    );

    let leg = probe.taking(&prefill, "0", &prompt, "xfer-2").await;
    let leg = with(&leg, "stream", json!(true));
    let ((status, body), (prefilled, _)) =
        tokio::join!(probe.post(decode.address, CHAT, &leg), async {
            probe.until(&prefill, "rooms_open", 1).await;
            probe
                .post(prefill.address, CHAT, &offer(&prompt, "xfer-2"))
                .await
        });
    assert_eq!((status, prefilled), (200, 200), "{body}");
    assert_eq!(events(&body).len(), 5, "{body}");

    let state = probe.state(prefill.address).await;
    let want = json!({"issued": 2, "pulled": 2, "leaked": 0, "blocks_used": 0, "refused": 0,
        "requests_by_leg": {"prefill": 2, "decode": 0, "whole": 0}});
    for (field, value) in want.as_object().expect("an object") {
        assert_eq!(&state[field], value, "{field}");
    }
    let state = probe.state(decode.address).await;
    assert_eq!(state["prompt_tokens_computed"], 2);
    assert_eq!(state["recomputed"], 0);
    assert_eq!(state["requests_by_leg"]["decode"], 2);
}

#[tokio::test]
async fn completions_and_responses_have_transfers() {
    let (probe, prefill, decode) = mooncake_pair().await;
    let prompts = [
        ("/v1/completions", "prompt", json!("hello")),
        ("/v1/completions", "prompt", json!([1, 2, 3])),
        ("/v1/responses", "input", json!("hello")),
    ];
    for (path, member, prompt) in prompts {
        let id = format!("{path}{prompt}");
        let leg = with(&offer("", &id), member, prompt.clone());
        let leg = with(&leg, "max_output_tokens", json!(1));
        let (status, body) = probe.post(prefill.address, path, &leg).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(parsed(&body).get("kv_transfer_params"), Some(&Value::Null));
        let leg = probe.taking(&prefill, "0", "", &id).await;
        let (status, body) = probe
            .post(decode.address, path, &with(&leg, member, prompt))
            .await;
        assert_eq!(status, 200, "{body}");
    }
}

#[tokio::test]
async fn bad_transfers_are_refused_and_compute_nothing() {
    let (probe, prefill, decode) = mooncake_pair().await;
    let good = probe.taking(&prefill, "0", "hello", "xfer-1").await;
    let changed = |field: &str, value: Value| {
        let mut leg = good.clone();
        leg["kv_transfer_params"][field] = value;
        leg
    };
    assert_eq!(
        probe
            .post(prefill.address, CHAT, &offer("hello", "xfer-1"))
            .await
            .0,
        200
    );
    let again = probe
        .post(prefill.address, CHAT, &offer("hello", "xfer-1"))
        .await;
    assert_eq!(again.0, 500, "{}", again.1);
    let wrong = [
        changed("remote_engine_id", json!("other")),
        changed("remote_engine_id", Value::Null),
        changed("remote_bootstrap_addr", json!("127.0.0.1:1")),
        changed(
            "remote_bootstrap_addr",
            json!(format!("http://{}", decode.address)),
        ),
        changed("transfer_id", json!("xfer-0")),
        changed("transfer_id", json!(1)),
    ];
    let missing = [
        chat("hello"),
        changed("do_remote_prefill", json!(false)),
        offer("hello", "xfer-1"),
    ];
    for leg in wrong.iter().chain(&missing) {
        let stream = with(leg, "stream", json!(true));
        let (status, body) = probe.post(decode.address, CHAT, &stream).await;
        assert_eq!(status, 500, "{leg}: {body}");
    }
    let state = probe.state(decode.address).await;
    assert_eq!(state["refused_wrong_handoff"], wrong.len());
    assert_eq!(state["refused_missing_handoff"], missing.len());
    assert_eq!(state["refused"], wrong.len() + missing.len());
    for want in [200, 500] {
        assert_eq!(probe.post(decode.address, CHAT, &good).await.0, want);
    }
    let state = probe.state(decode.address).await;
    assert_eq!(state["refused_used_handoff"], 1);
    assert_eq!(state["prompt_tokens_computed"], 1);

    let not_a_leg = [
        chat("hello"),
        with(&offer("hello", "a"), "max_tokens", json!(2)),
        with(&offer("hello", "a"), "stream", json!(true)),
        with(&offer("hello", "a"), "n", json!(2)),
        offer("hello", ""),
        prefill_leg("hello"),
    ];
    for leg in &not_a_leg {
        let (status, body) = probe.post(prefill.address, CHAT, leg).await;
        assert_eq!(status, 400, "{leg}: {body}");
    }
    let state = probe.state(prefill.address).await;
    assert_eq!(state["refused_not_a_prefill_leg"], not_a_leg.len());
}

#[tokio::test]
async fn a_rank_has_an_id_of_its_own_that_changes_with_each_start() {
    let probe = Probe::new();
    let prefill = start(EngineConfig {
        dp_size: 2,
        ..mooncake(Role::Prefill)
    })
    .await;
    let decode = start(mooncake(Role::Decode)).await;
    let before = probe.ranks(&prefill).await;
    assert_eq!(before.as_object().map(serde_json::Map::len), Some(2));
    let on_rank = |rank: &str, leg: Value| {
        let request = Request::post(format!("http://{}{CHAT}", prefill.address))
            .header("x-data-parallel-rank", rank)
            .body(Full::from(leg.to_string()))
            .expect("a request");
        probe.raw(request)
    };
    let unnamed = probe.post(prefill.address, CHAT, &offer("x", "a")).await;
    assert_eq!(unnamed.0, 400, "{}", unnamed.1);
    assert_eq!(on_rank("2", offer("x", "a")).await.0.status(), 400);
    assert_eq!(on_rank("1", offer("x", "a")).await.0.status(), 200);
    let other = probe.taking(&prefill, "0", "x", "a").await;
    assert_eq!(probe.post(decode.address, CHAT, &other).await.0, 500);
    let same = probe.taking(&prefill, "1", "x", "a").await;
    assert_eq!(probe.post(decode.address, CHAT, &same).await.0, 200);

    let (listen, bootstrap) = (prefill.address, prefill.bootstrap.expect("one"));
    prefill.stop().await;
    let again = start(EngineConfig {
        listen,
        bootstrap_port: bootstrap.port(),
        dp_size: 2,
        ..mooncake(Role::Prefill)
    })
    .await;
    assert_ne!(probe.ranks(&again).await, before);
}

#[tokio::test]
async fn a_prefill_that_hands_nothing_off_fails_its_decode() {
    let (probe, prefill, decode) = mooncake_pair().await;
    for (prompt, status) in [
        ("<|end|>", 200),
        ("<|lose|>", 200),
        ("<|fail-prefill|>", 500),
    ] {
        let answer = probe
            .post(prefill.address, CHAT, &offer(prompt, prompt))
            .await;
        assert_eq!(answer.0, status, "{}", answer.1);
        let leg = probe.taking(&prefill, "0", prompt, prompt).await;
        assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 500);
    }
    let fault = json!({"kind": "lose_handoff"});
    probe.post(prefill.address, "/__fault", &fault).await;
    probe.post(prefill.address, CHAT, &offer("x", "lost")).await;
    let leg = probe.taking(&prefill, "0", "x", "lost").await;
    assert_eq!(probe.post(decode.address, CHAT, &leg).await.0, 500);
    let state = probe.state(decode.address).await;
    assert_eq!(state["failed_partner"], 3);
    assert_eq!(state["refused_lost_handoff"], 1);
    assert_eq!(state["prompt_tokens_computed"], 0);
    let state = probe.state(prefill.address).await;
    assert_eq!((&state["issued"], &state["leaked"]), (&json!(1), &json!(1)));
}
