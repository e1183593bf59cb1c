//! A picker that is gone, or that has no workers: two different cases, with the gateway failing open or closed.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Reply, crowd};
use pd_router_e2e::paths;
use pd_router_e2e::plain::{Bootstrap, Plain};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

use crate::rig::{Pods, REASON, SERVED, ask, configuration, pool};

const TRAP: &str = "x-pd-router-trap";
const READY: &str = "/pd-router/ready";

const OPEN: &str = "bootstrap-fail-open.yaml";
const CLOSED: &str = "bootstrap.yaml";

/// A gateway of this bootstrap, with the plugin that a header makes trap, over a cluster of these pods.
async fn over(bootstrap: &str, pods: &Pods, workers: Vec<Value>, more: Value) -> Plain {
    let config = configuration(vec![pool("decode", workers, more)]);
    let bootstrap = Bootstrap::shipped(bootstrap, &config).with_plugin(&paths::trap_plugin());
    bootstrap
        .with_clusters(&[("decode", pods.addresses())])
        .start()
        .await
}

/// Kills the picker on every thread; returns the answers to its last requests.
async fn kill_the_picker(plain: &Plain) -> Vec<Reply> {
    let mut last = Vec::new();
    for _ in 0..plain.gateway.enough_connections() {
        let reply = plain.gateway.try_send(ask().header(TRAP, "here")).await;
        last.extend(reply);
    }
    last
}

async fn many(plain: &Plain, ask: &Ask) -> Vec<Reply> {
    // Each request has its own connection: Envoy closes a connection after an answer of its own.
    let clients = plain.gateway.enough_connections();
    crowd(plain.gateway.listen, clients, 1, ask).await
}

/// Upstream: EppUnAvailableFailOpen.
pub async fn epp_unavailable_fail_open(_: Proxy) {
    let pods = Pods::start(3).await;
    let plain = over(OPEN, &pods, pods.listed(), json!({"on_empty": "pass"})).await;
    // A running picker names the endpoint that served.
    let reply = plain.gateway.send(ask()).await.expect(200);
    assert!(reply.header(SERVED).is_some(), "{reply:?}");
    // Requests in the picker when it dies end with it, under either policy.
    for reply in kill_the_picker(&plain).await {
        assert!(matches!(reply.status, 200 | 503), "{reply:?}");
    }
    let before = pods.counts();
    // A client's header for a worker has no effect.
    let forged = ask().header("x-gateway-destination-endpoint", &pods.named(&[0]));
    for reply in many(&plain, &forged).await {
        let reply = reply.expect(200);
        assert_eq!(reply.header(SERVED), None, "{reply:?}");
    }
    assert_eq!(
        pods.reached_since(&before).len(),
        3,
        "the cluster has its turns"
    );
    for at in 0..3 {
        let got = pods.pod(at).last();
        assert!(got.values("x-gateway-destination-endpoint").is_empty());
        assert_eq!(got.text(), crate::rig::BODY);
    }
    // The picker's own pages are absent now.
    for reply in many(&plain, &Ask::get(READY)).await {
        reply.expect_code(404, "unknown_path");
    }
}

/// The same with the picker, and after its death.
pub async fn found_b5_nobody_operates_an_engine_where_the_picker_is_gone(_: Proxy) {
    let pods = Pods::start(2).await;
    let plain = over(OPEN, &pods, pods.listed(), json!({"on_empty": "pass"})).await;
    let operating = [
        Ask::get("/flush_cache"),
        Ask::get("/metrics"),
        Ask::get("/metrics/v1/models"),
        Ask::get("/v1/models/../../flush_cache"),
        Ask::get("/flush_cache?/v1/models"),
        Ask::post("/abort_request", r#"{"abort_all": true}"#),
        Ask::post("/update_weights_from_disk", "{}"),
        Ask::post("/v1/load_lora_adapter", "{}"),
        Ask::post("/sleep", ""),
    ];
    for is_gone in [false, true] {
        if is_gone {
            kill_the_picker(&plain).await;
        }
        let before = pods.counts();
        for ask in &operating {
            let reply = plain.gateway.send(ask.clone()).await;
            let context = format!("{ask:?}: {reply:?}");
            assert!(
                reply.status == 404 && reply.text().contains("unknown_path"),
                "{context}"
            );
        }
        assert_eq!(pods.counts(), before, "picker gone: {is_gone}");
        for inference in [
            "/v1/completions",
            "/openai/v1/completions",
            "/v1/models/a/b",
        ] {
            let ask = Ask::post(inference, crate::rig::BODY);
            plain.gateway.send(ask).await.expect(200);
        }
    }
}

/// The fail-closed half: without a picker no pod is reached, until there is one again.
pub async fn epp_unavailable_fail_close(_: Proxy) {
    let pods = Pods::start(3).await;
    let plain = over(CLOSED, &pods, pods.listed(), json!({})).await;
    plain.gateway.send(ask()).await.expect(200);
    let before = pods.counts();
    let killed = plain.gateway.try_send(ask().header(TRAP, "here")).await;
    if let Ok(reply) = killed {
        assert!(reply.status >= 500, "{reply:?}");
    }
    assert_eq!(pods.counts(), before, "it died before it had picked");
    eventually("a picker serves again", GENEROUS, || async {
        let mut refused = 0;
        for reply in many(&plain, &ask()).await {
            match reply.status {
                200 => assert!(reply.header(SERVED).is_some(), "{reply:?}"),
                503 => refused += 1,
                _ => panic!("{reply:?}"),
            }
        }
        (refused == 0).then_some(()).ok_or(refused.to_string())
    })
    .await;
}

/// Closed for good: a picker that is not restarted.
pub async fn epp_unavailable_fail_close_for_good(_: Proxy) {
    let pods = Pods::start(2).await;
    let config = configuration(vec![pool("decode", pods.listed(), json!({}))]);
    let mut bootstrap = Bootstrap::shipped(OPEN, &config).with_plugin(&paths::trap_plugin());
    // The cluster itself could choose: only the policy closes.
    bootstrap.plugin()["failure_policy"] = json!("FAIL_CLOSED");
    let bootstrap = bootstrap.with_clusters(&[("decode", pods.addresses())]);
    let plain = bootstrap.start().await;
    plain.gateway.send(ask()).await.expect(200);
    let before = pods.counts();
    for reply in kill_the_picker(&plain).await {
        assert!(reply.status >= 500, "{reply:?}");
    }
    for ask in [ask(), Ask::get(READY), Ask::get("/v1/models")] {
        for reply in many(&plain, &ask).await {
            assert!(reply.status >= 500, "{reply:?}");
            // The error is Envoy's, not a picker's.
            assert!(!reply.text().contains("\"error\""), "{reply:?}");
        }
    }
    assert_eq!(pods.counts(), before);
}

/// A picker without workers, failing open: the cluster chooses, and the picker says so in a header.
pub async fn epp_empty_fail_open(_: Proxy) {
    let pods = Pods::start(3).await;
    let plain = over(OPEN, &pods, Vec::new(), json!({"on_empty": "pass"})).await;
    let forged = ask().header("x-gateway-destination-endpoint", &pods.named(&[0]));
    for reply in many(&plain, &forged).await {
        reply.expect(200);
    }
    assert_eq!(pods.counts().iter().filter(|count| **count > 0).count(), 3);
    for at in 0..3 {
        let got = pods.pod(at).last();
        assert!(got.values("x-gateway-destination-endpoint").is_empty());
        assert_eq!(got.text(), crate::rig::BODY);
    }
    // The picker runs: it serves its own pages.
    let before = pods.counts();
    let page = plain.gateway.whole_status().await;
    assert_eq!(page["pools"][0]["workers"], json!([]), "{page}");
    assert_eq!(pods.counts(), before);
    plain.gateway.assert_comes_to_rest().await;
}

/// A picker without workers, failing closed: it refuses, whatever the cluster would do.
pub async fn epp_empty_fail_close(_: Proxy) {
    let pods = Pods::start(2).await;
    for bootstrap in [OPEN, CLOSED] {
        let plain = over(bootstrap, &pods, Vec::new(), json!({})).await;
        for reply in many(&plain, &ask()).await {
            reply.expect_error(503);
            assert!(reply.header("retry-after").is_some(), "{reply:?}");
            assert_eq!(reply.header(REASON), Some("rejected-no-endpoints"));
        }
        assert_eq!(pods.counts(), [0, 0], "{bootstrap}");
        plain.gateway.assert_comes_to_rest().await;
    }
}
