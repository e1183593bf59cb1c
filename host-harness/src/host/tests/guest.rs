//! Guests written for one test each. They record a trail: a gauge to which every marked event appends one digit.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::super::clusters::ClusterKind;
use super::super::routes::{Route, Routes};
use super::super::steps::Counting;
use super::super::{Host, HostConfig, HostError};
use super::net;

/// Marks of the three last callbacks, in the required order.
pub const ENDED: &str = "123";

const PRELUDE: &str = r#"
  (import "env" "proxy_define_metric" (func $define (param i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_get_metric" (func $get (param i32 i32) (result i32)))
  (import "env" "proxy_record_metric" (func $record (param i32 i64) (result i32)))
  (import "env" "proxy_continue_stream" (func $continue (param i32) (result i32)))
  (import "env" "proxy_close_stream" (func $close (param i32) (result i32)))
  (import "env" "proxy_set_effective_context" (func $effective (param i32) (result i32)))
  (import "env" "proxy_send_local_response"
    (func $reply (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_http_call"
    (func $http_call (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_set_buffer_bytes"
    (func $set_buffer (param i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_replace_header_map_value"
    (func $set_header (param i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_get_header_map_value"
    (func $get_header (param i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_not_in_any_host" (func $unknown (param i32) (result i32)))
  (memory (export "memory") 64)
  (global $heap (mut i32) (i32.const 65536))
  (func (export "malloc") (param $size i32) (result i32)
    global.get $heap
    (global.set $heap (i32.add (global.get $heap) (local.get $size))))
  (data (i32.const 16) "trail")
  (data (i32.const 32) "x-gateway-destination-endpoint")
  (func $mark (param $digit i32)
    (drop (call $define (i32.const 1) (i32.const 16) (i32.const 5) (i32.const 0)))
    (drop (call $get (i32.load (i32.const 0)) (i32.const 8)))
    (drop (call $record (i32.load (i32.const 0))
      (i64.add (i64.mul (i64.load (i32.const 8)) (i64.const 10))
        (i64.extend_i32_u (local.get $digit))))))
  (func $route
    (drop (call $set_header (i32.const 0) (i32.const 32) (i32.const 30)
      (i32.const 1024) (i32.load (i32.const 1020)))))
  (func (export "proxy_on_log") (param i32) (call $mark (i32.const 1)))
  (func (export "proxy_on_done") (param i32) (result i32)
    (call $mark (i32.const 2)) (i32.const 1))
  (func (export "proxy_on_delete") (param i32) (call $mark (i32.const 3)))
"#;

/// A guest with `code` as its functions; `$route` sends a request to `destination`.
pub fn module(destination: &str, code: &str) -> Vec<u8> {
    let size = u32::try_from(destination.len()).expect("a short list");
    let size = size
        .to_le_bytes()
        .map(|byte| format!("\\{byte:02x}"))
        .concat();
    let text = format!(
        r#"(module {PRELUDE}
          (data (i32.const 1020) "{size}")
          (data (i32.const 1024) "{destination}")
          {code})"#
    );
    wat::parse_str(text).expect("the guest's text")
}

/// A host with one worker thread and this guest, in front of these members of both clusters.
pub async fn try_start(
    guest: &[u8],
    members: &[SocketAddr],
    buffer_limit: usize,
) -> Result<Host, HostError> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("pd-host-test-{}-{number}.wasm", std::process::id());
    let plugin: PathBuf = std::env::temp_dir().join(name);
    std::fs::write(&plugin, guest).expect("a temporary file");
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let clusters = ["decode", "prefill"];
    let clusters = clusters.map(|name| (name.to_owned(), ClusterKind::Static(members.to_vec())));
    let host = Host::start(HostConfig {
        listen: any,
        admin: any,
        concurrency: 1,
        plugin: plugin.clone(),
        plugin_config: Vec::new(),
        clusters: BTreeMap::from(clusters),
        routes: Routes::all(Route {
            cluster: "decode".to_owned(),
            pool: Some("test".to_owned()),
        }),
        buffer_limit,
        counting: Counting::Off,
    })
    .await;
    std::fs::remove_file(plugin).expect("the temporary file");
    host
}

/// Like [`try_start`], for guests that must start.
pub async fn start(guest: &[u8], members: &[SocketAddr]) -> Host {
    let host = try_start(guest, members, 1 << 20).await;
    host.unwrap_or_else(|error| panic!("the host starts: {error}"))
}

/// Waits until the guest's trail has this value.
pub async fn expect_trail(host: &Host, expected: &str) {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let metrics = net::get(host.admin, "/stats/prometheus").await;
        let trail = metrics
            .lines()
            .find_map(|line| line.strip_prefix("trail{} "));
        let trail = trail.unwrap_or_default().to_owned();
        if trail == expected {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "trail {trail:?}, not {expected:?}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
