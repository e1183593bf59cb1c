//! Owns a child process that is another router: start, setup, readiness, end.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use hyper::Method;
use pd_harness_common::supervised;
use tempfile::NamedTempFile;
use tokio::time::{sleep, timeout};

use super::peers::{EngineAddresses, Peer, PutRequest, StartStep, WORKERS};
use crate::http;
use crate::run::supervised::Supervised;

/// Time limit until a router is ready: those in Python take seconds to load.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Time limit of one answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Lines of its log that a failed start repeats.
const LAST_WORDS: usize = 6;

/// Why a router does not run.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// The program is not installed.
    #[error("{} is not there: `scripts/peers.sh` puts it there", .0.display())]
    Missing(PathBuf),
    /// A file, a port or a process was not available.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The router ended by itself.
    #[error("it ended ({status}){}", in_words(.last_words))]
    Ended {
        /// Its exit status.
        status: ExitStatus,
        /// The last lines of its log.
        last_words: Vec<String>,
    },
    /// The router runs, but is not ready.
    #[error("it was not ready after {} s{}", START_LIMIT.as_secs(), in_words(.last_words))]
    NotReady {
        /// The last lines of its log.
        last_words: Vec<String>,
    },
}

fn in_words(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n  {line}")).collect()
}

/// A running router.
pub struct Router {
    /// Address for clients.
    pub address: SocketAddr,
    supervised: Supervised,
    log: NamedTempFile,
}

impl Router {
    /// Starts a router in front of running engines, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not become ready; the error repeats the end of its log.
    pub async fn start(
        peer: Peer,
        venvs: &Path,
        fleet: &EngineAddresses,
    ) -> Result<Self, RouterError> {
        let [listen, metrics] = free_ports()?;
        let mut router = Self::spawn(peer, venvs, [listen, metrics], fleet)?;
        let ready = tokio::select! {
            () = ready(peer, listen, fleet) => Ok(()),
            status = router.supervised.child.wait() => Err(status),
            () = sleep(START_LIMIT) => {
                let last_words = router.last_words();
                router.stop().await;
                return Err(RouterError::NotReady { last_words });
            }
        };
        match ready {
            Ok(()) => Ok(router),
            Err(status) => Err(RouterError::Ended {
                status: status?,
                last_words: router.last_words(),
            }),
        }
    }

    fn spawn(
        peer: Peer,
        venvs: &Path,
        [listen, metrics]: [SocketAddr; 2],
        fleet: &EngineAddresses,
    ) -> Result<Self, RouterError> {
        let start = peer.command(venvs, listen, metrics, fleet);
        if !start.program.exists() {
            return Err(RouterError::Missing(start.program));
        }
        let log = NamedTempFile::new()?;
        let mut command = supervised::command(&start.program);
        command
            .args(&start.args)
            .stdout(Stdio::from(log.reopen()?))
            .stderr(Stdio::from(log.reopen()?));
        Ok(Self {
            address: listen,
            supervised: Supervised::start(command)?,
            log,
        })
    }

    /// The process that the router is a child of.
    pub fn process(&self) -> Option<u32> {
        self.supervised.child.id()
    }

    /// Ends the router.
    pub async fn stop(self) {
        self.supervised.end().await;
    }

    fn last_words(&self) -> Vec<String> {
        let log = std::fs::read(self.log.path()).unwrap_or_default();
        last_lines(&String::from_utf8_lossy(&log))
    }
}

fn last_lines(log: &str) -> Vec<String> {
    let lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut last: Vec<String> = lines.rev().take(LAST_WORDS).map(str::to_owned).collect();
    last.reverse();
    last
}

/// Free ports. Routers do not pick ports themselves, so another process may take one first: the router then ends with an error.
fn free_ports() -> io::Result<[SocketAddr; 2]> {
    let listener = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    // Both open at once, or they could be the same port.
    let (one, other) = (listener()?, listener()?);
    Ok([one.local_addr()?, other.local_addr()?])
}

/// Polls the router and sends its setup, until it is ready.
async fn ready(peer: Peer, address: SocketAddr, fleet: &EngineAddresses) {
    loop {
        if let Ok(Ok(workers)) = timeout(ANSWER_LIMIT, http::get(address, WORKERS)).await {
            match peer.next(&workers, fleet) {
                StartStep::Ready => return,
                StartStep::Wait => {}
                StartStep::Configure(puts) => configure(address, puts).await,
            }
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// A lost request is sent again by the next poll, since the router's list of workers then lacks its effect.
async fn configure(address: SocketAddr, puts: Vec<PutRequest>) {
    for PutRequest { path, body } in puts {
        let put = http::send(Method::PUT, address, &path, body, None);
        let _ = timeout(ANSWER_LIMIT, put).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_are_the_last_lines_that_say_something() {
        assert_eq!(last_lines("a\n\n b \n"), ["a", "b"]);
        let many: String = (0..20).map(|number| format!("{number}\n")).collect();
        assert_eq!(last_lines(&many), ["14", "15", "16", "17", "18", "19"]);
    }

    #[tokio::test]
    async fn a_router_that_ends_says_why_and_one_that_is_not_there_who_brings_it() {
        let folder = tempfile::tempdir().unwrap();
        let fleet = EngineAddresses::default();
        let start = || Router::start(Peer::VllmRouter, folder.path(), &fleet);
        let missing = start().await.err().map(|error| error.to_string());
        assert!(missing.is_some_and(|why| why.contains("scripts/peers.sh")));

        let bin = folder.path().join("vllm-router/bin");
        std::fs::create_dir_all(&bin).unwrap();
        let program = bin.join("vllm-router");
        std::fs::write(&program, "#!/bin/sh\necho no such option >&2\nexit 3\n").unwrap();
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, executable).unwrap();
        let ended = start().await.err().map(|error| error.to_string());
        assert_eq!(
            ended.as_deref(),
            Some("it ended (exit status: 3)\n  no such option")
        );
    }
}
