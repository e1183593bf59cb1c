//! Clients that send their bodies slowly: each has its deadline, and none keeps others out.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::engines::{FAST, Fleet};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

async fn start(proxy: Proxy, limits: Value) -> (Fleet, Gateway) {
    let fleet = Fleet::start(1, 1, FAST).await;
    let mut config = fleet.config();
    config["limits"] = limits;
    let gateway = Gateway::start_on_one_thread(proxy, &config, &[]).await;
    (fleet, gateway)
}

/// A request of at least this many bytes, none of them prompt.
fn request_of(bytes: usize) -> Vec<u8> {
    let mut body = chat_body("hello");
    body["bulk"] = json!("x".repeat(bytes));
    raw::post(CHAT, &[], body.to_string().as_bytes())
}

pub async fn found_b6_a_body_that_does_not_come_in_time_is_told_so(proxy: Proxy) {
    let (fleet, gateway) = start(proxy, json!({"body_timeout_ms": 1500})).await;
    let request = request_of(1000);
    let mut slow = Raw::connect(gateway.listen).await;
    slow.write(&request[..request.len() - 10]).await;
    // Clients that send in time are served meanwhile.
    gateway.send(Ask::chat("hello")).await.expect(200);
    let message = slow.read_reply().await.expect_code(408, "body_timeout");
    assert!(message.contains("1500"), "{message}");
    // A client that sends no byte of its body gets the same refusal.
    let mut silent = Raw::connect(gateway.listen).await;
    let head = raw::head(&format!("POST {CHAT} HTTP/1.1"), &[("content-length", "9")]);
    silent.write(&head).await;
    silent.read_reply().await.expect_code(408, "body_timeout");
    assert_eq!(fleet.prefill_total().await.requests, 1);
    gateway.assert_comes_to_rest().await;
    let refused = gateway.metrics().await;
    let refused = refused.sum_where("pd_router_refused_total", &[("reason", "body_timeout")]);
    assert_eq!(refused, Some(2.0));
}

pub async fn found_b6_incomplete_bodies_give_way_to_complete_ones(proxy: Proxy) {
    const HELD: usize = 240_000;
    let limits = json!({"bodies_in_flight_bytes": 1_000_000, "body_timeout_ms": 600_000});
    let (_fleet, gateway) = start(proxy, limits).await;
    let request = request_of(250_000);
    let mut slow = Vec::new();
    for open in 1..=4 {
        let mut client = Raw::connect(gateway.listen).await;
        client.write(&request[..HELD]).await;
        slow.push(client);
        // One connection after the other, so that their order is known.
        eventually("its head has been read", GENEROUS, || async {
            let streams = gateway.metrics().await.sum("pd_router_streams");
            match streams {
                Some(streams) if streams >= f64::from(open) => Ok(()),
                _ => Err(format!("{streams:?}")),
            }
        })
        .await;
    }
    let mut first = slow.remove(0);
    let first = tokio::spawn(async move { first.read_reply().await });
    eventually("the first of them gives way", GENEROUS, || async {
        // The other bodies arrive in pieces meanwhile.
        let reply = Raw::exchange(gateway.listen, request_of(100_000)).await;
        match first.is_finished() {
            true => Ok(()),
            false => Err(reply.status.to_string()),
        }
    })
    .await;
    let reply = first.await.unwrap_or_else(|error| panic!("{error}"));
    reply.expect_code(503, "bodies_in_flight");
    Raw::exchange(gateway.listen, request_of(100_000))
        .await
        .expect(200);
    // The clients that did not give way are served once their bodies are complete.
    for client in &mut slow {
        client.write(&request[HELD..]).await;
        client.read_reply().await.expect(200);
    }
    gateway.assert_comes_to_rest().await;
}
