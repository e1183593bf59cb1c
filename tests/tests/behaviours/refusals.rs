//! Requests that pd-router itself refuses, and the form of its refusals.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::Role;
use pd_router_e2e::fixture::Fixture;

const CHAT: &str = "/v1/chat/completions";

/// `{"model":"sim","messages":[{"role":"user","content":"hi"}]}`, compressed with gzip.
pub const GZIPPED: &[u8] = &[
    0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0xab, 0x56, 0xca, 0xcd, 0x4f, 0x49,
    0xcd, 0x51, 0xb2, 0x52, 0x2a, 0xce, 0xcc, 0x55, 0xd2, 0x51, 0xca, 0x4d, 0x2d, 0x2e, 0x4e, 0x4c,
    0x4f, 0x2d, 0x56, 0xb2, 0x8a, 0xae, 0x56, 0x2a, 0xca, 0xcf, 0x49, 0x05, 0xca, 0x94, 0x16, 0xa7,
    0x16, 0x01, 0xa5, 0x92, 0xf3, 0xf3, 0x4a, 0x52, 0xf3, 0x4a, 0x80, 0x02, 0x19, 0x99, 0x4a, 0xb5,
    0xb1, 0xb5, 0x00, 0xbc, 0x34, 0xbc, 0x77, 0x3b, 0x00, 0x00, 0x00,
];

/// The message of the refusal, which must have this status; nothing may reach an engine, and the gateway still serves.
async fn message(mut fixture: Fixture, ask: Ask, status: u16) -> String {
    let message = fixture.send(ask).await.expect_error(status);
    for engine in fixture.living() {
        assert_eq!(
            engine.state().await.requests,
            0,
            "refused requests reach no engine"
        );
    }
    fixture.gateway.assert_serves().await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
    message
}

async fn refusal(proxy: Proxy, body: &'static str, status: u16) -> String {
    let fixture = Fixture::one_of_each(proxy).await;
    message(fixture, Ask::post(CHAT, body), status).await
}

pub async fn an_unknown_model_is_not_found(proxy: Proxy) {
    let body = r#"{"model":"nobody-has-this","messages":[{"role":"user","content":"hi"}]}"#;
    let message = refusal(proxy, body, 404).await;
    assert!(message.contains("nobody-has-this"), "{message}");
}

pub async fn a_missing_model_is_refused_by_name(proxy: Proxy) {
    let body = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
    let message = refusal(proxy, body, 400).await;
    assert!(message.contains("model"), "{message}");
}

pub async fn a_model_that_is_no_text_is_refused_by_name(proxy: Proxy) {
    let body = r#"{"model":7,"messages":[{"role":"user","content":"hi"}]}"#;
    let message = refusal(proxy, body, 400).await;
    assert!(message.contains("model"), "{message}");
}

pub async fn missing_messages_are_refused_by_name(proxy: Proxy) {
    let message = refusal(proxy, r#"{"model":"sim"}"#, 400).await;
    assert!(message.contains("messages"), "{message}");
}

pub async fn an_array_is_no_request(proxy: Proxy) {
    refusal(proxy, r#"[{"model":"sim"}]"#, 400).await;
}

pub async fn what_is_not_json_is_refused(proxy: Proxy) {
    refusal(proxy, "model=sim&messages=hi", 400).await;
}

pub async fn an_empty_body_is_refused(proxy: Proxy) {
    refusal(proxy, "", 400).await;
}

pub async fn a_compressed_body_is_refused_with_the_reason(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let ask = Ask::post(CHAT, GZIPPED).header("content-encoding", "gzip");
    let message = message(fixture, ask, 415).await;
    assert!(
        message.contains("encoding") || message.contains("gzip"),
        "{message}"
    );
}

pub async fn refused_requests_are_counted_and_reach_no_worker(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let counted = async || {
        let metrics = fixture.gateway.metrics().await;
        let of = |name| metrics.sum(name).unwrap_or_default();
        let names = ["pd_router_refused_total", "pd_router_prefill_calls_total"];
        names.map(of)
    };
    let [refused, called] = counted().await;
    for body in ["not JSON", "[]", r#"{"model":"sim"}"#] {
        let reply = fixture.send(Ask::post(CHAT, body)).await;
        reply.expect_error(400);
    }
    assert_eq!(counted().await, [refused + 3.0, called]);
    assert_eq!(fixture.total(Role::Decode).await.requests, 0);
    fixture.release();
}
