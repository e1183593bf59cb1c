//! Owns the shell that runs a program for as long as this one lives.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::{Child, ChildStdin, Command};

/// Runs a program for as long as somebody holds the other end of standard input: so it ends with the harness, however that
/// ends, SIGKILL included. The part in braces is what watches, and ends the program: politely, and after 5 s not.
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

/// More than the script takes.
const STOP_LIMIT: Duration = Duration::from_secs(8);

/// A command that runs the program under supervision; its arguments and outputs are to be added. What it starts as is to be
/// given to [`end`].
pub fn command(program: &Path) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", SCRIPT, "supervisor"])
        .arg(program)
        .stdin(Stdio::piped())
        // Ctrl-C is for the harness, which then ends the program in its own order.
        .process_group(0);
    command
}

/// Lets go of the program's lifeline, and waits for it to end.
pub async fn end(mut supervisor: Child, lifeline: Option<ChildStdin>) {
    drop(lifeline);
    drop(supervisor.stdin.take());
    // Beyond the limit nothing more can be done than to leave.
    let _ = tokio::time::timeout(STOP_LIMIT, supervisor.wait()).await;
}
