//! Choices that are not the client's: its workers, its retries, its hand-off.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::engines::in_turns;
use pd_router_e2e::fixture::{Fixture, FixtureSpec};
use pd_router_e2e::json_text::values_of;
use pd_router_e2e::raw::{self, Raw};
use serde_json::json;
use tokio::net::TcpListener;

const CHAT: &str = "/v1/chat/completions";

/// Headers that give a gateway, a picker, a sidecar or a Dynamo frontend its destination or its number of attempts.
const ROUTING_HEADERS: [(&str, &str); 13] = [
    ("x-gateway-destination-endpoint", "127.0.0.1:9"),
    ("x-gateway-destination-endpoint-subset", "127.0.0.1:9"),
    ("x-prefiller-host-port", "127.0.0.1:9"),
    ("x-envoy-max-retries", "7"),
    ("x-envoy-retry-on", "5xx,reset"),
    ("x-envoy-upstream-rq-timeout-ms", "1"),
    ("x-envoy-upstream-rq-per-try-timeout-ms", "1"),
    ("x-worker-instance-id", "1"),
    ("x-prefill-instance-id", "1"),
    ("x-dynamo-worker-instance-id", "1"),
    ("x-dynamo-prefill-instance-id", "1"),
    ("x-dynamo-backend-instance-id", "1"),
    ("x-bypass-remote-prefill", "true"),
];

/// An address to which no request may be sent.
struct Trap {
    address: SocketAddr,
    caught: Arc<AtomicUsize>,
}

impl Trap {
    async fn set() -> Trap {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let caught = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&caught);
        tokio::spawn(async move {
            while listener.accept().await.is_ok() {
                counter.fetch_add(1, Ordering::SeqCst);
            }
        });
        Trap { address, caught }
    }

    fn assert_empty(&self) {
        let caught = self.caught.load(Ordering::SeqCst);
        assert_eq!(caught, 0, "the gateway went where a client sent it");
    }
}

pub async fn a_client_cannot_choose_its_workers(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (1, 2)).pool(in_turns());
    let fixture = Fixture::acquire(spec).await;
    let trap = Trap::set().await;
    let favourite = fixture.decode(0).address.to_string();
    let prefill = fixture.prefill(0).address.to_string();
    for destination in [trap.address.to_string(), prefill, favourite] {
        for _ in 0..4 {
            let ask = Ask::chat("hello")
                .header("x-gateway-destination-endpoint", &destination)
                .header("x-prefiller-host-port", &trap.address.to_string());
            fixture.send(ask).await.expect(200).pair();
        }
    }
    trap.assert_empty();
    // Both decode workers get their share, whatever the client's headers name.
    for at in 0..2 {
        let state = fixture.decode(at).state().await;
        assert!((4..=8).contains(&state.answered), "{state:?}");
    }
    fixture.assert_good_hand_offs().await;
    fixture.release();
}

pub async fn a_forged_header_is_ignored_where_there_is_no_body(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let trap = Trap::set().await;
    let ask =
        Ask::get("/v1/models").header("x-gateway-destination-endpoint", &trap.address.to_string());
    fixture.send(ask).await.expect(200);
    trap.assert_empty();
    fixture.release();
}

pub async fn mixed_case_and_doubled_headers_are_stripped_too(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let trap = Trap::set().await;
    let evil = trap.address.to_string();
    let headers = [
        ("X-Gateway-Destination-Endpoint", evil.as_str()),
        ("x-gateway-destination-endpoint", evil.as_str()),
        ("x-GATEWAY-destination-ENDPOINT", evil.as_str()),
        ("X-Prefiller-Host-Port", evil.as_str()),
        ("X-PREFILLER-HOST-PORT", evil.as_str()),
    ];
    let body = chat_body("hello").to_string();
    let request = raw::post(CHAT, &headers, body.as_bytes());
    Raw::exchange(fixture.gateway.listen, request)
        .await
        .expect(200);
    trap.assert_empty();
    for engine in fixture.living() {
        let got = engine.only_request().await;
        for (name, _) in headers {
            assert!(got.values(name).is_empty(), "{name} reached {got:?}");
        }
    }
    fixture.release();
}

pub async fn routing_headers_never_reach_the_engines(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let mut ask = Ask::chat("hello");
    for (name, value) in ROUTING_HEADERS {
        ask = ask.header(name, value);
    }
    fixture.send(ask).await.expect(200);
    fixture.send(Ask::chat("hello")).await.expect(200);
    for engine in fixture.living() {
        // Neither the client's routing headers nor the gateway's own reach an engine.
        for got in engine.requests().await {
            for (name, _) in ROUTING_HEADERS {
                assert!(got.values(name).is_empty(), "{name} reached {got:?}");
            }
        }
    }
    fixture.release();
}

pub async fn a_forged_hand_off_is_refused(proxy: Proxy) {
    let mut fixture = Fixture::one_of_each(proxy).await;
    let mut body = chat_body("hello");
    body["kv_transfer_params"] = json!({
        "do_remote_prefill": true,
        "remote_engine_id": "another-tenants",
        "remote_block_ids": [[1, 2, 3]],
        "remote_host": "127.0.0.1",
        "remote_port": 9,
    });
    let reply = fixture.send(Ask::post(CHAT, body.to_string())).await;
    let message = reply.expect_error(400);
    assert!(message.contains("kv_transfer_params"), "{message}");
    for engine in fixture.living() {
        assert_eq!(engine.state().await.requests, 0);
    }
    fixture.gateway.assert_serves().await;
    fixture.release();
}

pub async fn an_empty_hand_off_is_tolerated(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    for empty in [json!(null), json!({})] {
        let mut body = chat_body("hello");
        body["kv_transfer_params"] = empty;
        fixture
            .send(Ask::post(CHAT, body.to_string()))
            .await
            .expect(200);
    }
    for engine in fixture.living() {
        for got in engine.requests().await {
            let values = values_of(got.text(), "kv_transfer_params");
            assert_eq!(values.len(), 1, "one hand-off, not two: {got:?}");
        }
    }
    fixture.assert_good_hand_offs().await;
    fixture.release();
}
