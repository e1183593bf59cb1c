//! Owns a child process that is Envoy: start, addresses, log, end.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use pd_harness_common::supervised;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::ChildStderr;
use tokio::task::JoinHandle;

use super::bootstrap::{self, BootstrapError, Settings};
use super::forwarder::Forwarder;
use super::gateway::Addresses;
use super::supervised::Supervised;
use crate::host::clusters::ClusterKind;
use crate::http;

/// Envoy takes a second or two to compile the filter; much longer on a loaded machine.
const START_LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Lines of Envoy's log that are repeated when it dies.
const LAST_WORDS: usize = 6;
/// The position of the level is fixed for `error_in`.
const LOG_FORMAT: &str = "[%Y-%m-%d %T.%e] [envoy] [%l] %v";

/// The part of Envoy's log that goes to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnvoyLog {
    /// All of it.
    Everything,
    /// Only errors.
    Errors,
}

/// Configuration of an Envoy process.
pub struct EnvoyConfig<'a> {
    /// Envoy's binary.
    pub binary: &'a Path,
    /// The bootstrap to fill in.
    pub template: &'a str,
    /// Worker threads.
    pub concurrency: u16,
    /// The part of its log that is passed on.
    pub log: EnvoyLog,
    /// Values to fill in.
    pub settings: Settings<'a>,
    /// Further changes to the filled-in bootstrap.
    pub amend: fn(&mut Value),
}

/// Why Envoy does not run.
#[derive(Debug, thiserror::Error)]
pub enum EnvoyError {
    /// The bootstrap could not be filled in.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// Files or processes could not be created.
    #[error("Envoy could not be started: {0}")]
    Io(#[from] io::Error),
    /// Envoy ended by itself.
    #[error("Envoy ended ({status}){}", .last_words.iter().map(|line| format!("\n  {line}")).collect::<String>())]
    Ended {
        /// Its exit status.
        status: ExitStatus,
        /// The last errors in its log; if there are none, the last lines.
        last_words: Vec<String>,
    },
    /// Envoy runs, but does not become ready.
    #[error("Envoy was not ready after {} s", START_LIMIT.as_secs())]
    NotReady,
}

/// A running Envoy.
pub struct Envoy {
    /// Addresses on which Envoy listens.
    pub addresses: Addresses,
    process: Process,
    _admin: Admin,
}

impl Envoy {
    /// Starts Envoy and waits until it serves.
    ///
    /// # Errors
    /// When Envoy does not become ready; the error repeats the end of its log.
    pub async fn start(config: EnvoyConfig<'_>) -> Result<Self, EnvoyError> {
        let folder = tempfile::Builder::new().prefix("pd-harness-").tempdir()?;
        let admin = Admin::of(&config.settings, folder.path()).await?;
        let settings = &config.settings;
        let mut bootstrap = bootstrap::render(config.template, settings, admin.pipe())?;
        (config.amend)(&mut bootstrap);
        let mut process = Process::start(&config, &bootstrap, folder)?;
        let admin_file = process.admin_file();
        let addresses = tokio::select! {
            addresses = ready(&admin, &admin_file) => addresses,
            error = process.ended() => return Err(error),
            () = tokio::time::sleep(START_LIMIT) => {
                process.stop().await;
                return Err(EnvoyError::NotReady);
            }
        };
        Ok(Self {
            addresses,
            process,
            _admin: admin,
        })
    }

    /// Waits for Envoy to end by itself.
    pub async fn ended(&mut self) -> EnvoyError {
        self.process.ended().await
    }

    /// The process that Envoy is a child of.
    pub fn process(&self) -> Option<u32> {
        self.process.supervised.child.id()
    }

    /// Ends Envoy.
    pub async fn stop(self) {
        self.process.stop().await;
    }
}

/// Location of Envoy's admin page.
enum Admin {
    /// At an address, which Envoy writes to a file.
    Address,
    /// On a unix socket, for the filter's own calls; this program forwards to it.
    Pipe(PathBuf, Forwarder),
}

impl Admin {
    async fn of(settings: &Settings<'_>, folder: &Path) -> io::Result<Self> {
        if !settings
            .clusters
            .values()
            .any(|kind| *kind == ClusterKind::Admin)
        {
            return Ok(Self::Address);
        }
        let pipe = folder.join("admin.sock");
        let forwarder = Forwarder::start(settings.admin, &pipe).await?;
        Ok(Self::Pipe(pipe, forwarder))
    }

    fn pipe(&self) -> Option<&Path> {
        match self {
            Self::Address => None,
            Self::Pipe(pipe, _) => Some(pipe),
        }
    }

    fn address(&self, file: &Path) -> Option<SocketAddr> {
        match self {
            Self::Address => std::fs::read_to_string(file).ok()?.trim().parse().ok(),
            Self::Pipe(_, forwarder) => Some(forwarder.address),
        }
    }
}

struct Process {
    supervised: Supervised,
    log: JoinHandle<Vec<String>>,
    folder: TempDir,
}

impl Process {
    fn start(
        config: &EnvoyConfig<'_>,
        bootstrap: &Value,
        folder: TempDir,
    ) -> Result<Self, EnvoyError> {
        let file = folder.path().join("bootstrap.json");
        std::fs::write(&file, bootstrap.to_string())?;
        let mut command = supervised::command(config.binary);
        command
            .arg("--config-path")
            .arg(&file)
            .arg("--admin-address-path")
            .arg(admin_file(folder.path()))
            .args(["--concurrency", &config.concurrency.to_string()])
            // Several may run at once, without hot restart between them.
            .arg("--disable-hot-restart")
            .args(["--log-format", LOG_FORMAT])
            .args([
                "--log-level",
                "warning",
                "--component-log-level",
                "wasm:info",
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut supervised = Supervised::start(command)?;
        let log = supervised
            .child
            .stderr
            .take()
            .ok_or_else(|| io::Error::other("no log"))?;
        Ok(Self {
            supervised,
            log: tokio::spawn(pass_on(log, config.log)),
            folder,
        })
    }

    fn admin_file(&self) -> PathBuf {
        admin_file(self.folder.path())
    }

    async fn ended(&mut self) -> EnvoyError {
        let status = match self.supervised.child.wait().await {
            Ok(status) => status,
            Err(error) => return error.into(),
        };
        EnvoyError::Ended {
            status,
            last_words: (&mut self.log).await.unwrap_or_default(),
        }
    }

    async fn stop(self) {
        self.supervised.end().await;
    }
}

fn admin_file(folder: &Path) -> PathBuf {
    folder.join("admin-address")
}

/// Passes the log on to standard error, and returns the lines that explain its end.
async fn pass_on(log: ChildStderr, what: EnvoyLog) -> Vec<String> {
    let mut lines = BufReader::new(log).lines();
    let (mut errors, mut all) = (VecDeque::new(), VecDeque::new());
    while let Ok(Some(line)) = lines.next_line().await {
        let error = error_in(&line);
        if what == EnvoyLog::Everything || error.is_some() {
            eprintln!("{line}");
        }
        if let Some(error) = error {
            keep(&mut errors, error);
        }
        keep(&mut all, &line);
    }
    if errors.is_empty() {
        all.into()
    } else {
        errors.into()
    }
}

/// The text of an error line, without its time.
fn error_in(line: &str) -> Option<&str> {
    let (_, text) = line.split_once("] [envoy] ")?;
    (text.starts_with("[error] ") || text.starts_with("[critical] ")).then_some(text)
}

fn keep(lines: &mut VecDeque<String>, line: &str) {
    if lines.len() == LAST_WORDS {
        lines.pop_front();
    }
    lines.push_back(line.to_owned());
}

/// Polls until Envoy serves, and returns its addresses.
async fn ready(admin: &Admin, admin_file: &Path) -> Addresses {
    loop {
        if let Some(addresses) = try_ready(admin, admin_file).await {
            return addresses;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn try_ready(admin: &Admin, admin_file: &Path) -> Option<Addresses> {
    let admin = admin.address(admin_file)?;
    http::get(admin, "/ready").await.ok()?;
    let listeners = http::get_json(admin, "/listeners?format=json").await;
    let listen = listener(&listeners.ok()?)?;
    TcpStream::connect(listen).await.ok()?;
    Some(Addresses { listen, admin })
}

fn listener(listeners: &Value) -> Option<SocketAddr> {
    let address = listeners.pointer("/listener_statuses/0/local_address/socket_address")?;
    let ip = address["address"].as_str()?.parse().ok()?;
    let port = address["port_value"].as_u64()?.try_into().ok()?;
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_listener_is_found_in_envoys_own_words() {
        let listeners = json!({"listener_statuses": [{"name": "gateway", "local_address":
            {"socket_address": {"address": "127.0.0.1", "port_value": 40001}}}]});
        assert_eq!(
            listener(&listeners),
            Some(SocketAddr::from(([127, 0, 0, 1], 40001)))
        );
    }

    #[test]
    fn errors_are_told_from_what_a_line_merely_mentions() {
        let dated = |text: &str| format!("[2026-01-01 00:00:00.000] [envoy] {text}");
        assert_eq!(
            error_in(&dated("[critical] no such file")),
            Some("[critical] no such file")
        );
        assert_eq!(error_in(&dated("[info] wasm log: no [error] here")), None);
    }
}
