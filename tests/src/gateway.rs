//! Owns a gateway: `pd-harness run` with one of the two hosts and a configuration of the test.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use serde::Deserialize;
use serde_json::Value;

use crate::Proxy;
use crate::client::{self, Ask, Failure, Reply};
use crate::engines::Fleet;
use crate::metrics::Metrics;
use crate::paths;
use crate::process::{Process, StartFailure, unique_name};
use crate::threads;
use crate::wait::{GENEROUS, eventually};

/// Parts of a gateway, where the defaults do not fit.
#[derive(Clone, Debug)]
pub struct GatewayParts {
    /// Worker threads. Default 2: nothing is correct that is correct only with one.
    pub threads: u16,
    /// The plugin.
    pub plugin: PathBuf,
    /// Envoy's bootstrap.
    pub bootstrap: PathBuf,
}

impl GatewayParts {
    /// As shipped, with this many worker threads.
    pub fn on_threads(threads: u16) -> GatewayParts {
        GatewayParts {
            threads,
            plugin: paths::plugin(),
            bootstrap: paths::bootstrap(),
        }
    }
}

#[derive(Deserialize)]
struct Ready {
    ready: bool,
    proxy: String,
    listen: SocketAddr,
    admin: SocketAddr,
    // Only of a simulated fleet.
    #[serde(default)]
    engines: Vec<SimulatedEngine>,
}

/// An engine that the gateway's own process simulates.
#[derive(Clone, Debug, Deserialize)]
pub struct SimulatedEngine {
    /// Role, as the configuration spells it.
    pub role: String,
    /// Address of the engine.
    pub address: SocketAddr,
}

/// A running gateway.
pub struct Gateway {
    /// Address for clients.
    pub listen: SocketAddr,
    /// Address of metrics and readiness.
    pub admin: SocketAddr,
    /// The simulated engines, if requested.
    pub engines: Vec<SimulatedEngine>,
    threads: u16,
    process: Process,
}

impl Gateway {
    /// Starts a gateway in front of `fleet` and waits until it can route.
    pub async fn over(proxy: Proxy, fleet: &Fleet) -> Gateway {
        Gateway::start(proxy, &fleet.config(), &[]).await
    }

    /// Starts a gateway with this configuration and these further arguments. Fails if the gateway does not become ready.
    pub async fn start(proxy: Proxy, config: &Value, arguments: &[&str]) -> Gateway {
        Gateway::try_start(proxy, config, arguments)
            .await
            .unwrap_or_else(|failure| failure.fail("the gateway"))
    }

    /// Starts a gateway with this configuration and these further arguments.
    ///
    /// # Errors
    /// With the exit status and the log.
    pub async fn try_start(
        proxy: Proxy,
        config: &Value,
        arguments: &[&str],
    ) -> Result<Gateway, StartFailure> {
        Gateway::start_with(proxy, 2, config, arguments).await
    }

    /// The same with this many worker threads. [`GatewayBuilder`](crate::gateway_builder::GatewayBuilder) writes the arguments.
    ///
    /// # Errors
    /// With the exit status and the log.
    pub async fn start_with(
        proxy: Proxy,
        threads: u16,
        config: &Value,
        arguments: &[&str],
    ) -> Result<Gateway, StartFailure> {
        let command = configured(proxy, &GatewayParts::on_threads(threads), config, arguments);
        Gateway::launch(proxy, threads, command).await
    }

    /// The same as [`Gateway::start`] with other parts.
    pub async fn build(
        proxy: Proxy,
        build: &GatewayParts,
        config: &Value,
        arguments: &[&str],
    ) -> Gateway {
        let command = configured(proxy, build, config, arguments);
        Gateway::launch(proxy, build.threads, command)
            .await
            .unwrap_or_else(|failure| failure.fail("the gateway"))
    }

    /// The same as [`Gateway::start`] with one worker thread.
    pub async fn start_on_one_thread(proxy: Proxy, config: &Value, arguments: &[&str]) -> Gateway {
        Gateway::build(proxy, &GatewayParts::on_threads(1), config, arguments).await
    }

    /// Starts a gateway with a simulated fleet of this size, such as `2x2`, and no configuration.
    pub async fn simulated(proxy: Proxy, size: &str) -> Gateway {
        let build = GatewayParts::on_threads(2);
        let mut command = basic(proxy, &build);
        command.args(["--simulate", size]);
        Gateway::launch(proxy, build.threads, command)
            .await
            .unwrap_or_else(|failure| failure.fail("the gateway"))
    }

    async fn launch(proxy: Proxy, threads: u16, command: Command) -> Result<Gateway, StartFailure> {
        let (process, ready) = Process::start::<Ready>(command, "gateway").await?;
        assert!(
            ready.ready && ready.proxy == proxy.as_str(),
            "not the gateway that was asked for"
        );
        Ok(Gateway {
            listen: ready.listen,
            admin: ready.admin,
            engines: ready.engines,
            threads,
            process,
        })
    }

    /// A gateway that was started by other means, and serves.
    pub(crate) fn running(
        (listen, admin): (SocketAddr, SocketAddr),
        threads: u16,
        process: Process,
    ) -> Gateway {
        Gateway {
            listen,
            admin,
            engines: Vec::new(),
            threads,
            process,
        }
    }

    /// The gateway's process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Number of new connections that meet all threads.
    pub fn enough_connections(&self) -> usize {
        threads::enough(self.threads.into())
    }

    /// Sends one request over its own connection; fails without an answer.
    pub async fn send(&self, ask: Ask) -> Reply {
        client::send(self.listen, ask).await
    }

    /// Sends one request over its own connection.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn try_send(&self, ask: Ask) -> Result<Reply, Failure> {
        client::try_send(self.listen, ask).await
    }

    /// The current metrics page.
    pub async fn metrics(&self) -> Metrics {
        let reply = client::send(self.admin, Ask::get("/stats/prometheus")).await;
        Metrics::parse(&reply.expect(200).text())
    }

    /// The first pool on the status page of one thread.
    pub async fn status(&self) -> Value {
        self.whole_status().await["pools"][0].take()
    }

    /// The status page of one thread.
    pub async fn whole_status(&self) -> Value {
        let page = self.send(Ask::get("/pd-router/status")).await;
        page.expect(200).json()
    }

    /// Fails if the process is gone or a usual request gets no answer.
    pub async fn assert_serves(&mut self) {
        assert!(self.process.is_running(), "the gateway is gone");
        self.send(Ask::chat("are you there?")).await.expect(200);
    }

    /// Ids of the process and its children.
    pub fn processes(&self) -> Vec<u32> {
        self.process.family()
    }

    /// Fails if the processes are no longer the same, or the plugin died in one of them.
    pub fn assert_never_restarted(&mut self, before: &[u32]) {
        assert!(self.process.is_running(), "the gateway is gone");
        assert_eq!(self.processes(), before, "the gateway's processes");
        let log = self.process.log();
        assert!(!log.contains("panicked"), "the plugin died: {log}");
    }

    /// Waits until a chat request is answered.
    pub async fn answers(&self) -> Reply {
        eventually("a request is answered", GENEROUS, || async {
            let reply = self.try_send(Ask::chat("hello")).await;
            let reply = reply.map_err(|failure| failure.to_string())?;
            if reply.status == 200 {
                return Ok(reply);
            }
            Err(format!("{}: {}", reply.status, reply.text()))
        })
        .await
    }

    /// Waits until all threads report readiness.
    pub async fn is_ready(&self) {
        self.says(200).await;
    }

    /// Waits until no thread reports readiness.
    pub async fn is_not_ready(&self) {
        self.says(503).await;
    }

    async fn says(&self, status: u16) {
        eventually(&format!("readiness is {status}"), GENEROUS, || async {
            // One connection reaches one thread.
            for _ in 0..self.enough_connections() {
                let ready = self.try_send(Ask::get("/pd-router/ready")).await;
                let ready = ready.map_err(|failure| failure.to_string())?;
                if ready.status != status {
                    return Err(format!("{}: {}", ready.status, ready.text()));
                }
            }
            Ok(())
        })
        .await;
    }

    /// Waits until no booking and no stream is open.
    pub async fn assert_comes_to_rest(&self) {
        eventually("every charge is released", GENEROUS, || async {
            let metrics = self.metrics().await;
            let open = [
                "pd_router_prefill_charges",
                "pd_router_decode_charges",
                "pd_router_streams",
            ]
            .map(|name| (name, metrics.expect(name)));
            if open.iter().any(|(_, value)| *value != 0.0) {
                return Err(format!("{open:?}"));
            }
            Ok(())
        })
        .await;
    }
}

/// The worker of this name on the status page; null if absent.
pub fn worker(status: &Value, name: &str) -> Value {
    let workers = status["workers"].as_array().cloned().unwrap_or_default();
    let found = workers.into_iter().find(|worker| worker["name"] == name);
    found.unwrap_or_default()
}

/// What is booked on the workers of a pool of the status page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Booked {
    /// Prefills.
    pub prefills: u64,
    /// Answers.
    pub decodes: u64,
}

impl Booked {
    /// By the thread of this page.
    pub fn here(pool: &Value) -> Booked {
        Booked::in_field(pool, "bookings")
    }

    /// By all other threads, as far as the thread of this page knows.
    pub fn elsewhere(pool: &Value) -> Booked {
        Booked::in_field(pool, "bookings_elsewhere")
    }

    /// By all threads, as far as the thread of this page knows.
    pub fn anywhere(pool: &Value) -> Booked {
        let (here, elsewhere) = (Booked::here(pool), Booked::elsewhere(pool));
        Booked {
            prefills: here.prefills + elsewhere.prefills,
            decodes: here.decodes + elsewhere.decodes,
        }
    }

    fn in_field(pool: &Value, field: &str) -> Booked {
        let workers = pool["workers"].as_array();
        let workers = workers.unwrap_or_else(|| panic!("no workers in {pool}"));
        let sum = |of: &str| {
            let counts = workers.iter().map(|worker| worker[field][of].as_u64());
            let sum = counts.sum::<Option<u64>>();
            sum.unwrap_or_else(|| panic!("a worker without {field} of {of} in {pool}"))
        };
        Booked {
            prefills: sum("prefills"),
            decodes: sum("decodes"),
        }
    }
}

/// The command line that all gateways share.
fn basic(proxy: Proxy, build: &GatewayParts) -> Command {
    let mut command = Command::new(paths::harness());
    command
        .args(["run", "--proxy", proxy.as_str()])
        .args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .args(["--concurrency", &build.threads.to_string()])
        .args(["--json", "--until-stdin-closes"]);
    name_parts(&mut command, proxy, build);
    command
}

/// Adds the paths of a usual gateway's files to the command.
pub fn name_files(command: &mut Command, proxy: Proxy) {
    name_parts(command, proxy, &GatewayParts::on_threads(2));
}

fn name_parts(command: &mut Command, proxy: Proxy, build: &GatewayParts) {
    command.arg("--plugin").arg(&build.plugin);
    if proxy == Proxy::Envoy {
        command
            .arg("--envoy")
            .arg(paths::envoy())
            .arg("--bootstrap")
            .arg(&build.bootstrap);
    }
}

fn configured(proxy: Proxy, build: &GatewayParts, config: &Value, arguments: &[&str]) -> Command {
    let file = paths::scratch().join(format!("{}.json", unique_name("config")));
    std::fs::write(&file, config.to_string())
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    let mut command = basic(proxy, build);
    command.arg("--config").arg(file).args(arguments);
    command
}
