//! Owns the uploaders: bodies that begin at once and then trickle without an end, and bodies of 30 MB whose clients leave during
//! prefill.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use http_body_util::StreamBody;
use hyper::Request;
use hyper::body::Frame;
use hyper::client::conn::http1;
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use pd_harness_common::connection::in_words;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::behaviour::ClientBehaviour;
use super::connection::{AnswerReader, ExchangeOutcome, PATIENCE};
use crate::chaos::asks::{AnswerShape, Delivery, ExpectedAnswer, Fit};
use crate::chaos::judge::{ClientOutcomes, Conduct, Exchange};
use crate::chaos::reply::{AnswerEnd, ReceivedAnswer};
use crate::chaos::scenario::ClientMix;
use crate::run::fleet::MODEL;

/// Trickling uploaders, each over its own connection.
const TRICKLERS: usize = 200;
/// Bytes that each sends at once: together, more than may be in flight.
const BURST: usize = 12 * 1024 * 1024;
/// The `content-length` that each declares: within the limit, and never reached.
const TRICKLE: usize = 15 * 1024 * 1024;
/// Interval of the single bytes after that.
const DROP: Duration = Duration::from_millis(100);
/// Pause after a refusal, as `retry-after` asks.
const AGAIN: Duration = Duration::from_secs(1);

/// Uploaders that each send one long body and leave.
const LEAVERS: usize = 60;
const LONG: usize = 30_000_000;
/// Bytes of text beside the image that makes the body long: 16,000 tokens, which an engine computes in 0.4 s, one prompt after
/// the other.
const TEXT: usize = 64_000;
/// Delay between the starts of two uploaders.
const APART: Duration = Duration::from_millis(25);
/// Milliseconds between the body's last byte and the client's leaving: while the body is on its way to prefill, or in prefill.
const STAYS: [u64; 5] = [0, 50, 150, 300, 600];

/// Bytes sent in one piece.
const PIECE: usize = 256 * 1024;
/// Interval at which the stop flag is checked.
const LOOK: Duration = Duration::from_millis(50);

/// The shared end of every long body.
static TAIL: LazyLock<Bytes> = LazyLock::new(|| {
    let mut tail = vec![b'A'; LONG];
    tail.extend_from_slice(br#""}}]}]}"#);
    tail.into()
});

/// Bytes without meaning.
static FILLER: LazyLock<Bytes> = LazyLock::new(|| vec![b' '; BURST].into());

/// Behaviour of an uploader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UploadKind {
    /// A burst, then byte by byte, again and again.
    Trickles,
    /// A long body, then the client leaves.
    Leaves(Duration),
}

/// A client that uploads much.
pub struct Uploader {
    to: SocketAddr,
    number: usize,
    kind: UploadKind,
}

impl Uploader {
    /// The uploaders of a client mix.
    pub fn of(mix: ClientMix, to: SocketAddr) -> Vec<Self> {
        let count = match mix {
            ClientMix::WithTricklers => TRICKLERS,
            ClientMix::WithLongPrompts => LEAVERS,
            ClientMix::Patient
            | ClientMix::WithPoison
            | ClientMix::WithSlowReaders
            | ClientMix::SlowReaders
            | ClientMix::WithLeavers => 0,
        };
        let uploader = |number| Self {
            to,
            number,
            kind: match mix {
                ClientMix::WithLongPrompts => UploadKind::Leaves(stay(number)),
                _ => UploadKind::Trickles,
            },
        };
        (0..count).map(uploader).collect()
    }

    /// Uploads until `stop` is set.
    pub async fn upload_until(self, stop: Arc<AtomicBool>) -> ClientOutcomes {
        let mut seen = ClientOutcomes::default();
        if self.kind != UploadKind::Trickles {
            let turn = u32::try_from(self.number).unwrap_or(u32::MAX);
            sleep(APART.saturating_mul(turn)).await;
        }
        while !stop.load(Ordering::Relaxed) {
            let sent = Instant::now();
            match self.upload(&stop).await {
                ExchangeOutcome::Left => seen.left += 1,
                ExchangeOutcome::Received(received) => seen.exchanges.push(Exchange {
                    sent,
                    ended: Instant::now(),
                    ending: received.judge(EXPECTED),
                    fit: Fit::Sound,
                    conduct: Conduct::Bad,
                }),
            }
            if self.kind != UploadKind::Trickles {
                break;
            }
            sleep(AGAIN).await;
        }
        seen
    }

    async fn upload(&self, stop: &AtomicBool) -> ExchangeOutcome {
        let sent = Arc::new(Notify::new());
        let leaving = async {
            match self.kind {
                UploadKind::Trickles => until(stop).await,
                UploadKind::Leaves(stay) => {
                    sent.notified().await;
                    sleep(stay).await;
                }
            }
        };
        tokio::select! {
            received = self.ask(&sent) => ExchangeOutcome::Received(received),
            () = leaving => ExchangeOutcome::Left,
        }
    }

    /// One request over a connection that is dropped with the future.
    async fn ask(&self, sent: &Arc<Notify>) -> ReceivedAnswer {
        match self.exchange(sent).await {
            Ok(received) => received,
            Err(why) => ReceivedAnswer::nothing(AnswerEnd::Broken(why)),
        }
    }

    async fn exchange(&self, sent: &Arc<Notify>) -> Result<ReceivedAnswer, String> {
        let stream = TcpStream::connect(self.to).await.map_err(in_words)?;
        let (length, pieces) = self.body();
        let (sent, mut left) = (Arc::clone(sent), length);
        let frames = pieces.map(move |piece| {
            left = left.saturating_sub(piece.len());
            if left == 0 {
                sent.notify_one();
            }
            Ok::<_, Infallible>(Frame::data(piece))
        });
        let request = Request::post("/v1/chat/completions")
            .header(HOST, self.to.to_string())
            .header(CONTENT_TYPE, "application/json")
            .header(CONTENT_LENGTH, length)
            .body(StreamBody::new(Box::pin(frames)))
            .map_err(in_words)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(in_words)?;
        let asking = async {
            let response = sender.send_request(request).await.map_err(in_words)?;
            let mut reader = AnswerReader::of(response, ClientBehaviour::GOOD);
            let deadline = tokio::time::Instant::now() + PATIENCE;
            let end = reader
                .read_to_end(deadline)
                .await
                .unwrap_or(AnswerEnd::Never);
            Ok(reader.received(end))
        };
        let connection = async {
            // The request itself reports the connection's end.
            let _ = connection.await;
            std::future::pending().await
        };
        tokio::select! {
            received = asking => received,
            never = connection => never,
        }
    }

    /// Length of the body, and the body.
    fn body(&self) -> (usize, std::pin::Pin<Box<dyn Stream<Item = Bytes> + Send>>) {
        match self.kind {
            UploadKind::Trickles => {
                let drops = stream::repeat(Bytes::from_static(b" ")).then(async |drop| {
                    sleep(DROP).await;
                    drop
                });
                (TRICKLE, Box::pin(pieces(FILLER.clone()).chain(drops)))
            }
            UploadKind::Leaves(_) => {
                let head = self.head();
                let length = head.len() + TAIL.len();
                let body = pieces(head).chain(pieces(TAIL.clone()));
                (length, Box::pin(body))
            }
        }
    }

    /// The start of a long body: no two share a prefix.
    fn head(&self) -> Bytes {
        let text = format!("{} of long prompts", self.number).repeat(TEXT / 16);
        let text = json!({"type": "text", "text": text.get(..TEXT)});
        let head = format!(
            r#"{{"model":"{MODEL}","max_tokens":{TOKENS},"messages":[{{"role":"user","content":[{text},{{"type":"image_url","image_url":{{"url":"data:image/png;base64,"#
        );
        head.into()
    }
}

const TOKENS: u64 = 4;

/// Expected answer to a long body if its client has not left before.
const EXPECTED: ExpectedAnswer = ExpectedAnswer {
    shape: AnswerShape::Chat,
    delivery: Delivery::Unstreamed,
    tokens: TOKENS,
};

fn stay(number: usize) -> Duration {
    let stay = STAYS.get(number % STAYS.len());
    Duration::from_millis(stay.copied().unwrap_or_default())
}

fn pieces(whole: Bytes) -> impl Stream<Item = Bytes> + Send {
    let starts = stream::iter((0..whole.len()).step_by(PIECE));
    starts.map(move |start| whole.slice(start..whole.len().min(start + PIECE)))
}

async fn until(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;

    use super::*;

    fn all(mix: ClientMix) -> Vec<Uploader> {
        Uploader::of(mix, SocketAddr::from(([127, 0, 0, 1], 1)))
    }

    #[tokio::test]
    async fn a_long_body_is_json_of_thirty_megabytes_and_none_is_like_another() {
        let leavers = all(ClientMix::WithLongPrompts);
        assert_eq!(leavers.len(), LEAVERS);
        let (length, body) = leavers[7].body();
        let body: Vec<u8> = body.collect::<Vec<_>>().await.concat();
        assert_eq!(body.len(), length);
        assert!((LONG..32 * 1024 * 1024).contains(&length));
        let read: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let text = read["messages"][0]["content"][0]["text"].as_str().unwrap();
        assert_eq!(text.len(), TEXT);
        let mut heads: Vec<_> = leavers.iter().map(Uploader::head).collect();
        heads.sort();
        heads.dedup();
        assert_eq!(heads.len(), LEAVERS);
    }

    #[test]
    fn two_hundred_trickle_more_than_may_be_in_flight_on_two_threads() {
        let tricklers = all(ClientMix::WithTricklers);
        assert_eq!(tricklers.len(), TRICKLERS);
        let shipped = routing::config::Limits::default();
        assert!(TRICKLERS * BURST > 2 * shipped.bodies_in_flight_bytes);
        assert!(all(ClientMix::Patient).is_empty());
    }
}
