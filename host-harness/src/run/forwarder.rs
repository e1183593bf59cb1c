//! Owns the forwarding from an address to a unix socket: Envoy's admin page can listen in one place only, which is a socket if
//! the filter calls it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::JoinHandle;

/// Pause after a failed accept, to avoid a tight loop.
const AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(10);

/// Forwards every connection until dropped.
pub struct Forwarder {
    /// Address of the listener.
    pub address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl Forwarder {
    /// Listens; port 0 takes a free one.
    ///
    /// # Errors
    /// When the address is not available.
    pub async fn start(listen: SocketAddr, to: &Path) -> std::io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        Ok(Self {
            address: listener.local_addr()?,
            accepting: tokio::spawn(accept(listener, to.to_owned())),
        })
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, to: PathBuf) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => drop(tokio::spawn(pass_on(client, to.clone()))),
            Err(_) => tokio::time::sleep(AFTER_FAILED_ACCEPT).await,
        }
    }
}

/// An absent peer, or one that leaves, ends the other's connection.
async fn pass_on(mut client: TcpStream, to: PathBuf) {
    if let Ok(mut page) = UnixStream::connect(to).await {
        let _ = copy_bidirectional(&mut client, &mut page).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    #[tokio::test]
    async fn bytes_pass_both_ways() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let page = UnixListener::bind(&path).unwrap();
        let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let forwarder = Forwarder::start(anywhere, &path).await.unwrap();
        let mut client = TcpStream::connect(forwarder.address).await.unwrap();
        client.write_all(b"ask").await.unwrap();
        let (mut served, _) = page.accept().await.unwrap();
        let mut received = [0; 3];
        served.read_exact(&mut received).await.unwrap();
        served.write_all(&received).await.unwrap();
        drop(served);
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"ask");
    }
}
