//! Owns the shell that runs a program for as long as this one lives.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::{Child, ChildStdin, Command};

/// Runs a program for as long as the other end of standard input is open: so it ends with the harness, even on SIGKILL. The part
/// in braces watches for that and ends the program: with SIGTERM, and after 5 s with SIGKILL.
const SCRIPT: &str = r#"
exec 3<&0
"$@" 3<&- </dev/null &
program=$!
{
    read -r _ <&3
    kill -TERM $program
    patience=50
    while [ $patience -gt 0 ] && kill -0 $program; do
        sleep 0.1
        patience=$((patience - 1))
    done
    kill -KILL $program
} >/dev/null 2>&1 &
watcher=$!
wait $program
status=$?
kill $watcher
exit $status
"#;

/// Longer than the script takes.
const STOP_LIMIT: Duration = Duration::from_secs(8);

/// A command that runs the program under supervision; arguments and outputs are to be added, for [`Supervised::start`].
pub fn command(program: &Path) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", SCRIPT, "supervisor"])
        .arg(program)
        .stdin(Stdio::piped())
        // Ctrl-C goes to the harness only, which then ends the program in its own order.
        .process_group(0);
    command
}

/// A program under supervision.
pub struct Supervised {
    /// The process that the program is a child of.
    pub child: Child,
    lifeline: Option<ChildStdin>,
}

impl Supervised {
    /// Starts a [`command`].
    ///
    /// # Errors
    /// When the shell cannot be started.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut child = command.spawn()?;
        // Taken from the child, which would close it as soon as somebody waits for its end.
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
