//! Owns a process under test: its log in a file, its ready line within a deadline, killed and reaped when dropped.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pd_harness_common::usage;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::paths;
use crate::wait::{polled, test_name};

/// Limit of a start, which includes compiling the plugin while other tests run.
const READY_LIMIT: Duration = Duration::from_secs(90);

/// Limit of the end of a process that has closed its stdout.
const ENDING_LIMIT: Duration = Duration::from_secs(10);

/// Log lines shown when a test fails.
const SHOWN_LINES: usize = 30;

static STARTED: AtomicUsize = AtomicUsize::new(0);

/// A file name that is unique in this test run.
pub fn unique_name(what: &str) -> String {
    let number = STARTED.fetch_add(1, Ordering::Relaxed);
    format!("{}-{number}-{what}", test_name())
}

/// Why a process did not become ready.
#[derive(Debug)]
pub struct StartFailure {
    /// Exit status; `None` if the process still ran, without being ready.
    pub status: Option<ExitStatus>,
    /// The stderr output.
    pub log: String,
}

impl StartFailure {
    /// Fails the test with the status and the log.
    pub fn fail(self, what: &str) -> ! {
        panic!("{what} does not start ({:?}):\n{}", self.status, self.log)
    }
}

/// A running process, killed when this value is dropped.
pub struct Process {
    child: Child,
    // Open as long as the process may live: it ends when its stdin closes, however the test ends.
    stdin: Option<ChildStdin>,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its stdin held open, and stderr in a log file; returns its stdout too.
    pub fn spawn(mut command: Command, what: &str) -> (Process, ChildStdout) {
        let log = paths::logs().join(format!("{}.log", unique_name(what)));
        let file = File::create(&log)
            .unwrap_or_else(|error| panic!("cannot create {}: {error}", log.display()));
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file);
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {what}: {error}"));
        let stdin = child.stdin.take();
        let Some(stdout) = child.stdout.take() else {
            panic!("{what} has no stdout");
        };
        let process = Process { child, stdin, log };
        (process, stdout)
    }

    /// Starts `command` and waits for its one JSON line that announces readiness.
    ///
    /// # Errors
    /// With the exit status and the log, if the process ended first.
    pub async fn start<R: DeserializeOwned>(
        command: Command,
        what: &str,
    ) -> Result<(Process, R), StartFailure> {
        let (mut process, stdout) = Process::spawn(command, what);
        let line = timeout(READY_LIMIT, first_line(stdout)).await;
        let Ok(Some(line)) = line else {
            let status = process.end_status().await;
            let log = process.log();
            return Err(StartFailure { status, log });
        };
        let ready = serde_json::from_str(&line).unwrap_or_else(|error| {
            panic!("the ready line of {what} is not as agreed ({error}): {line:?}")
        });
        Ok((process, ready))
    }

    /// The exit status, if the process ends soon.
    pub async fn end_status(&mut self) -> Option<ExitStatus> {
        let ended = polled(ENDING_LIMIT, || {
            let status = self.child.try_wait();
            async { status.ok().flatten().ok_or_else(String::new) }
        });
        ended.await.ok()
    }

    /// True while the process runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Ids of the process and its descendants.
    pub fn family(&self) -> Vec<u32> {
        usage::family(&[self.child.id()])
    }

    /// Ends the process at once, as `kill -9` does.
    pub fn kill(&mut self) {
        // Already gone is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Closes the process's stdin, which asks it to end gracefully.
    pub fn close_stdin(&mut self) {
        drop(self.stdin.take());
    }

    /// Ends the process by closing its stdin, so that it can end its own children.
    pub fn close(&mut self) {
        self.close_stdin();
        let _ = self.child.wait();
    }

    /// Content of the log.
    pub fn log(&self) -> String {
        read_lossy(&self.log)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("{}", tail(&self.log));
        }
    }
}

/// Runs the command in its own process group, prints its process id, and ends the group when stdin closes: however a test ends,
/// no process is left.
const GUARD: &str =
    r#"setsid "$@" </dev/null >&2 & echo $!; cat >/dev/null; kill -KILL -$! 2>/dev/null"#;

/// A process that ignores its stdin, with all its children.
pub struct ProcessGroup {
    guard: Process,
    child: u32,
}

impl ProcessGroup {
    /// Starts `command`; `what` is part of the log's name.
    pub async fn start(command: &Command, what: &str) -> ProcessGroup {
        let mut guarded = Command::new("/bin/sh");
        guarded.args(["-c", GUARD, "guard"]);
        guarded.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => guarded.env(name, value),
                None => guarded.env_remove(name),
            };
        }
        let started = Process::start::<u32>(guarded, what).await;
        let (guard, child) = started.unwrap_or_else(|failure| failure.fail(what));
        ProcessGroup { guard, child }
    }

    /// Asks the process to end gracefully.
    pub fn terminate(&self) {
        let kill = format!("kill -TERM {}", self.child);
        let done = Command::new("/bin/sh").args(["-c", &kill]).status();
        assert!(
            done.is_ok_and(|status| status.success()),
            "cannot end process {}",
            self.child
        );
    }

    /// True while the process exists.
    pub fn is_running(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/stat", self.child));
        status.is_ok_and(|status| !status.contains(") Z "))
    }

    /// Its output so far.
    pub fn log(&self) -> String {
        self.guard.log()
    }
}

/// Kills the process and all its children at once, as `kill -9` does.
impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.guard.close();
    }
}

/// The first line of `stdout`, read on a separate thread that then drains the rest.
async fn first_line(stdout: ChildStdout) -> Option<String> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stdout);
        let mut line = String::new();
        let read = reader.read_line(&mut line);
        let _ = sender.send(read.is_ok_and(|n| n > 0).then_some(line));
        let _ = std::io::copy(&mut reader, &mut std::io::sink());
    });
    receiver.await.ok().flatten()
}

/// All bytes of `stdout`, until its process closes it.
pub async fn read_to_end(mut stdout: ChildStdout) -> String {
    let read = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        let _ = stdout.read_to_string(&mut text);
        text
    });
    read.await
        .unwrap_or_else(|error| panic!("its output cannot be read: {error}"))
}

fn read_lossy(path: &Path) -> String {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(path) {
        let _ = file.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn tail(path: &Path) -> String {
    let text = read_lossy(path);
    let lines: Vec<&str> = text.lines().collect();
    let shown = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
    let name = path.file_name().unwrap_or_default().display();
    format!("--- the end of {name} ---\n{}", shown.join("\n"))
}
