//! Owns the shell that runs a program for as long as the process that started it lives.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs a program for as long as the other end of standard input is open: so it ends with its starter, even on SIGKILL. The part
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

/// A command that runs the program under supervision; arguments and outputs are to be added. Its standard input, which must be
/// kept open, is the program's lifeline.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", SCRIPT, "supervisor"])
        .arg(program)
        .stdin(Stdio::piped())
        // Ctrl-C goes to the starter only, which then ends the program in its own order.
        .process_group(0);
    command
}
