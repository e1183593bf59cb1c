//! Owns a client's connection: one request at a time, with a given way of reading; a broken connection is replaced.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::BytesMut;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, RETRY_AFTER};
use hyper::{HeaderMap, Response};
use pd_harness_common::connection::{self, Connection, Failure, in_words};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep, timeout_at};

use super::behaviour::{ClientBehaviour, Leaves, Reads};
use crate::chaos::asks::Ask;
use crate::chaos::reply::{AnswerEnd, AnswerHead, ReceivedAnswer};

/// How long a client waits for the end of an answer: longer than the sum of the filter's deadlines.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// Outcome of a request.
pub enum ExchangeOutcome {
    /// An answer, or its absence.
    Received(ReceivedAnswer),
    /// The client left on purpose.
    Left,
}

/// A client's connection, reused for many requests.
pub struct ClientConnection {
    to: SocketAddr,
    window: Option<u32>,
    open: Option<Connection>,
}

impl ClientConnection {
    /// A connection that is made when it is first needed. `window`: bytes of answers that the system may buffer.
    pub fn new(to: SocketAddr, window: Option<u32>) -> Self {
        Self {
            to,
            window,
            open: None,
        }
    }

    /// Sends a request and reads its answer until the client leaves or the answer ends.
    pub async fn exchange(&mut self, ask: &Ask, behaviour: ClientBehaviour) -> ExchangeOutcome {
        match behaviour.leaves {
            Some(Leaves::InBody) => {
                // A client that cannot even connect has left all the same.
                let _ = self.send_half(ask).await;
                ExchangeOutcome::Left
            }
            Some(Leaves::After(time)) => {
                let outcome = tokio::time::timeout(time, self.listen(ask, behaviour)).await;
                outcome.unwrap_or_else(|_| self.leave())
            }
            _ => self.listen(ask, behaviour).await,
        }
    }

    async fn listen(&mut self, ask: &Ask, behaviour: ClientBehaviour) -> ExchangeOutcome {
        let deadline = Instant::now() + PATIENCE;
        let response = match timeout_at(deadline, self.send(ask)).await {
            Err(_) => return self.no_answer(AnswerEnd::Never),
            Ok(Err(why)) => return self.no_answer(AnswerEnd::Broken(why.to_string())),
            Ok(Ok(response)) => response,
        };
        if behaviour.leaves == Some(Leaves::AtHeaders) {
            return self.leave();
        }
        let closes = says_close(response.headers());
        let mut reader = AnswerReader::of(response, behaviour);
        let Some(end) = reader.read_to_end(deadline).await else {
            return self.leave();
        };
        if end != AnswerEnd::Clean || closes {
            self.open = None;
        }
        ExchangeOutcome::Received(reader.received(end))
    }

    async fn send(&mut self, ask: &Ask) -> Result<Response<Incoming>, Failure> {
        let mut open = match self.open.take() {
            Some(open) if !open.is_closed() => open,
            _ => Connection::over(self.dial().await.map_err(Failure::no_connection)?).await?,
        };
        let request = connection::post(ask.path, self.to, ask.body.clone());
        let response = open.send(request).await?;
        self.open = Some(open);
        Ok(response)
    }

    /// Sends the headers and half of the body over a separate connection.
    async fn send_half(&self, ask: &Ask) -> std::io::Result<()> {
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            ask.path,
            self.to,
            ask.body.len()
        );
        let (half, _) = ask.body.split_at(ask.body.len() / 2);
        let mut stream = self.dial().await?;
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(half).await?;
        // Gives the gateway time to begin reading.
        sleep(Duration::from_millis(5)).await;
        Ok(())
    }

    async fn dial(&self) -> std::io::Result<TcpStream> {
        let socket = match self.to {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        if let Some(window) = self.window {
            socket.set_recv_buffer_size(window)?;
        }
        let stream = socket.connect(self.to).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Closes the connection: it ends without a sender and a body.
    fn leave(&mut self) -> ExchangeOutcome {
        self.open = None;
        ExchangeOutcome::Left
    }

    fn no_answer(&mut self, end: AnswerEnd) -> ExchangeOutcome {
        self.open = None;
        ExchangeOutcome::Received(ReceivedAnswer::nothing(end))
    }
}

/// Reads an answer as the client's behaviour asks.
pub struct AnswerReader {
    head: AnswerHead,
    body: Incoming,
    read: BytesMut,
    pieces: usize,
    behaviour: ClientBehaviour,
}

impl AnswerReader {
    /// A reader of an answer with this head.
    pub fn of(response: Response<Incoming>, behaviour: ClientBehaviour) -> Self {
        let (head, body) = response.into_parts();
        Self {
            head: AnswerHead {
                status: head.status.as_u16(),
                content_type: text_of(&head.headers, &CONTENT_TYPE).unwrap_or_default(),
                retry_after: text_of(&head.headers, &RETRY_AFTER),
            },
            body,
            read: BytesMut::new(),
            pieces: 0,
            behaviour,
        }
    }

    /// What was read of an answer that ended like this.
    pub fn received(self, end: AnswerEnd) -> ReceivedAnswer {
        ReceivedAnswer {
            head: Some(self.head),
            body: self.read.freeze(),
            end,
        }
    }

    /// Reads until the answer ends. `None`: the client left before.
    pub async fn read_to_end(&mut self, deadline: Instant) -> Option<AnswerEnd> {
        loop {
            let piece = match timeout_at(deadline, self.body.frame()).await {
                Err(_) => return Some(AnswerEnd::Never),
                Ok(None) => return Some(AnswerEnd::Clean),
                Ok(Some(Err(error))) => return Some(AnswerEnd::Broken(in_words(error))),
                Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
            };
            self.read.extend_from_slice(&piece);
            self.pieces += 1;
            if self.leaves_here() {
                return None;
            }
            self.dawdle().await;
        }
    }

    fn leaves_here(&self) -> bool {
        match self.behaviour.leaves {
            Some(Leaves::AfterPieces(pieces)) => self.pieces >= pieces,
            Some(Leaves::AtLastToken) => {
                String::from_utf8_lossy(&self.read).contains(r#""finish_reason":"length""#)
            }
            Some(Leaves::InBody | Leaves::After(_) | Leaves::AtHeaders) | None => false,
        }
    }

    async fn dawdle(&self) {
        let Reads::Slowly {
            pause,
            stalls_after,
            stall,
        } = self.behaviour.reads
        else {
            return;
        };
        sleep(pause).await;
        if self.pieces == stalls_after {
            sleep(stall).await;
        }
    }
}

fn says_close(headers: &HeaderMap) -> bool {
    text_of(headers, &hyper::header::CONNECTION).is_some_and(|value| value == "close")
}

fn text_of(headers: &HeaderMap, name: &hyper::header::HeaderName) -> Option<String> {
    let value = headers.get(name)?.to_str().ok()?;
    Some(value.to_owned())
}
