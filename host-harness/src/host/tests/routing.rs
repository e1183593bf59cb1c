//! Tests of what reaches workers and what comes back: destinations, retries, headers, lengths, streaming.

use std::time::Duration;

use super::guest::{ENDED, expect_trail, module, start};
use super::net;

/// Sends every request to the destination at once.
const PASS: &str = r#"
  (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
    (call $route) (i32.const 0))
  (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32)
    (call $mark (i32.const 6)) (i32.const 0))"#;

#[tokio::test(flavor = "multi_thread")]
async fn without_a_destination_there_is_no_healthy_upstream() {
    let (worker, _requests) = net::worker(net::ok("never")).await;
    let host = start(&module("", ""), &[worker]).await;
    let forged = format!(
        "GET / HTTP/1.1\r\nhost: test\r\nx-gateway-destination-endpoint: {worker}\r\nconnection: close\r\n\r\n"
    );
    let answer = net::exchange(host.listen, forged.as_bytes()).await;
    assert_eq!(net::status(&answer), "503");
    assert!(answer.ends_with("no healthy upstream"), "{answer}");
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_in_the_list_are_skipped_and_a_refused_host_is_retried_when_asked() {
    let (worker, mut requests) = net::worker(net::ok("second")).await;
    let dead = net::closed_port().await;
    let code = r#"
      (data (i32.const 2048) "x-envoy-retry-on") (data (i32.const 2080) "connect-failure")
      (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
        (call $route)
        (drop (call $set_header (i32.const 0) (i32.const 2048) (i32.const 16)
          (i32.const 2080) (i32.const 15)))
        (i32.const 0))"#;
    let list = format!("192.0.2.1:80,{dead},{worker}");
    let host = start(&module(&list, code), &[dead, worker]).await;
    let answer = net::post(host.listen, "abc").await;
    assert_eq!(net::status(&answer), "200", "{answer}");
    let request = String::from_utf8(requests.recv().await.expect("one")).expect("text");
    assert!(request.ends_with("\r\n\r\nabc"), "{request}");
    assert!(!request.contains("x-envoy"), "{request}");
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_connection_reads_as_it_does_in_envoy() {
    let dead = net::closed_port().await;
    let host = start(&module(&dead.to_string(), PASS), &[dead]).await;
    let answer = net::post(host.listen, "abc").await;
    assert_eq!(net::status(&answer), "503");
    assert!(
        answer.contains("upstream connect error or disconnect/reset before headers"),
        "{answer}"
    );
    expect_trail(&host, "6123").await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn header_bytes_pass_and_hop_by_hop_headers_do_not() {
    let mut script = net::ok("fine");
    script[0].1 =
        b"HTTP/1.1 200 OK\r\nx-back: \xff\xfe\r\nkeep-alive: 5\r\ncontent-length: 0\r\n\r\n"
            .to_vec();
    let (worker, mut requests) = net::worker(script).await;
    let host = start(&module(&worker.to_string(), PASS), &[worker]).await;
    let request = b"GET /p?q=1 HTTP/1.1\r\nHost: a.example\r\nX-T: \xff\xfe\r\nx-hop: 1\r\nConnection: close, x-hop\r\n\r\n";
    let answer = net::exchange(host.listen, request).await;
    assert_eq!(net::status(&answer), "200");
    assert!(!answer.contains("keep-alive"), "{answer}");
    let seen = requests.recv().await.expect("one");
    let has = |needle: &[u8]| seen.windows(needle.len()).any(|part| part == needle);
    assert!(has(b"GET /p?q=1 HTTP/1.1\r\n"));
    assert!(has(b"host: a.example\r\n"));
    assert!(has(b"x-t: \xff\xfe\r\n"));
    assert!(!has(b"x-hop") && !has(b"connection"));
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_stream_on_at_once() {
    let script = vec![
        (
            Duration::ZERO,
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n".to_vec(),
        ),
        (Duration::from_millis(200), b"3\r\ntwo\r\n".to_vec()),
        (Duration::from_millis(200), b"0\r\n\r\n".to_vec()),
    ];
    let (worker, _requests) = net::worker(script).await;
    let host = start(&module(&worker.to_string(), PASS), &[worker]).await;
    let answer = net::get(host.listen, "/").await;
    assert!(
        answer.ends_with("3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"),
        "{answer}"
    );
    expect_trail(&host, "666123").await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_in_the_body_never_looks_like_a_clean_end() {
    let cut = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n".to_vec();
    let (worker, _requests) = net::worker(vec![(Duration::ZERO, cut)]).await;
    let host = start(&module(&worker.to_string(), PASS), &[worker]).await;
    let answer = net::get(host.listen, "/").await;
    assert!(answer.ends_with("3\r\none\r\n"), "{answer}");
    expect_trail(&host, &format!("6{ENDED}")).await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewritten_body_with_the_old_content_length_is_not_sent() {
    let (worker, mut requests) = net::worker(net::ok("never")).await;
    let code = r#"
      (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
        (call $route) (i32.const 1))
      (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32)
        (if (i32.eqz (local.get 2)) (then (return (i32.const 1))))
        (drop (call $set_buffer (i32.const 0) (i32.const 0) (i32.const -1)
          (i32.const 1024) (i32.const 9)))
        (i32.const 0))"#;
    let host = start(&module(&worker.to_string(), code), &[worker]).await;
    let answer = net::post(host.listen, "abc").await;
    assert_eq!(net::status(&answer), "502", "{answer}");
    assert!(requests.try_recv().is_err(), "nothing may reach the worker");
    expect_trail(&host, ENDED).await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_response_is_buffered_and_flushed_whole() {
    let script = vec![
        (
            Duration::ZERO,
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n".to_vec(),
        ),
        (
            Duration::from_millis(100),
            b"3\r\ntwo\r\n0\r\n\r\n".to_vec(),
        ),
    ];
    let (worker, _requests) = net::worker(script).await;
    let code = r#"
      (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
        (call $route) (i32.const 0))
      (func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32) (i32.const 1))
      (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32)
        (call $mark (local.get 1))
        (i32.eqz (local.get 2)))"#;
    let host = start(&module(&worker.to_string(), code), &[worker]).await;
    let answer = net::get(host.listen, "/").await;
    assert!(answer.ends_with("6\r\nonetwo\r\n0\r\n\r\n"), "{answer}");
    expect_trail(&host, "366123").await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_1_0_is_served() {
    let (worker, _requests) = net::worker(net::ok("old")).await;
    let host = start(&module(&worker.to_string(), PASS), &[worker]).await;
    let answer = net::exchange(host.listen, b"GET / HTTP/1.0\r\n\r\n").await;
    assert_eq!(net::status(&answer), "200");
    assert!(answer.ends_with("old"), "{answer}");
    host.stop().await;
}
