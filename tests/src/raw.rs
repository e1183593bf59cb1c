//! Owns a client that writes arbitrary bytes and leaves at any time; it reads answers by HTTP/1 framing.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use crate::client::Reply;

/// Limit of the wait for bytes.
const READ_LIMIT: Duration = Duration::from_secs(60);

const READ_BYTES: usize = 64 * 1024;

/// Head of a request, with `host`, these headers, and the empty line at the end.
pub fn head(request_line: &str, headers: &[(&str, &str)]) -> Vec<u8> {
    let mut head = format!("{request_line}\r\nhost: gateway\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    head.into_bytes()
}

/// A complete `POST path HTTP/1.1` with a JSON body and these further headers.
pub fn post(path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let length = body.len().to_string();
    let mut all = vec![
        ("content-type", "application/json"),
        ("content-length", length.as_str()),
    ];
    all.extend_from_slice(headers);
    let mut request = head(&format!("POST {path} HTTP/1.1"), &all);
    request.extend_from_slice(body);
    request
}

/// One chunk of a chunked body.
pub fn chunk(data: &[u8]) -> Vec<u8> {
    let mut chunk = format!("{:x}\r\n", data.len()).into_bytes();
    chunk.extend_from_slice(data);
    chunk.extend_from_slice(b"\r\n");
    chunk
}

/// A connection without any HTTP logic of its own.
pub struct Raw {
    reader: Reader,
    writer: OwnedWriteHalf,
}

struct Reader {
    stream: OwnedReadHalf,
    buffer: Vec<u8>,
}

impl Raw {
    /// Connects; fails if the port is closed.
    pub async fn connect(to: SocketAddr) -> Raw {
        let stream = TcpStream::connect(to)
            .await
            .unwrap_or_else(|error| panic!("cannot connect to {to}: {error}"));
        // One-byte chunks must arrive separately.
        let _ = stream.set_nodelay(true);
        let (stream, writer) = stream.into_split();
        Raw {
            reader: Reader {
                stream,
                buffer: Vec::new(),
            },
            writer,
        }
    }

    /// Writes the bytes; fails if the other side accepts no more.
    pub async fn write(&mut self, bytes: &[u8]) {
        let written = self.writer.write_all(bytes).await;
        written.unwrap_or_else(|error| panic!("the gateway takes no more bytes: {error}"));
    }

    /// Reads one head: first line and headers.
    pub async fn read_head(&mut self) -> (String, HeaderMap) {
        self.reader.head().await
    }

    /// Reads one answer, skipping interim ones.
    pub async fn read_reply(&mut self) -> Reply {
        self.reader.reply().await
    }

    /// Received bytes not yet consumed.
    pub fn seen(&self) -> String {
        String::from_utf8_lossy(&self.reader.buffer).into_owned()
    }

    /// Reads until `needle` has been received `times` times.
    pub async fn read_until(&mut self, needle: &str, times: usize) {
        let seen = |buffer: &[u8]| String::from_utf8_lossy(buffer).matches(needle).count();
        while seen(&self.reader.buffer) < times {
            self.reader.more().await;
        }
    }

    /// All further bytes until the other side ends or resets the connection.
    pub async fn read_rest(&mut self) -> String {
        let mut bytes = vec![0; READ_BYTES];
        loop {
            let read = timeout(READ_LIMIT, self.reader.stream.read(&mut bytes)).await;
            match read {
                Ok(Ok(0) | Err(_)) => break,
                Ok(Ok(read)) => self.reader.buffer.extend(bytes.iter().take(read)),
                Err(_) => panic!("the connection does not end within {READ_LIMIT:?}"),
            }
        }
        let all = std::mem::take(&mut self.reader.buffer);
        String::from_utf8_lossy(&all).into_owned()
    }

    /// Writes `request` and reads one answer at the same time, since an answer may come early.
    pub async fn exchange(to: SocketAddr, request: Vec<u8>) -> Reply {
        let Raw {
            mut reader,
            mut writer,
        } = Raw::connect(to).await;
        // A server that has refused need not read the rest.
        let writing = tokio::spawn(async move {
            let _ = writer.write_all(&request).await;
            writer
        });
        let reply = reader.reply().await;
        writing.abort();
        reply
    }
}

impl Reader {
    /// Reads more bytes; false at the end of the stream.
    async fn more_or_end(&mut self) -> bool {
        let mut bytes = vec![0; READ_BYTES];
        let read = timeout(READ_LIMIT, self.stream.read(&mut bytes)).await;
        let Ok(read) = read else {
            panic!(
                "no more bytes within {READ_LIMIT:?} after {:?}",
                String::from_utf8_lossy(&self.buffer)
            );
        };
        let read = read.unwrap_or_else(|error| {
            panic!(
                "the connection broke ({error}) after {:?}",
                String::from_utf8_lossy(&self.buffer)
            )
        });
        self.buffer.extend(bytes.iter().take(read));
        read > 0
    }

    async fn more(&mut self) {
        assert!(
            self.more_or_end().await,
            "the connection ended after {:?}",
            String::from_utf8_lossy(&self.buffer)
        );
    }

    /// Consumes everything up to and including `end`.
    async fn take_through(&mut self, end: &[u8]) -> Vec<u8> {
        loop {
            let found = self.buffer.windows(end.len()).position(|w| w == end);
            if let Some(at) = found {
                return self.buffer.drain(..at + end.len()).collect();
            }
            self.more().await;
        }
    }

    async fn take(&mut self, count: usize) -> Vec<u8> {
        while self.buffer.len() < count {
            self.more().await;
        }
        self.buffer.drain(..count).collect()
    }

    async fn head(&mut self) -> (String, HeaderMap) {
        let bytes = self.take_through(b"\r\n\r\n").await;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let mut lines = text.trim_end().split("\r\n");
        let first = lines.next().unwrap_or_default().to_owned();
        let mut headers = HeaderMap::new();
        for (name, value) in lines.filter_map(header) {
            headers.append(name, value);
        }
        (first, headers)
    }

    async fn reply(&mut self) -> Reply {
        loop {
            let (first, headers) = self.head().await;
            let status: u16 = first
                .split(' ')
                .nth(1)
                .and_then(|status| status.parse().ok())
                .unwrap_or_else(|| panic!("not a status line: {first:?}"));
            if (100..200).contains(&status) {
                continue;
            }
            let body = self.body(&headers).await;
            return Reply {
                status,
                headers,
                body: Bytes::from(body),
            };
        }
    }

    async fn body(&mut self, headers: &HeaderMap) -> Vec<u8> {
        let value = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        if value("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked")) {
            return self.chunks().await;
        }
        if let Some(length) = value("content-length").and_then(|value| value.parse().ok()) {
            return self.take(length).await;
        }
        while self.more_or_end().await {}
        std::mem::take(&mut self.buffer)
    }

    async fn chunks(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let line = self.take_through(b"\r\n").await;
            let line = String::from_utf8_lossy(&line);
            let size = line.trim().split(';').next().unwrap_or_default();
            let size = usize::from_str_radix(size, 16)
                .unwrap_or_else(|_| panic!("not a chunk's size: {line:?}"));
            if size == 0 {
                break;
            }
            body.extend(self.take(size).await);
            self.take_through(b"\r\n").await;
        }
        // Trailers end with an empty line.
        while self.take_through(b"\r\n").await != b"\r\n" {}
        body
    }
}

fn header(line: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = line.split_once(':')?;
    let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
    Some((name, HeaderValue::from_bytes(value.trim().as_bytes()).ok()?))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    async fn answering(answer: &'static [u8]) -> Reply {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(answer).await.unwrap();
        });
        let mut raw = Raw::connect(address).await;
        let reply = raw.read_reply().await;
        serving.await.unwrap();
        reply
    }

    #[tokio::test]
    async fn answers_are_read_as_they_are_framed() {
        for answer in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"[..],
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\na: b\r\n\r\n",
            b"HTTP/1.0 200 OK\r\n\r\nhello",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        ] {
            let reply = answering(answer).await;
            assert_eq!(reply.status, 200);
            assert_eq!(reply.text(), "hello");
        }
    }
}
