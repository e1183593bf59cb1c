//! Tests of the life of a stream and of its VM: pauses, replies, ends, traps.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::super::HostError;
use super::super::maps::Headers;
use super::super::vm::StartError;
use super::guest::{ENDED, expect_trail, module, start, try_start};
use super::net;

/// Sends every request to the destination at once.
const PASS: &str = r#"
  (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
    (call $route) (i32.const 0))"#;

/// Holds headers and body until the end, then makes a call and continues after its answer.
const CALL_FIRST: &str = r#"
  (global $stream (mut i32) (i32.const 0))
  (data (i32.const 2048) "prefill")
  (data (i32.const 4096) "@CALL@")
  (func $dispatch (param $stream i32)
    (global.set $stream (local.get $stream))
    (if (call $http_call (i32.const 2048) (i32.const 7) (i32.const 4096) (i32.const @SIZE@)
          (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 5000) (i32.const 12))
      (then unreachable)))
  (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
    (call $route)
    (if (local.get 2) (then (call $dispatch (local.get 0))))
    (i32.const 1))
  (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32)
    (if (local.get 2) (then (call $dispatch (local.get 0))))
    (i32.const 1))
  (func (export "proxy_on_http_call_response") (param i32 i32 i32 i32 i32)
    (if (i32.eqz (local.get 2)) (then (call $mark (i32.const 9))))
    (call $mark (i32.const 5))
    (if (i32.eqz (call $effective (global.get $stream)))
      (then (drop (call $continue (i32.const 0))))))"#;

fn call_first(destination: &str) -> Vec<u8> {
    let headers: Headers = [
        (":method", "POST"),
        (":path", "/call"),
        (":authority", "prefill"),
        ("x-gateway-destination-endpoint", destination),
    ]
    .into_iter()
    .collect();
    let bytes = headers.serialize();
    let escaped: String = bytes.iter().map(|byte| format!("\\{byte:02x}")).collect();
    let code = CALL_FIRST
        .replace("@CALL@", &escaped)
        .replace("@SIZE@", &bytes.len().to_string());
    module(destination, &code)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_request_goes_on_when_the_call_is_answered() {
    let (worker, mut requests) = net::worker(net::ok("hello")).await;
    let host = start(&call_first(&worker.to_string()), &[worker]).await;
    let answer = net::post(host.listen, "abc").await;
    assert_eq!(net::status(&answer), "200");
    assert!(answer.ends_with("hello"), "{answer}");
    let call = String::from_utf8(requests.recv().await.expect("the call")).expect("text");
    assert!(call.starts_with("POST /call HTTP/1.1\r\n"), "{call}");
    assert!(!call.contains("x-gateway"), "{call}");
    let routed = String::from_utf8(requests.recv().await.expect("the request")).expect("text");
    assert!(routed.starts_with("POST /v1 HTTP/1.1\r\n"), "{routed}");
    assert!(routed.ends_with("\r\n\r\nabc"), "{routed}");
    assert!(routed.contains("\r\nx-request-id: "), "{routed}");
    expect_trail(&host, "5123").await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_outlives_its_client() {
    let mut script = net::ok("late");
    script[0].0 = Duration::from_millis(300);
    let (worker, mut requests) = net::worker(script).await;
    let host = start(&call_first(&worker.to_string()), &[worker]).await;
    let mut client = TcpStream::connect(host.listen).await.expect("listens");
    client
        .write_all(&net::post_bytes("abc"))
        .await
        .expect("sent");
    requests.recv().await.expect("the call");
    drop(client);
    expect_trail(&host, ENDED).await;
    expect_trail(&host, "1235").await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_breaks_off_after_its_headers_has_none() {
    let cut = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf".to_vec();
    let (worker, _requests) = net::worker(vec![(Duration::ZERO, cut)]).await;
    let host = start(&call_first(&worker.to_string()), &[worker]).await;
    let _ = net::post(host.listen, "abc").await;
    expect_trail(&host, "95123").await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_at_the_limit_is_refused_and_the_stream_ends_once() {
    let guest = module(
        "",
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 1))
           (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32) (i32.const 1))"#,
    );
    let host = try_start(&guest, &[], 1000).await.expect("starts");
    let head =
        b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";
    let mut request = head.to_vec();
    for _ in 0..3 {
        request.extend_from_slice(b"190\r\n");
        request.extend_from_slice(&[b'x'; 400]);
        request.extend_from_slice(b"\r\n");
    }
    let answer = net::exchange(host.listen, &request).await;
    assert_eq!(net::status(&answer), "413", "{answer}");
    assert!(answer.ends_with("Payload Too Large"), "{answer}");
    expect_trail(&host, ENDED).await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plugins_own_reply_runs_through_its_response_callbacks() {
    let guest = module(
        "",
        r#"(data (i32.const 2048) "teapot")
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (drop (call $reply (i32.const 418) (i32.const 0) (i32.const 0)
               (i32.const 2048) (i32.const 6) (i32.const 0) (i32.const 0) (i32.const -1)))
             (call $mark (i32.const 7))
             (i32.const 0))
           (func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32)
             (call $mark (i32.const 8)) (i32.const 0))
           (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32)
             (call $mark (i32.const 9)) (i32.const 0))"#,
    );
    let host = start(&guest, &[]).await;
    let answer = net::get(host.listen, "/").await;
    assert_eq!(net::status(&answer), "418");
    assert!(answer.ends_with("teapot"), "{answer}");
    assert!(answer.contains("content-type: text/plain\r\n"), "{answer}");
    expect_trail(&host, "789123").await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_a_paused_stream() {
    let guest = module(
        "",
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (call $mark (i32.const 7)) (i32.const 1))"#,
    );
    let host = start(&guest, &[]).await;
    let mut client = TcpStream::connect(host.listen).await.expect("listens");
    client
        .write_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        .await
        .expect("sent");
    expect_trail(&host, "7").await;
    drop(client);
    expect_trail(&host, "7123").await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_while_the_worker_thinks_ends_the_stream() {
    let mut script = net::ok("never read");
    script[0].0 = Duration::from_secs(30);
    let (worker, mut requests) = net::worker(script).await;
    let host = start(&module(&worker.to_string(), PASS), &[worker]).await;
    let mut client = TcpStream::connect(host.listen).await.expect("listens");
    client
        .write_all(&net::post_bytes("abc"))
        .await
        .expect("sent");
    requests.recv().await.expect("the request");
    drop(client);
    expect_trail(&host, ENDED).await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trap_costs_one_answer_and_the_vm_comes_back() {
    let (worker, _requests) = net::worker(net::ok("fine")).await;
    let guest = module(
        &worker.to_string(),
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (call $route)
             (if (i32.eqz (local.get 2)) (then unreachable))
             (call $mark (i32.const 4))
             (i32.const 0))"#,
    );
    let host = start(&guest, &[worker]).await;
    assert_eq!(net::status(&net::get(host.listen, "/").await), "200");
    assert_eq!(net::status(&net::post(host.listen, "abc").await), "503");
    assert_eq!(net::status(&net::get(host.listen, "/").await), "503");
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(net::status(&net::get(host.listen, "/").await), "200");
    expect_trail(&host, "41234123").await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trap_resets_the_other_streams_of_the_thread() {
    let guest = module(
        "",
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (if (i32.eqz (local.get 2)) (then unreachable))
             (call $mark (i32.const 4))
             (i32.const 1))"#,
    );
    let host = start(&guest, &[]).await;
    let paused = tokio::spawn(net::get_owned(host.listen));
    expect_trail(&host, "4").await;
    assert_eq!(net::status(&net::post(host.listen, "abc").await), "503");
    assert_eq!(
        paused.await.expect("no panic"),
        "",
        "closed without an answer"
    );
    // A VM that has ended gets no more callbacks.
    expect_trail(&host, "4").await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_in_one_piece_is_refused_before_the_plugin_sees_its_end() {
    let guest = module(
        "",
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 1))
           (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32)
             (if (local.get 2) (then (call $mark (i32.const 9))))
             (i32.const 1))"#,
    );
    let host = try_start(&guest, &[], 1000).await.expect("starts");
    let answer = net::post(host.listen, &"x".repeat(1000)).await;
    assert_eq!(net::status(&answer), "413", "{answer}");
    expect_trail(&host, ENDED).await;
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_configuration_stops_the_start() {
    let guest = module(
        "",
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32) (i32.const 0))"#,
    );
    let refused = try_start(&guest, &[], 1000).await;
    let refused = refused.err().expect("no host");
    assert!(
        matches!(refused, HostError::Plugin(StartError::Refused)),
        "{refused}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_ends_every_thread_with_streams_in_flight() {
    let guest = module(
        "",
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (call $mark (i32.const 7)) (i32.const 1))"#,
    );
    let host = start(&guest, &[]).await;
    let mut client = TcpStream::connect(host.listen).await.expect("listens");
    client
        .write_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        .await
        .expect("sent");
    expect_trail(&host, "7").await;
    let stopping = tokio::time::timeout(Duration::from_secs(2), host.stop());
    stopping.await.expect("all threads end");
}
