//! A new configuration of the filter, given to a running Envoy: streams that flow go on, and stay booked until they end.
#![forbid(unsafe_code)]

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use pd_router_e2e::client::{self, Ask, chat_body};
use pd_router_e2e::engines::{Engine, Role, with};
use pd_router_e2e::metrics::Metrics;
use pd_router_e2e::paths;
use pd_router_e2e::process::unique_name;
use pd_router_e2e::raw::{self, Raw};
use pd_router_e2e::roster::own_loopback;
use pd_router_e2e::wait::{GENEROUS, eventually, judged};
use serde_json::json;

/// As in the bootstrap that is shipped.
const LISTEN: u16 = 8080;
const ADMIN: u16 = 9901;
const PREFILL: [u16; 2] = [9101, 9102];
const DECODE: [u16; 2] = [9201, 9202];

/// Tokens of the stream that flows meanwhile, and milliseconds between two of them.
const TOKENS: u64 = 60;
const TOKEN_MS: u64 = 150;

/// The shipped bootstrap on an address of the test's own, its listener in a file that Envoy watches.
struct Files {
    folder: PathBuf,
    listener: String,
}

impl Files {
    fn write(own: Ipv4Addr) -> Files {
        let shipped = fs::read_to_string(paths::bootstrap());
        let shipped = shipped.unwrap_or_else(|error| panic!("no bootstrap: {error}"));
        let plugin = paths::plugin().display().to_string();
        let shipped = shipped
            .replace("127.0.0.1", &own.to_string())
            .replace("target/pd_router.wasm", &plugin);
        let (before, rest) = cut(&shipped, "  listeners:\n");
        let (listener, after) = cut(rest, "  clusters:\n");
        let folder = paths::scratch().join(unique_name("reload"));
        fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("no folder: {error}"));
        let files = Files {
            listener: format!(
                "resources:\n{}",
                listener.replacen(
                    "  - name: gateway",
                    "  - \"@type\": type.googleapis.com/envoy.config.listener.v3.Listener\n    name: gateway",
                    1
                )
            ),
            folder,
        };
        files.publish(|listener| listener);
        let watched = files.at("listener.yaml");
        let dynamic = format!(
            "node: {{ id: gateway, cluster: gateway }}\ndynamic_resources:\n  lds_config:\n    path_config_source: {{ path: \"{}\" }}\n",
            watched.display()
        );
        let bootstrap = format!("{dynamic}{before}  clusters:\n{after}");
        write(&files.at("bootstrap.yaml"), &bootstrap);
        files
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Gives the listener, with this change, to Envoy, which notices that a file takes another's place.
    fn publish(&self, change: impl Fn(String) -> String) {
        let next = self.at("next.yaml");
        write(&next, &change(self.listener.clone()));
        let moved = fs::rename(&next, self.at("listener.yaml"));
        moved.unwrap_or_else(|error| panic!("cannot move {}: {error}", next.display()));
    }
}

fn write(path: &Path, text: &str) {
    fs::write(path, text)
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}

#[track_caller]
fn cut<'a>(text: &'a str, at: &str) -> (&'a str, &'a str) {
    text.split_once(at)
        .unwrap_or_else(|| panic!("the bootstrap has no {at:?}"))
}

/// Envoy by itself, ended with the test.
struct Envoy(Child);

impl Envoy {
    fn start(files: &Files) -> Envoy {
        let log = fs::File::create(paths::logs().join("reload-envoy.log"));
        let log = log.unwrap_or_else(|error| panic!("no log: {error}"));
        let child = Command::new(paths::envoy())
            .arg("-c")
            .arg(files.at("bootstrap.yaml"))
            .args(["--concurrency", "2", "--use-dynamic-base-id"])
            .args(["--drain-time-s", "60"])
            .stdin(Stdio::null())
            .stderr(log)
            .spawn();
        Envoy(child.unwrap_or_else(|error| panic!("Envoy does not start: {error}")))
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn streams(admin: SocketAddr) -> (f64, f64) {
    let page = client::send(admin, Ask::get("/stats/prometheus"))
        .await
        .expect(200);
    let metrics = Metrics::parse(&page.text());
    let value = |name| metrics.sum(name).unwrap_or_default();
    (
        value("pd_router_streams"),
        value("pd_router_decode_charges"),
    )
}

async fn until_streams_are(admin: SocketAddr, wanted: (f64, f64)) {
    eventually("streams and bookings", GENEROUS, || async {
        let seen = streams(admin).await;
        if seen == wanted {
            return Ok(());
        }
        Err(format!("{seen:?}, not {wanted:?}"))
    })
    .await;
}

async fn start_engines(own: Ipv4Addr) -> Vec<Engine> {
    let prefill = PREFILL.map(|port| (port, Role::Prefill));
    let decode = DECODE.map(|port| (port, Role::Decode));
    let mut engines = Vec::new();
    for (port, role) in prefill.into_iter().chain(decode) {
        let at = SocketAddr::from((own, port));
        engines.push(Engine::start_at(at, role, &["--speedup", "50"]).await);
    }
    engines
}

async fn reloads() {
    let own = own_loopback();
    let engines = start_engines(own).await;
    let files = Files::write(own);
    let _envoy = Envoy::start(&files);
    let (gateway, admin) = (
        SocketAddr::from((own, LISTEN)),
        SocketAddr::from((own, ADMIN)),
    );
    eventually("a request is answered", GENEROUS, || async {
        let reply = client::try_send(gateway, Ask::chat("hello")).await;
        let reply = reply.map_err(|failure| failure.to_string())?;
        match reply.status {
            200 => Ok(()),
            status => Err(format!("{status}: {}", reply.text())),
        }
    })
    .await;

    for engine in engines.iter().filter(|engine| engine.role == Role::Decode) {
        let slowly = json!({"kind": "slow_drip", "ms": TOKEN_MS, "times": 1});
        engine.fault(&slowly).await;
    }
    let body = with(
        chat_body("a long story"),
        json!({"max_tokens": TOKENS, "stream": true}),
    );
    let request = raw::post("/v1/chat/completions", &[], body.to_string().as_bytes());
    let mut reader = Raw::connect(gateway).await;
    reader.write(&request).await;
    reader.read_until("data:", 3).await;
    until_streams_are(admin, (1.0, 1.0)).await;

    // The new filter names its workers; the old one does not.
    files.publish(|listener| {
        listener.replacen(
            "\"pools\": [{",
            "\"response_headers\": true, \"pools\": [{",
            1,
        )
    });
    eventually("the new configuration is in use", GENEROUS, || async {
        let reply = client::try_send(gateway, Ask::chat("hello")).await;
        let reply = reply.map_err(|failure| failure.to_string())?.expect(200);
        match reply.header("x-pd-router-decode") {
            Some(_) => Ok(()),
            None => Err(format!("{:?}", reply.headers)),
        }
    })
    .await;
    // Those just answered are through; the stream of before is still booked.
    until_streams_are(admin, (1.0, 1.0)).await;

    let reply = reader.read_reply().await;
    reply.expect_tokens(TOKENS);
    until_streams_are(admin, (0.0, 0.0)).await;
    client::send(gateway, Ask::chat("hello"))
        .await
        .expect_tokens(4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_configuration_ends_no_stream_and_forgets_no_booking() {
    judged("reload", reloads()).await;
}
