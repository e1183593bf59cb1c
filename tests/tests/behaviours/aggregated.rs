//! Aggregated workers: they get the client's request unchanged.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::engines::in_turns;
use pd_router_e2e::fixture::{Fixture, FixtureSpec};

use crate::refusals::GZIPPED;

const CHAT: &str = "/v1/chat/completions";

pub async fn aggregated_workers_get_the_request_as_it_was(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (0, 0)).aggregated(2);
    let fixture = Fixture::acquire(spec.pool(in_turns())).await;
    fixture.send(Ask::get("/pd-router/ready")).await.expect(200);
    fixture.send(Ask::get("/v1/models")).await.expect(200);
    let body = "{ \"model\":\"sim\", \"seed\": 9007199254740993,\n\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\" : 3 }";
    for _ in 0..4 {
        fixture.send(Ask::post(CHAT, body)).await.expect(200);
    }
    let mut total = 0;
    for engine in fixture.living() {
        let requests = engine.requests().await;
        assert!(!requests.is_empty(), "both have a share");
        total += requests.len();
        for got in requests {
            assert_eq!(got.text(), body);
        }
    }
    assert_eq!(total, 4);
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn aggregated_workers_stream_too(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (0, 0)).aggregated(1);
    let fixture = Fixture::acquire(spec).await;
    let reply = fixture.send(Ask::chat_stream("hello")).await.expect(200);
    assert!(!reply.events().is_empty());
    let mut body = chat_body("hello");
    body["stream"] = true.into();
    let got = fixture.decode(0).only_request().await;
    assert_eq!(got.text(), body.to_string());
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn an_unreadable_body_goes_to_an_aggregated_worker(proxy: Proxy) {
    let spec = FixtureSpec::nixl(proxy, (1, 1)).aggregated(1);
    let mut fixture = Fixture::acquire(spec).await;
    let compressed = Ask::post(CHAT, GZIPPED).header("content-encoding", "gzip");
    let reply = fixture.send(compressed).await;
    // The engine may refuse the request, but must receive it.
    assert!(reply.status < 500, "{reply:?}");
    let got = fixture.decode(1).only_request().await;
    assert_eq!(got.values("content-encoding"), ["gzip"]);
    assert_eq!(got.body_bytes, GZIPPED.len());

    let reply = fixture.send(Ask::post(CHAT, "this is no JSON")).await;
    assert!(reply.status < 500, "{reply:?}");
    let requests = fixture.decode(1).requests().await;
    let bodies: Vec<usize> = requests.iter().map(|got| got.body_bytes).collect();
    assert_eq!(bodies, [GZIPPED.len(), "this is no JSON".len()]);

    for engine in [fixture.prefill(0), fixture.decode(0)] {
        assert_eq!(engine.state().await.requests, 0);
    }
    fixture.gateway.assert_serves().await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}
