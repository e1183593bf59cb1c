//! Owns the ways in which a user, a supervisor or a test ends the program.

use std::future::Future;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Installs the handlers; the future ends at Ctrl-C, at SIGTERM or, if requested, when standard input closes.
///
/// # Errors
/// When the signal handlers cannot be installed.
pub fn requested(until_stdin_closes: bool) -> std::io::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stdin_closed = until_stdin_closes.then(stdin_closed);
    Ok(async move {
        let stdin_closed = async {
            match stdin_closed {
                // An error means that the reading thread has ended, and with it standard input.
                Some(closed) => drop(closed.await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            () = stdin_closed => {}
        }
    })
}

/// Reads on a separate thread: a thread of the runtime would keep the program from ending.
fn stdin_closed() -> oneshot::Receiver<()> {
    let (closed, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = closed.send(());
    });
    receiver
}
