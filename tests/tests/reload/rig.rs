//! Envoy with the shipped bootstrap on its own address, and a listener in a file that Envoy watches.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use pd_router_e2e::client::{self, Ask, Reply};
use pd_router_e2e::engines::{Engine, MODEL, Role, with};
use pd_router_e2e::metrics::Metrics;
use pd_router_e2e::paths;
use pd_router_e2e::process::unique_name;
use pd_router_e2e::threads;
use pd_router_e2e::wait::{GENEROUS, eventually};
use pd_router_e2e::worker_document::own_loopback;
use serde_json::{Value, json};

/// As in the shipped bootstrap.
const LISTEN: u16 = 8080;
const ADMIN: u16 = 9901;
const PREFILL: [u16; 2] = [9101, 9102];
const DECODE: [u16; 2] = [9201, 9202];

/// Drain time of the old listener, longer than any stream of the tests.
const DRAIN_SECONDS: &str = "120";

/// Envoy, four engines, and the files that give Envoy a new configuration.
pub struct Rig {
    /// Address for clients.
    pub gateway: SocketAddr,
    /// `p0` and `p1`.
    pub prefill: Vec<Engine>,
    /// `d0` and `d1`.
    pub decode: Vec<Engine>,
    admin: SocketAddr,
    threads: u16,
    files: Files,
    log: PathBuf,
    _envoy: Envoy,
}

impl Rig {
    /// Envoy with this many threads over engines with these options; the pool has these further fields.
    pub async fn start(threads: u16, options: &[&str], pool: Value) -> Rig {
        let own = own_loopback();
        let prefill = engines(own, Role::Prefill, PREFILL, options).await;
        let decode = engines(own, Role::Decode, DECODE, options).await;
        let files = Files::write(own);
        let log = paths::logs().join(format!("{}.log", unique_name("envoy")));
        let mut rig = Rig {
            gateway: SocketAddr::from((own, LISTEN)),
            admin: SocketAddr::from((own, ADMIN)),
            threads,
            prefill,
            decode,
            _envoy: Envoy::none(),
            files,
            log,
        };
        rig.files.publish(&rig.configuration(pool).to_string());
        rig._envoy = Envoy::start(&rig.files, threads, &rig.log);
        rig.until_answers(|reply| reply.status == 200).await;
        rig
    }

    /// A configuration whose one pool has these engines and these further fields.
    pub fn configuration(&self, pool: Value) -> Value {
        let workers = [("p", &self.prefill), ("d", &self.decode)];
        let workers = workers.into_iter().flat_map(|(letter, engines)| {
            engines.iter().enumerate().map(move |(at, engine)| {
                let name = json!({"name": format!("{letter}{at}"), "model": MODEL});
                with(engine.listed(), name)
            })
        });
        let workers: Vec<Value> = workers.collect();
        let base = json!({
            "name": "default",
            "protocol": "nixl",
            "discovery": {"static": {"workers": workers}},
        });
        json!({"pools": [with(base, pool)], "response_headers": true, "status": true})
    }

    /// Publishes this configuration, as text, without waiting.
    pub fn publish(&self, configuration: &str) {
        self.files.publish(configuration);
    }

    /// Publishes this configuration in a listener that Envoy refuses for another reason, after the filter has accepted it,
    /// and waits for the refusal.
    pub async fn publish_in_vain(&self, configuration: &Value) {
        const REFUSED: &str = "envoy_listener_manager_lds_update_rejected";
        let refused = self.metric(REFUSED).await;
        self.files
            .publish_with(&configuration.to_string(), |listener| {
                let router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
                let (before, after) = cut(listener, router);
                let wrong = "\n              strict_check_headers: [no-such-header]";
                let (rest, after) = cut(after, "\n");
                format!("{before}{router}{rest}{wrong}\n{after}")
            });
        self.until_metric(REFUSED, refused + 1.0).await;
    }

    /// Publishes this configuration and waits until it is in use; a further worker, whose model no request names, marks it.
    pub async fn reconfigure(&self, configuration: Value) {
        let name = unique_name("marker");
        let configuration = marked(configuration, &name);
        self.publish(&configuration.to_string());
        eventually("the new configuration is in use", GENEROUS, || async {
            // One that met a thread with the old configuration would say so.
            for _ in 0..self.enough_connections() {
                let page = client::try_send(self.gateway, Ask::get("/pd-router/status")).await;
                let page = page.map_err(|failure| failure.to_string())?;
                if !page.text().contains(&name) {
                    return Err(page.text().into_owned());
                }
            }
            Ok(())
        })
        .await;
    }

    /// Number of new connections that meet all threads.
    pub fn enough_connections(&self) -> usize {
        threads::enough(self.threads.into())
    }

    /// The pool on the status page.
    pub async fn pool(&self) -> Value {
        let page = client::send(self.gateway, Ask::get("/pd-router/status")).await;
        page.expect(200).json()["pools"][0].take()
    }

    /// Sends a short request over a connection of its own.
    pub async fn send(&self, ask: Ask) -> Reply {
        client::send(self.gateway, ask).await
    }

    /// Waits until a short request gets this status.
    pub async fn until_answers(&self, so: impl Fn(&Reply) -> bool) {
        eventually("a request is answered so", GENEROUS, || async {
            let reply = client::try_send(self.gateway, Ask::chat("hello")).await;
            let reply = reply.map_err(|failure| failure.to_string())?;
            match so(&reply) {
                true => Ok(()),
                false => Err(format!("{reply:?}")),
            }
        })
        .await;
    }

    /// A metric's value; 0 if absent.
    pub async fn metric(&self, name: &str) -> f64 {
        let page = client::send(self.admin, Ask::get("/stats/prometheus")).await;
        let metrics = Metrics::parse(&page.expect(200).text());
        metrics.sum(name).unwrap_or_default()
    }

    /// Waits until a metric has this value.
    pub async fn until_metric(&self, name: &str, wanted: f64) {
        eventually(name, GENEROUS, || async {
            let seen = self.metric(name).await;
            match seen == wanted {
                true => Ok(()),
                false => Err(format!("{seen}, not {wanted}")),
            }
        })
        .await;
    }

    /// Waits until this many streams are open and booked to decode.
    pub async fn until_streams_are(&self, count: f64) {
        self.until_metric("pd_router_streams", count).await;
        self.until_metric("pd_router_decode_charges", count).await;
    }

    /// Waits until nothing is open, booked or waiting.
    pub async fn comes_to_rest(&self) {
        self.until_streams_are(0.0).await;
        self.until_metric("pd_router_prefill_charges", 0.0).await;
        self.until_metric("pd_router_queue_requests", 0.0).await;
    }

    /// Envoy's log.
    pub fn log(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The configuration with a further worker of this name.
pub fn marked(mut configuration: Value, name: &str) -> Value {
    let workers = &mut configuration["pools"][0]["discovery"]["static"]["workers"];
    let Some(workers) = workers.as_array_mut() else {
        panic!("the workers are no list: {workers}");
    };
    workers.push(json!({
        "address": "192.0.2.1:9",
        "role": "decode",
        "model": name,
        "name": name,
    }));
    configuration
}

async fn engines(own: Ipv4Addr, role: Role, ports: [u16; 2], options: &[&str]) -> Vec<Engine> {
    let mut engines = Vec::new();
    for port in ports {
        let at = SocketAddr::from((own, port));
        engines.push(Engine::start_at(at, role, options).await);
    }
    engines
}

struct Files {
    folder: PathBuf,
    // Before and after the plugin's configuration.
    listener: (String, String),
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
        let listener = listener.replacen(
            "  - name: gateway",
            "  - \"@type\": type.googleapis.com/envoy.config.listener.v3.Listener\n    name: gateway",
            1,
        );
        let (head, rest) = cut(&listener, "value: |\n");
        let next_filter = "          - name: envoy.filters.http.router";
        let (_, tail) = cut(rest, next_filter);
        let files = Files {
            listener: (
                format!("resources:\n{head}value: "),
                format!("\n{next_filter}{tail}"),
            ),
            folder,
        };
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

    /// Writes the listener with this configuration of the plugin; Envoy notices that a file is replaced.
    fn publish(&self, configuration: &str) {
        self.publish_with(configuration, str::to_owned);
    }

    /// The same with a change to the listener.
    fn publish_with(&self, configuration: &str, change: impl FnOnce(&str) -> String) {
        let next = self.at("next.yaml");
        let (head, tail) = &self.listener;
        // In YAML a quote within quotes is doubled; all else is unchanged.
        let quoted = configuration.replace('\'', "''");
        write(&next, &format!("{head}'{quoted}'{}", change(tail)));
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

/// A separate Envoy, ended with the test.
struct Envoy(Option<Child>);

impl Envoy {
    fn none() -> Envoy {
        Envoy(None)
    }

    fn start(files: &Files, threads: u16, log: &Path) -> Envoy {
        let log = fs::File::create(log);
        let log = log.unwrap_or_else(|error| panic!("no log: {error}"));
        let child = Command::new(paths::envoy())
            .arg("-c")
            .arg(files.at("bootstrap.yaml"))
            .args(["--concurrency", &threads.to_string()])
            .args(["--use-dynamic-base-id", "--drain-time-s", DRAIN_SECONDS])
            .stdin(Stdio::null())
            .stderr(log)
            .spawn();
        Envoy(Some(child.unwrap_or_else(|error| {
            panic!("Envoy does not start: {error}")
        })))
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
