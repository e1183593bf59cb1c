//! Inputs with which strangers broke the gateway: a client's bytes, a worker's odd answers, a sidecar's errors.

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, chat_body};
use pd_router_e2e::engines::{
    FAST, Fleet, RecordedRequest, Role, in_turns, named, static_config, with,
};
use pd_router_e2e::gateway::Gateway;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::scripted::{Answer, ScriptedWorker};
use pd_router_e2e::wait::{GENEROUS, eventually};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

async fn ejections(gateway: &Gateway) -> f64 {
    let metrics = gateway.metrics().await;
    metrics.sum("pd_router_ejections_total").unwrap_or_default()
}

/// One HTTP/2 request with a body, in frames that no library would write; `fields` are its encoded header fields.
fn http2_request(fields: &[(&[u8], &[u8])], body: &[u8]) -> Vec<u8> {
    const SETTINGS: u8 = 4;
    const HEADERS: u8 = 1;
    const DATA: u8 = 0;
    const END_HEADERS: u8 = 4;
    const END_STREAM: u8 = 1;
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = u32::try_from(payload.len()).expect("a short frame");
        let mut frame = length.to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags, 0, 0, 0, stream]);
        frame.extend(payload);
        frame
    };
    let mut block = Vec::new();
    for (name, value) in fields {
        // Literal, not indexed, its name new, no Huffman code.
        block.push(0);
        for part in [name, value] {
            block.push(u8::try_from(part.len()).expect("a short field"));
            block.extend_from_slice(part);
        }
    }
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    bytes.extend(frame(HEADERS, END_HEADERS, 1, &block));
    bytes.extend(frame(DATA, END_STREAM, 1, body));
    bytes
}

/// A path that is not text reaches no worker, and ejects none.
pub async fn found_b1_a_path_that_is_no_text_is_the_clients_own_fault(proxy: Proxy) {
    let fleet = Fleet::start(2, 1, FAST).await;
    let config = fleet.config_with(with(in_turns(), json!({"health": {"eject_after": 1}})));
    let gateway = Gateway::start_on_one_thread(proxy, &config, &[]).await;
    let body = json!({"model": "sim", "messages": [{"role": "user", "content": "hello"}]});
    let body = body.to_string().into_bytes();
    for path in [
        &b"/v1/chat/completions?\xff"[..],
        b"/v1/chat/completions?a=\xc3\x28",
    ] {
        for _ in 0..4 {
            let request = http2_request(
                &[
                    (b":method", b"POST"),
                    (b":scheme", b"http"),
                    (b":authority", b"gateway"),
                    (b":path", path),
                    (b"content-type", b"application/json"),
                ],
                &body,
            );
            let mut client = Raw::connect(gateway.listen).await;
            client.write(&request).await;
            client.read_until("\"unsendable\"", 1).await;
        }
        gateway.send(Ask::chat("hello")).await.expect_tokens(4);
    }
    assert_eq!(fleet.prefill_total().await.requests, 2);
    assert_eq!(ejections(&gateway).await, 0.0);
}

/// A redirect and a switch of protocols are faults of the worker: another one is tried, and without another the client gets
/// an error.
pub async fn found_b14_a_redirect_is_a_workers_fault_and_reaches_no_client(proxy: Proxy) {
    for role in [Role::Prefill, Role::Decode] {
        let fleet = Fleet::start(2, 2, FAST).await;
        let config = fleet.config_with(in_turns());
        let gateway = Gateway::start_on_one_thread(proxy, &config, &[]).await;
        let engines = match role {
            Role::Prefill => &fleet.prefill,
            _ => &fleet.decode,
        };
        let redirect =
            json!({"kind": "status", "status": 307, "headers": {"location": "http://elsewhere/"}});
        engines[0].fault(&redirect).await;
        for _ in 0..4 {
            gateway.send(Ask::chat("hello")).await.expect_tokens(4);
        }
        engines[1].fault(&redirect).await;
        let reply = gateway.send(Ask::chat("hello")).await;
        match role {
            Role::Prefill => drop(reply.expect_code(503, "prefill_failed")),
            _ => drop(reply.expect_code(502, "unusable_status")),
        }
    }
}

/// Requests a stream of this many tokens; its connection ends with it.
async fn stream_of(gateway: &Gateway, tokens: u64) -> Raw {
    let body = with(
        chat_body("hello"),
        json!({"stream": true, "max_tokens": tokens}),
    );
    let close = [("connection", "close")];
    let mut client = Raw::connect(gateway.listen).await;
    client
        .write(&raw::post(CHAT, &close, body.to_string().as_bytes()))
        .await;
    client
}

/// A worker whose new streams all fall silent after their first token: while an older one of its streams moves, as behind
/// clients that read slowly, the worker is not ejected.
pub async fn found_b7_a_worker_is_ejected_for_its_silence_only_where_none_of_its_streams_moves(
    proxy: Proxy,
) {
    for (older, expected) in [(2, 0.0), (0, 1.0)] {
        let options = ["--token-ms", "20", "--prefill-rate", "80000"];
        let fleet = Fleet::start_with_aggregated(0, 0, 2, &options).await;
        let pool = json!({
            "protocol": "aggregated",
            "decode": {"silence_timeout_ms": 1000},
            "health": {"eject_after": 1, "cold_timeout_ms": 0},
        });
        let config = fleet.config_with(with(in_turns(), pool));
        let gateway = Gateway::start_on_one_thread(proxy, &config, &[]).await;
        let mut moving = Vec::new();
        for _ in 0..older {
            let mut client = stream_of(&gateway, 6_000).await;
            client.read_until("data:", 3).await;
            moving.push(client);
        }
        let silence = json!({"kind": "slow_drip", "ms": 600_000});
        fleet.aggregated[0].fault(&silence).await;
        let (silences, ejected) =
            eventually("it has fallen silent often enough", GENEROUS, || async {
                stream_of(&gateway, 3).await.read_rest().await;
                let metrics = gateway.metrics().await;
                let silences = metrics.sum_where("pd_router_resets_total", &[("reason", "silent")]);
                let silences = silences.unwrap_or_default();
                let ejected = ejections(&gateway).await;
                match silences >= 3.0 || ejected > 0.0 {
                    true => Ok((silences, ejected)),
                    false => Err(silences.to_string()),
                }
            })
            .await;
        assert_eq!(
            ejected, expected,
            "{older} older streams, {silences} silences"
        );
        drop(moving);
        gateway.assert_comes_to_rest().await;
    }
}

/// A decode worker whose sidecar runs prefill: an empty 502 if the prefill worker cannot be reached.
async fn sidecar(dead: String) -> ScriptedWorker {
    ScriptedWorker::start(move |got: &RecordedRequest| {
        let prefill = got.values("x-prefiller-host-port");
        match prefill.first() {
            Some(address) if *address == dead => Answer::json("").status(502),
            _ => Answer::json(
                json!({"id": "1", "object": "chat.completion", "choices": [{"index": 0, "finish_reason": "length",
                    "message": {"role": "assistant", "content": "four words are here"}}],
                    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}})
                .to_string(),
            ),
        }
    })
    .await
}

/// Behind sidecars a dead prefill worker costs no answer, and ejects no decode worker.
pub async fn found_l1_behind_sidecars_a_dead_prefill_worker_costs_no_answer(proxy: Proxy) {
    let mut fleet = Fleet::start(2, 0, FAST).await;
    let dead = fleet.prefill_addresses().remove(0);
    let decode = [sidecar(dead.clone()).await, sidecar(dead).await];
    let mut workers: Vec<Value> = named(&fleet.prefill, "p", 1);
    workers.extend(decode.iter().zip(11..).map(|(sidecar, id)| {
        json!({"role": "decode", "address": sidecar.address.to_string(), "id": id, "model": "sim"})
    }));
    let pool = json!({"protocol": "llmd", "health": {"eject_after": 2}});
    let config = static_config(workers, with(in_turns(), pool));
    let gateway = Gateway::start_on_one_thread(proxy, &config, &[]).await;
    fleet.prefill[0].kill();
    for _ in 0..8 {
        let replies = (0..8).map(|_| gateway.send(Ask::post(CHAT, body("hello"))));
        for reply in join_all(replies).await {
            reply.expect(200);
        }
    }
    let metrics = gateway.metrics().await;
    let ejected = metrics.sum_where("pd_router_ejections_total", &[("role", "decode")]);
    assert_eq!(ejected.unwrap_or_default(), 0.0);
}

fn body(content: &str) -> String {
    json!({"model": "sim", "messages": [{"role": "user", "content": content}], "max_tokens": 4})
        .to_string()
}
