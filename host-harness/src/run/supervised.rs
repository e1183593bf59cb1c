//! Owns a child process under supervision: its start, and its end within a limit.

use std::io;
use std::process::Command;
use std::time::Duration;

use tokio::process::{Child, ChildStdin};

/// Longer than the script takes.
const STOP_LIMIT: Duration = Duration::from_secs(8);

/// A program under supervision.
pub struct Supervised {
    /// The process that the program is a child of.
    pub child: Child,
    lifeline: Option<ChildStdin>,
}

impl Supervised {
    /// Starts a [`supervised::command`](pd_harness_common::supervised::command).
    ///
    /// # Errors
    /// When the shell cannot be started.
    pub fn start(command: Command) -> io::Result<Self> {
        let mut child = tokio::process::Command::from(command).spawn()?;
        // Taken from the child, which would close it as soon as its end is waited for.
        let lifeline = child.stdin.take();
        Ok(Self { child, lifeline })
    }

    /// Closes the program's lifeline, and waits for its end.
    pub async fn end(mut self) {
        drop(self.lifeline);
        // Beyond the limit there is nothing left to do.
        let _ = tokio::time::timeout(STOP_LIMIT, self.child.wait()).await;
    }
}
