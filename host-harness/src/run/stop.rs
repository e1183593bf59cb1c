//! Owns the ways in which a person, a supervisor or a test says that it is enough.

use std::future::Future;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Starts to listen; the future ends at Ctrl-C, at SIGTERM or, where asked for, when standard input ends.
///
/// # Errors
/// When the signals cannot be had.
pub fn requested(until_stdin_closes: bool) -> std::io::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stdin_closed = until_stdin_closes.then(stdin_closed);
    Ok(async move {
        let stdin_closed = async {
            match stdin_closed {
                // An error means that the reading thread is gone, and with it standard input.
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

/// A thread of its own reads: the runtime's would keep the program from ending.
fn stdin_closed() -> oneshot::Receiver<()> {
    let (closed, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = closed.send(());
    });
    receiver
}
