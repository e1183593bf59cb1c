//! Plain sockets for the tests: a client that sees every byte, and workers with scripted answers.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// A worker's answer: pieces of bytes, each after a pause, then the connection closes.
pub type Script = Vec<(Duration, Vec<u8>)>;

/// Starts a worker. Each received request is sent over the channel.
pub async fn worker(script: Script) -> (SocketAddr, UnboundedReceiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("its address");
    let (seen, requests) = unbounded_channel();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            tokio::spawn(serve(connection, script.clone(), seen.clone()));
        }
    });
    (address, requests)
}

async fn serve(mut connection: TcpStream, script: Script, seen: UnboundedSender<Vec<u8>>) {
    let request = read_message(&mut connection).await;
    if request.is_empty() {
        return;
    }
    let _ = seen.send(request);
    for (pause, bytes) in script {
        tokio::time::sleep(pause).await;
        if connection.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

/// One request with a body of its content-length.
async fn read_message(connection: &mut TcpStream) -> Vec<u8> {
    let mut message = Vec::new();
    loop {
        if connection.read_buf(&mut message).await.unwrap_or(0) == 0 {
            return message;
        }
        let text = String::from_utf8_lossy(&message);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name == "content-length").then(|| value.trim().parse::<usize>().ok())?
        });
        if body.len() >= length.unwrap_or(0) {
            return message;
        }
    }
}

/// A worker that answers at once with 200 and this body.
pub fn ok(body: &str) -> Script {
    // Announces that the connection closes after the answer: otherwise it may be reused once more.
    let head = format!(
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    vec![(Duration::ZERO, format!("{head}{body}").into_bytes())]
}

/// A port without a listener.
pub async fn closed_port() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    listener.local_addr().expect("its address")
}

/// Sends bytes and returns the complete answer.
pub async fn exchange(address: SocketAddr, request: &[u8]) -> String {
    let mut connection = TcpStream::connect(address).await.expect("the host listens");
    connection.write_all(request).await.expect("sent");
    let mut answer = Vec::new();
    let _ = connection.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// GET; the connection closes afterwards.
pub async fn get(address: SocketAddr, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
    exchange(address, request.as_bytes()).await
}

/// GET of the root path, with an owned result for a separate task.
pub async fn get_owned(address: SocketAddr) -> String {
    get(address, "/").await
}

/// POST; the connection closes afterwards.
pub async fn post(address: SocketAddr, body: &str) -> String {
    exchange(address, &post_bytes(body)).await
}

/// The bytes of a POST.
pub fn post_bytes(body: &str) -> Vec<u8> {
    let head = "POST /v1 HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: ";
    format!("{head}{}\r\n\r\n{body}", body.len()).into_bytes()
}

/// The status of an answer.
pub fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or(answer)
}
