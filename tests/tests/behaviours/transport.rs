//! Forms in which a request can travel, and forms of body that a client can send.

use futures_util::future::join_all;
use pd_router_e2e::Proxy;
use pd_router_e2e::client::{Ask, Connection, chat_body};
use pd_router_e2e::engines::Role;
use pd_router_e2e::fixture::Fixture;
use pd_router_e2e::raw::{self, Raw};

const CHAT: &str = "/v1/chat/completions";
const CHUNKED: [(&str, &str); 2] = [
    ("content-type", "application/json"),
    ("transfer-encoding", "chunked"),
];

/// Nesting deeper than any stack should follow.
const DEEP: usize = 100_000;

/// Fails unless exactly this many hand-offs were issued and used.
async fn assert_handed_off(fixture: &Fixture, times: u64) {
    let prefill = fixture.total(Role::Prefill).await;
    assert_eq!(prefill.handoffs_issued, times, "{prefill:?}");
    assert_eq!(prefill.handoffs_consumed, times, "{prefill:?}");
    fixture.assert_good_hand_offs().await;
}

pub async fn a_request_with_trailers_is_routed(proxy: Proxy) {
    let mut fixture = Fixture::one_of_each(proxy).await;
    let mut request = raw::head(&format!("POST {CHAT} HTTP/1.1"), &CHUNKED);
    request.extend(raw::chunk(chat_body("hello").to_string().as_bytes()));
    request.extend(b"0\r\nx-checksum: abc\r\n\r\n");
    Raw::exchange(fixture.gateway.listen, request)
        .await
        .expect(200);
    assert_handed_off(&fixture, 1).await;
    fixture.gateway.assert_serves().await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn a_body_in_chunks_of_one_byte_is_routed(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let mut client = Raw::connect(fixture.gateway.listen).await;
    client
        .write(&raw::head(&format!("POST {CHAT} HTTP/1.1"), &CHUNKED))
        .await;
    for byte in chat_body("hello").to_string().as_bytes() {
        client.write(&raw::chunk(&[*byte])).await;
    }
    client.write(b"0\r\n\r\n").await;
    client.read_reply().await.expect(200);
    assert_handed_off(&fixture, 1).await;
    fixture.release();
}

pub async fn an_http_1_0_client_is_answered(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let body = chat_body("hello").to_string();
    let length = body.len().to_string();
    let headers = [
        ("content-type", "application/json"),
        ("content-length", length.as_str()),
    ];
    let mut request = raw::head(&format!("POST {CHAT} HTTP/1.0"), &headers);
    request.extend(body.as_bytes());
    let reply = Raw::exchange(fixture.gateway.listen, request)
        .await
        .expect(200);
    assert!(
        reply.header("transfer-encoding").is_none(),
        "an HTTP/1.0 client knows no chunks: {reply:?}"
    );
    assert!(reply.json()["choices"].is_array());
    assert_handed_off(&fixture, 1).await;
    fixture.release();
}

pub async fn a_client_that_expects_100_continue_is_answered(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let body = chat_body("hello").to_string();
    let length = body.len().to_string();
    let headers = [
        ("content-type", "application/json"),
        ("content-length", length.as_str()),
        ("expect", "100-continue"),
    ];
    let mut client = Raw::connect(fixture.gateway.listen).await;
    client
        .write(&raw::head(&format!("POST {CHAT} HTTP/1.1"), &headers))
        .await;
    let (first, _) = client.read_head().await;
    assert!(first.starts_with("HTTP/1.1 100"), "{first}");
    client.write(body.as_bytes()).await;
    client.read_reply().await.expect(200);
    assert_handed_off(&fixture, 1).await;
    fixture.release();
}

pub async fn a_header_of_any_bytes_is_no_danger(proxy: Proxy) {
    let mut fixture = Fixture::one_of_each(proxy).await;
    let ask = Ask::chat("hello")
        .header_bytes("x-t", b"\xff\xfe")
        .header_bytes("user-agent", b"caf\xe9");
    fixture.send(ask).await.expect(200);
    assert_handed_off(&fixture, 1).await;
    let ask = Ask::get("/v1/models").header_bytes("x-t", b"\xff\xfe");
    fixture.send(ask).await.expect(200);
    // In headers that a filter reads, such bytes may be refused, but nothing worse.
    for name in [
        "authorization",
        "content-encoding",
        "x-gateway-destination-endpoint",
        "x-request-id",
    ] {
        let reply = fixture
            .send(Ask::chat("hello").header_bytes(name, b"\xff\xfe"))
            .await;
        assert!((200..500).contains(&reply.status), "{name}: {reply:?}");
    }
    fixture.gateway.assert_serves().await;
    fixture.release();
}

pub async fn many_requests_use_one_connection(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let opened = Connection::open(fixture.gateway.listen).await;
    let mut connection = opened.unwrap_or_else(|failure| panic!("no connection: {failure}"));
    for number in 0..30 {
        let (ask, status) = match number % 5 {
            0 => (Ask::chat("hello"), 200),
            1 => (Ask::chat_stream("hello"), 200),
            2 => (Ask::get("/v1/models"), 200),
            3 => (Ask::post(CHAT, r#"{"model":"sim"}"#), 400),
            _ => (Ask::get("/pd-router/ready"), 200),
        };
        let reply = connection.send(ask).await;
        let reply = reply.unwrap_or_else(|failure| panic!("request {number}: {failure}"));
        reply.expect(status);
    }
    assert_handed_off(&fixture, 12).await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn requests_written_one_after_the_other_are_answered_in_order(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let mut all = Vec::new();
    for tokens in 1..=5 {
        let mut body = chat_body("hello");
        body["max_tokens"] = tokens.into();
        all.extend(raw::post(CHAT, &[], body.to_string().as_bytes()));
    }
    let mut client = Raw::connect(fixture.gateway.listen).await;
    client.write(&all).await;
    for tokens in 1..=5 {
        let answer = client.read_reply().await.expect(200).json();
        assert_eq!(answer["usage"]["completion_tokens"], tokens, "{answer}");
    }
    assert_handed_off(&fixture, 5).await;
    fixture.release();
}

pub async fn http_2_without_asking_first_is_answered(proxy: Proxy) {
    let fixture = Fixture::one_of_each(proxy).await;
    let opened = Connection::open_http2(fixture.gateway.listen).await;
    let connection = opened.unwrap_or_else(|failure| panic!("no connection: {failure}"));
    let replies = join_all((0..10).map(|number| {
        let shared = connection.share();
        async move {
            let mut shared = shared.expect("an HTTP/2 connection can be shared");
            let ask = match number % 2 {
                0 => Ask::chat("hello"),
                _ => Ask::chat_stream("hello"),
            };
            shared.send(ask).await
        }
    }))
    .await;
    for (number, reply) in replies.into_iter().enumerate() {
        let reply = reply.unwrap_or_else(|failure| panic!("no answer: {failure}"));
        let reply = reply.expect(200);
        if number % 2 == 1 {
            assert!(!reply.events().is_empty());
        }
    }
    assert_handed_off(&fixture, 10).await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn a_get_of_an_unknown_path_is_answered(proxy: Proxy) {
    let mut fixture = Fixture::one_of_each(proxy).await;
    let reply = fixture.send(Ask::get("/nobody/knows?this=path")).await;
    reply.expect_code(404, "unknown_path");
    fixture.gateway.assert_serves().await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}

pub async fn strange_bodies_are_answered(proxy: Proxy) {
    let mut fixture = Fixture::one_of_each(proxy).await;
    let member = |name: &str, text: &str| {
        format!(
            r#"{{"model":"sim","messages":[{{"role":"user","content":"hi"}}],"max_tokens":2,"{name}":{text}}}"#
        )
        .into_bytes()
    };
    let deep = format!("{}{}", "[".repeat(DEEP), "]".repeat(DEEP));
    let deep_objects = format!("{}1{}", r#"{"a":"#.repeat(DEEP), "}".repeat(DEEP));
    let bodies: Vec<(&str, Vec<u8>)> = vec![
        ("deep arrays in an unknown field", member("x", &deep)),
        (
            "deep objects in an unknown field",
            member("x", &deep_objects),
        ),
        ("deep arrays alone", deep.into_bytes()),
        ("open arrays alone", "[".repeat(DEEP).into_bytes()),
        ("an escaped NUL", member("user", r#""a\u0000b""#)),
        ("a bare NUL", member("user", "\"a\u{0}b\"")),
        ("a lone surrogate", member("user", r#""\ud800""#)),
        ("a lone surrogate as a key", member(r"\udc00", "1")),
        ("NaN", member("temperature", "NaN")),
        ("-Infinity", member("temperature", "-Infinity")),
        ("a negative limit", member("max_completion_tokens", "-1")),
        (
            "a huge limit",
            member("max_completion_tokens", "99999999999999999999"),
        ),
        (
            "a limit that is no number",
            member("max_completion_tokens", "\"many\""),
        ),
        ("stream that is no boolean", member("stream", "\"yes\"")),
        (
            "stream_options that are no object",
            member("stream_options", "7"),
        ),
        (
            "a model of 100 kB",
            format!(r#"{{"model":"{}","messages":[]}}"#, "m".repeat(100_000)).into_bytes(),
        ),
        (
            "messages that are no array",
            br#"{"model":"sim","messages":"hi"}"#.to_vec(),
        ),
        (
            "messages of numbers",
            br#"{"model":"sim","messages":[1,2]}"#.to_vec(),
        ),
        ("no messages", br#"{"model":"sim","messages":[]}"#.to_vec()),
        ("an empty object", b"{}".to_vec()),
        ("null", b"null".to_vec()),
        ("white space", b" \r\n\t ".to_vec()),
        ("two values", b"{}{}".to_vec()),
        (
            "half an object",
            br#"{"model":"sim","messages":[{"role":"#.to_vec(),
        ),
        (
            "a byte order mark",
            [b"\xef\xbb\xbf".as_slice(), &member("x", "1")].concat(),
        ),
        (
            "bytes that are no text",
            member("user", "\"a?b\"")
                .iter()
                .map(|b| if *b == b'?' { 0xff } else { *b })
                .collect(),
        ),
        (
            "UTF-16",
            "{\"model\":\"sim\"}"
                .encode_utf16()
                .flat_map(u16::to_le_bytes)
                .collect(),
        ),
    ];
    for (what, body) in bodies {
        let reply = fixture.gateway.try_send(Ask::post(CHAT, body)).await;
        let reply = reply.unwrap_or_else(|failure| panic!("{what}: {failure}"));
        assert!((200..500).contains(&reply.status), "{what}: {reply:?}");
        fixture.gateway.assert_serves().await;
    }
    fixture.assert_good_hand_offs().await;
    fixture.gateway.assert_comes_to_rest().await;
    fixture.release();
}
