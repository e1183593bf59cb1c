//! Hand-offs in clients' requests, and requests that no hand-off can carry.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, send};
use pd_router_e2e::engines::{FAST, Fleet, Role, static_config, with};
use pd_router_e2e::fixture::FixtureSpec;
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::protocols::Protocol;
use serde_json::{Value, json};

use crate::client_requests::{CHAT, CHATS, COMPLETIONS};
use crate::rig::Rig;

fn chat_with(field: &str, value: &Value) -> String {
    let base =
        json!({"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2});
    with(base, json!({field: value})).to_string()
}

pub async fn hand_off_fields_of_every_protocol_are_refused(proxy: Proxy) {
    let forged = |protocol: Protocol| match protocol {
        Protocol::Sglang => vec![
            ("bootstrap_room", json!(7)),
            ("bootstrap_host", json!("10.0.0.9")),
            ("bootstrap_port", json!(8998)),
            ("bootstrap_room", json!([1, 2])),
        ],
        Protocol::Trtllm => vec![
            (
                "disaggregated_params",
                json!({"request_type": "generation_only", "ctx_request_id": 7}),
            ),
            (
                "disaggregated_params",
                json!({"request_type": "context_only"}),
            ),
        ],
        _ => vec![(
            "kv_transfer_params",
            json!({"do_remote_prefill": true, "transfer_id": "xfer-1"}),
        )],
    };
    for protocol in [
        Protocol::Nixl,
        Protocol::Mooncake,
        Protocol::Sglang,
        Protocol::Trtllm,
    ] {
        let rig = Rig::start(proxy, protocol).await;
        for (field, value) in forged(protocol) {
            let ask = Ask::post(CHAT, chat_with(field, &value));
            let message = rig.fixture.gateway.send(ask).await.expect_error(400);
            assert!(message.contains(field), "{message}");
        }
        for role in [Role::Prefill, Role::Decode] {
            let got = rig.fixture.requests(role).await;
            assert!(got.iter().all(|got| *got == 0), "{got:?}");
        }
        for (field, _) in forged(protocol) {
            let ask = Ask::post(CHAT, chat_with(field, &Value::Null));
            rig.fixture.gateway.send(ask).await.expect(200);
        }
        rig.ends().await;
    }
}

pub async fn a_trusted_callers_hand_off_goes_to_decode_as_it_came(proxy: Proxy) {
    let spec = FixtureSpec::of(proxy, Protocol::Nixl).pool(json!({"trust_clients": true}));
    let mut rig = Rig::on(spec).await;
    // The caller's own prefill on one of the two engines.
    let params = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let leg = with(
        json!({"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        json!({"kv_transfer_params": params}),
    );
    let prefill = rig.fixture.engines.prefill[0].address;
    let prefilled = send(prefill, Ask::post(CHAT, leg.to_string()))
        .await
        .expect(200);
    let hand_off = prefilled.json()["kv_transfer_params"].clone();
    assert!(hand_off.is_object(), "{}", prefilled.text());

    let body = chat_with("kv_transfer_params", &hand_off);
    let legs = rig.legs_of(Ask::post(CHAT, body.clone())).await;
    assert_eq!(
        legs.only().text(),
        body,
        "no prefill, and not a byte changed"
    );
    legs.reply.expect_tokens(2);
    rig.ends().await;
}

pub async fn several_sequences_run_whole_where_a_worker_can(proxy: Proxy) {
    let fleet = Fleet::start_with_aggregated(1, 1, 1, FAST).await;
    let workers = fleet.engines().map(|engine| engine.listed()).collect();
    let gateway = Gateway::start(proxy, &static_config(workers, json!({})), &[]).await;
    let bodies = [
        (
            CHAT,
            r#"{"model":"sim","messages":[{"role":"user","content":"hi"}],"n":2}"#,
        ),
        (
            COMPLETIONS,
            r#"{"model":"sim","prompt":["one","two"],"max_tokens":2}"#,
        ),
        (
            COMPLETIONS,
            r#"{"model":"sim","prompt":[[1,2],[3]],"max_tokens":2,"stream":true}"#,
        ),
    ];
    for (path, body) in bodies {
        gateway.send(Ask::post(path, body)).await.expect(200);
        let got = fleet.aggregated[0].requests().await;
        let last = got.last().map(|leg| leg.text().to_owned());
        assert_eq!(last.as_deref(), Some(body));
    }
    assert_eq!(
        fleet.aggregated[0].state().await.requests,
        bodies.len() as u64
    );
    for engine in fleet.prefill.iter().chain(&fleet.decode) {
        assert_eq!(engine.state().await.requests, 0);
    }
    gateway.send(CHATS[0].ask()).await.expect(200);
    gateway.assert_comes_to_rest().await;
}
