//! Bodies and headers that reach the engines: the client's bytes, with the few edits of a hand-off.

use pd_router_e2e::Proxy;
use pd_router_e2e::client::Ask;
use pd_router_e2e::engines::RecordedRequest;
use pd_router_e2e::fixture::Fixture;
use pd_router_e2e::json_text::{members_without, spliced_member, values_of};
use pd_router_e2e::raw::{self, Raw};

const CHAT: &str = "/v1/chat/completions";
const HAND_OFF: &str = "kv_transfer_params";

/// Members of the client's body that the prefill leg may change.
const EDITED: [&str; 6] = [
    "stream",
    "stream_options",
    "min_tokens",
    "max_tokens",
    "max_completion_tokens",
    HAND_OFF,
];

/// Everything that re-writing JSON loses: big and long numbers, doubled keys, white space, order, escapes.
const AWKWARD: &str = concat!(
    "  {\n\t\"z_unknown\" : {\"b\":1.0,\"a\":[ 0.10, -0.0,1E5 , 12345678901234567890.000000000000000001 ]} ,\r\n",
    "  \"model\":\"sim\",\"seed\": 9007199254740993,\n",
    "  \"user\":\"first\",\"user\" : \"second\",\n",
    "  \"messages\":[ {\"role\":\"user\",\"content\":\"caf\\u00e9 \\ud83d\\ude00 na\u{ef}ve \u{65e5}\u{672c} \\/ \\\" kv_transfer_params\"}],\n",
    "  \"metadata\":{\"stream\":true,\"max_tokens\":7,\"min_tokens\":3,\"kv_transfer_params\":null},\n",
    "  \"stream\" :true, \"stream_options\":{ \"include_usage\":true },\n",
    "  \"max_tokens\" : 8,\"max_completion_tokens\":8 ,\"min_tokens\":2\n} \n",
);

/// A body with the required members only.
const BARE: &str = r#"{"messages":[{"role":"user","content":"hi"}],"model":"sim"}"#;

/// A body with the newer name of the limit alone, and an unknown member last.
const NEWER_LIMIT: &str = r#"{"model":"sim","max_completion_tokens":3,"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"n_unknown":[]}"#;

const BODIES: [&str; 3] = [AWKWARD, BARE, NEWER_LIMIT];

struct Legs {
    prefill: RecordedRequest,
    decode: RecordedRequest,
}

/// Sends the request; fails without an answer. Returns the legs that the engines received.
async fn legs_of(fixture: &Fixture, ask: Ask) -> Legs {
    fixture.send(ask).await.expect(200);
    last_legs(fixture).await
}

async fn last_legs(fixture: &Fixture) -> Legs {
    let last = |requests: Vec<RecordedRequest>| {
        let last = requests.last().cloned();
        last.unwrap_or_else(|| panic!("the engine got nothing"))
    };
    Legs {
        prefill: last(fixture.prefill(0).requests().await),
        decode: last(fixture.decode(0).requests().await),
    }
}

pub async fn the_decode_leg_keeps_every_byte_of_the_body(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    for body in BODIES {
        let legs = legs_of(&fixture, Ask::post(CHAT, body)).await;
        let hand_off = spliced_member(body, legs.decode.text(), HAND_OFF);
        let hand_off = hand_off.unwrap_or_else(|reason| panic!("{reason}"));
        assert_eq!(hand_off["do_remote_prefill"], true, "{hand_off}");
        assert!(hand_off["remote_block_ids"].is_array(), "{hand_off}");
        assert!(hand_off["remote_engine_id"].is_string(), "{hand_off}");
    }
    fixture.assert_good_hand_offs().await;
    fixture.release();
}

pub async fn the_prefill_leg_differs_only_by_its_edits(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    for body in BODIES {
        let legs = legs_of(&fixture, Ask::post(CHAT, body)).await;
        assert_prefill_leg(body, legs.prefill.text());
    }
    fixture.release();
}

fn assert_prefill_leg(client: &str, prefill: &str) {
    assert_eq!(
        members_without(client, &EDITED),
        members_without(prefill, &EDITED),
        "what is not edited is as the client wrote it"
    );
    let asked_for_a_stream = !values_of(client, "stream").is_empty();
    let stream = values_of(prefill, "stream");
    assert!(
        stream == ["false"] || (stream.is_empty() && !asked_for_a_stream),
        "a prefill is not streamed: {prefill}"
    );
    assert!(values_of(prefill, "stream_options").is_empty(), "{prefill}");
    assert_eq!(values_of(prefill, "max_tokens"), ["1"], "{prefill}");
    for name in ["max_completion_tokens", "min_tokens"] {
        let bound = match values_of(client, name).is_empty() {
            true => vec![],
            false => vec!["1".to_owned()],
        };
        assert_eq!(
            values_of(prefill, name),
            bound,
            "{name} is one where it was sent, absent where not: {prefill}"
        );
    }
    let hand_off = values_of(prefill, HAND_OFF);
    assert_eq!(hand_off.len(), 1, "{prefill}");
    let hand_off: serde_json::Value = serde_json::from_str(&hand_off[0]).unwrap_or_default();
    assert_eq!(hand_off["do_remote_decode"], true, "{prefill}");
    assert_eq!(hand_off["do_remote_prefill"], false, "{prefill}");
}

pub async fn numbers_that_no_float_holds_reach_both_legs(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let body = r#"{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":2,"vendor":{"huge":1e400,"long":0.1000000000000000055511151231257827}}"#;
    // The engine may refuse these numbers; the gateway passes the body on in any case.
    let reply = fixture.send(Ask::post(CHAT, body)).await;
    assert!(reply.status == 200 || reply.status == 400, "{reply:?}");
    let prefill = fixture.prefill(0).only_request().await;
    assert_prefill_leg(body, prefill.text());
    if reply.status == 200 {
        let decode = fixture.decode(0).only_request().await;
        let spliced = spliced_member(body, decode.text(), HAND_OFF);
        assert!(spliced.is_ok(), "{spliced:?}");
    }
    fixture.release();
}

pub async fn the_length_is_right_on_both_legs(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    for body in BODIES {
        let legs = legs_of(&fixture, Ask::post(CHAT, body)).await;
        for leg in [&legs.prefill, &legs.decode] {
            let length = leg.body_bytes.to_string();
            assert_eq!(leg.values("content-length"), [length.as_str()], "{leg:?}");
            assert!(leg.values("transfer-encoding").is_empty(), "{leg:?}");
            assert_eq!(leg.text().len(), leg.body_bytes);
        }
    }
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn a_chunked_body_is_framed_in_one_way_on_both_legs(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let mut request = raw::head(
        &format!("POST {CHAT} HTTP/1.1"),
        &[
            ("content-type", "application/json"),
            ("transfer-encoding", "chunked"),
        ],
    );
    for part in AWKWARD.as_bytes().chunks(100) {
        request.extend(raw::chunk(part));
    }
    request.extend(b"0\r\n\r\n");
    Raw::exchange(fixture.gateway.listen, request)
        .await
        .expect(200);
    let legs = last_legs(&fixture).await;
    for leg in [&legs.prefill, &legs.decode] {
        let lengths = leg.values("content-length");
        let encodings = leg.values("transfer-encoding");
        assert_eq!(lengths.len() + encodings.len(), 1, "one framing: {leg:?}");
    }
    let spliced = spliced_member(AWKWARD, legs.decode.text(), HAND_OFF);
    assert!(spliced.is_ok(), "{spliced:?}");
    assert_prefill_leg(AWKWARD, legs.prefill.text());
    fixture.release();
}

pub async fn the_path_and_query_are_the_same_on_both_legs(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let path = "/v1/chat/completions?trace=1&x=%2Fy";
    let legs = legs_of(&fixture, Ask::post(path, BARE)).await;
    for leg in [&legs.prefill, &legs.decode] {
        assert_eq!(leg.path, path, "{leg:?}");
        assert_eq!(leg.method, "POST");
    }
    fixture.release();
}

pub async fn every_request_has_an_id_of_its_own(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let mut seen = Vec::new();
    for _ in 0..2 {
        let legs = legs_of(&fixture, Ask::post(CHAT, BARE)).await;
        let id = legs.prefill.values("x-request-id").join(",");
        assert_eq!(legs.decode.values("x-request-id"), [id.as_str()]);
        assert!(!id.is_empty());
        seen.push(id);
    }
    assert_ne!(seen[0], seen[1], "each request has an id of its own");
    fixture.release();
}

pub async fn the_clients_headers_reach_both_legs(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let ask = Ask::post(CHAT, BARE)
        .header("authorization", "Bearer the-clients-own")
        .header("traceparent", trace)
        .header("x-tenant", "blue");
    let legs = legs_of(&fixture, ask).await;
    for leg in [&legs.prefill, &legs.decode] {
        assert_eq!(leg.values("authorization"), ["Bearer the-clients-own"]);
        assert_eq!(leg.values("traceparent"), [trace]);
        assert_eq!(leg.values("content-type"), ["application/json"]);
    }
    assert_eq!(legs.decode.values("x-tenant"), ["blue"]);
    fixture.release();
}

pub async fn headers_that_the_client_did_not_send_stay_absent(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let legs = legs_of(&fixture, Ask::post(CHAT, BARE)).await;
    for leg in [&legs.prefill, &legs.decode] {
        for name in ["authorization", "traceparent", "content-encoding"] {
            assert!(leg.values(name).is_empty(), "{name} in {leg:?}");
        }
    }
    fixture.release();
}
