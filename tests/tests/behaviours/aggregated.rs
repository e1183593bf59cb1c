//! Aggregated workers: they get the client's request unchanged.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::engines::{FAST, Fleet, in_turns};
use pd_router_e2e::gateway::Gateway;

use crate::refusals::GZIPPED;

const CHAT: &str = "/v1/chat/completions";

pub async fn aggregated_workers_get_the_request_as_it_was(proxy: Proxy) {
    let fleet = Fleet::start_with_aggregated(0, 0, 2, FAST).await;
    let gateway = Gateway::start(proxy, &fleet.config_with(in_turns()), &[]).await;
    gateway.send(Ask::get("/pd-router/ready")).await.expect(200);
    gateway.send(Ask::get("/v1/models")).await.expect(200);
    let body = "{ \"model\":\"sim\", \"seed\": 9007199254740993,\n\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\" : 3 }";
    for _ in 0..4 {
        gateway.send(Ask::post(CHAT, body)).await.expect(200);
    }
    let mut total = 0;
    for engine in &fleet.aggregated {
        let requests = engine.requests().await;
        assert!(!requests.is_empty(), "both have a share");
        total += requests.len();
        for got in requests {
            assert_eq!(got.text(), body);
        }
    }
    assert_eq!(total, 4);
    gateway.assert_comes_to_rest().await;
}

pub async fn aggregated_workers_stream_too(proxy: Proxy) {
    let fleet = Fleet::start_with_aggregated(0, 0, 1, FAST).await;
    let gateway = Gateway::over(proxy, &fleet).await;
    let reply = gateway.send(Ask::chat_stream("hello")).await.expect(200);
    assert!(!reply.events().is_empty());
    let mut body = chat_body("hello");
    body["stream"] = true.into();
    let got = fleet.aggregated[0].only_request().await;
    assert_eq!(got.text(), body.to_string());
    gateway.assert_comes_to_rest().await;
}

pub async fn an_unreadable_body_goes_to_an_aggregated_worker(proxy: Proxy) {
    let fleet = Fleet::start_with_aggregated(1, 1, 1, FAST).await;
    let mut gateway = Gateway::over(proxy, &fleet).await;
    let compressed = Ask::post(CHAT, GZIPPED).header("content-encoding", "gzip");
    let reply = gateway.send(compressed).await;
    // The engine may refuse the request, but must receive it.
    assert!(reply.status < 500, "{reply:?}");
    let got = fleet.aggregated[0].only_request().await;
    assert_eq!(got.values("content-encoding"), ["gzip"]);
    assert_eq!(got.body_bytes, GZIPPED.len());

    let reply = gateway.send(Ask::post(CHAT, "this is no JSON")).await;
    assert!(reply.status < 500, "{reply:?}");
    let requests = fleet.aggregated[0].requests().await;
    let bodies: Vec<usize> = requests.iter().map(|got| got.body_bytes).collect();
    assert_eq!(bodies, [GZIPPED.len(), "this is no JSON".len()]);

    for engine in fleet.prefill.iter().chain(&fleet.decode) {
        assert_eq!(engine.state().await.requests, 0);
    }
    gateway.assert_serves().await;
    gateway.assert_comes_to_rest().await;
}
