//! Owns `--instant`: prepared answers, for measuring what stands in front of an engine. Nothing is checked, computed or held; the
//! request is searched for the few words on which the form of an answer depends.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response, StatusCode};
use memchr::memmem::Finder;
use tokio::time::{Instant, Sleep, sleep_until};

use super::Role;
use super::body::{self, BrokenOff};
use super::refusal::Refusal;
use super::request::Endpoint;

/// Markers of a streamed request, anywhere in its body: compact, and with a space.
const STREAM: [&str; 2] = [r#""stream":true"#, r#""stream": true"#];
/// Marker of the token limit: digits follow, after a space or not.
const LIMIT: &str = r#""max_tokens":"#;

/// Tokens of an answer without a limit, as in the other engines.
const DEFAULT_TOKENS: u64 = 16;
/// Maximum tokens of an answer, whatever its limit.
const MOST_TOKENS: u64 = 1 << 20;

/// Settings of an instant engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstantSettings {
    /// Time between two events of a stream; zero: as fast as they can be sent, each separately.
    pub gap: Duration,
}

/// The prepared pieces of answers.
pub struct PreparedAnswers {
    stream: [Finder<'static>; 2],
    limit: Finder<'static>,
    whole: [Bytes; 2],
    events: [Events; 2],
    gap: Duration,
}

/// The events of a stream.
#[derive(Clone)]
struct Events {
    opening: Option<Bytes>,
    token: Bytes,
    closing: Bytes,
}

impl PreparedAnswers {
    /// The answers for this model in this role.
    pub fn new(how: InstantSettings, role: Role, model: &str) -> Self {
        let handoff = match role {
            Role::Prefill => HANDOFF,
            Role::Decode | Role::Aggregated => "",
        };
        Self {
            stream: STREAM.map(Finder::new),
            limit: Finder::new(LIMIT),
            whole: [
                written("chat.completion", model, CHAT_CHOICE, handoff),
                written("text_completion", model, TEXT_CHOICE, handoff),
            ],
            events: [
                Events {
                    opening: Some(event("chat.completion.chunk", model, CHAT_OPENING)),
                    token: event("chat.completion.chunk", model, CHAT_DELTA),
                    closing: closing("chat.completion.chunk", model, CHAT_CLOSING),
                },
                Events {
                    opening: None,
                    token: event("text_completion", model, TEXT_DELTA),
                    closing: closing("text_completion", model, TEXT_CLOSING),
                },
            ],
            gap: how.gap,
        }
    }

    /// Reads a request to its end and answers it.
    ///
    /// # Errors
    /// [`Refusal::BadRequest`] if the body is incomplete.
    pub async fn serve(
        &self,
        endpoint: Endpoint,
        request: Request<Incoming>,
    ) -> Result<Response<body::Body>, Refusal> {
        let content = request.into_body().collect().await;
        let content = content
            .map_err(|error| Refusal::BadRequest(format!("Body not read: {error}")))?
            .to_bytes();
        let which = match endpoint {
            Endpoint::Chat => 0,
            Endpoint::Completions => 1,
            Endpoint::Responses | Endpoint::Generate => {
                let what = "an instant engine knows chat completions and completions only";
                return Err(Refusal::BadRequest(what.into()));
            }
        };
        if !self.stream.iter().any(|word| word.find(&content).is_some()) {
            return Ok(body::json(StatusCode::OK, self.whole[which].clone()));
        }
        Ok(body::ready(Stream {
            events: self.events[which].clone(),
            left: self.tokens(&content),
            next: Next::Opening,
            gap: self.gap,
            timer: None,
        }))
    }

    fn tokens(&self, content: &[u8]) -> u64 {
        let Some(at) = self.limit.find(content) else {
            return DEFAULT_TOKENS;
        };
        let digits = content[at + LIMIT.len()..].trim_ascii_start();
        let digits = digits.iter().take_while(|byte| byte.is_ascii_digit());
        digits
            .fold(0, |number: u64, digit| {
                number
                    .saturating_mul(10)
                    .saturating_add(u64::from(digit - b'0'))
            })
            .min(MOST_TOKENS)
    }
}

/// The body of a stream: each event is written to the client separately.
pub struct Stream {
    events: Events,
    left: u64,
    next: Next,
    gap: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Opening,
    Token,
    /// Lets sent bytes leave before the next event is there: the server flushes when it has to wait.
    Pause,
    Closing,
    End,
}

impl hyper::body::Body for Stream {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        loop {
            let event = match self.next {
                Next::Opening => {
                    self.next = Next::Token;
                    match self.events.opening.clone() {
                        Some(opening) => opening,
                        None => continue,
                    }
                }
                Next::Token if self.left == 0 => {
                    self.next = Next::Closing;
                    continue;
                }
                Next::Token => {
                    self.left -= 1;
                    self.next = if self.left > 0 {
                        Next::Pause
                    } else {
                        Next::Closing
                    };
                    self.events.token.clone()
                }
                Next::Pause => {
                    if self.pause(context).is_pending() {
                        return Poll::Pending;
                    }
                    continue;
                }
                Next::Closing => {
                    self.next = Next::End;
                    self.events.closing.clone()
                }
                Next::End => return Poll::Ready(None),
            };
            return Poll::Ready(Some(Ok(Frame::data(event))));
        }
    }
}

impl Stream {
    fn pause(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.gap.is_zero() {
            self.next = Next::Token;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let gap = self.gap;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + gap)));
        if timer.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        // From the due time, so that a late timer delays one event and not all that follow.
        let due = timer.deadline() + gap;
        timer.as_mut().reset(due);
        self.next = Next::Token;
        Poll::Ready(())
    }
}

const CHAT_CHOICE: &str = r#"{"index":0,"message":{"role":"assistant","content":"token0"},"logprobs":null,"finish_reason":"length"}"#;
const CHAT_OPENING: &str =
    r#"{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}"#;
const CHAT_DELTA: &str =
    r#"{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}"#;
const CHAT_CLOSING: &str =
    r#"{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"length"}"#;
const TEXT_CHOICE: &str = r#"{"index":0,"text":"token0","logprobs":null,"finish_reason":"length"}"#;
const TEXT_DELTA: &str = r#"{"index":0,"text":" token","logprobs":null,"finish_reason":null}"#;
const TEXT_CLOSING: &str = r#"{"index":0,"text":"","logprobs":null,"finish_reason":"length"}"#;

/// A hand-off in the form of vLLM's NixlConnector, of a prompt of 48 tokens.
const HANDOFF: &str = r#","kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"3f1d2a60-instant","remote_request_id":"chatcmpl-instant","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}"#;

const USAGE: &str = r#"{"prompt_tokens":48,"total_tokens":49,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}"#;

fn written(object: &str, model: &str, choice: &str, handoff: &str) -> Bytes {
    let model = serde_json::Value::from(model);
    format!(
        r#"{{"id":"chatcmpl-instant","object":"{object}","created":1700000000,"model":{model},"choices":[{choice}],"usage":{USAGE}{handoff}}}"#
    )
    .into()
}

fn event(object: &str, model: &str, choice: &str) -> Bytes {
    let model = serde_json::Value::from(model);
    format!(
        "data: {{\"id\":\"chatcmpl-instant\",\"object\":\"{object}\",\"created\":1700000000,\"model\":{model},\"choices\":[{choice}]}}\n\n"
    )
    .into()
}

fn closing(object: &str, model: &str, choice: &str) -> Bytes {
    let mut last = event(object, model, choice).to_vec();
    last.extend_from_slice(b"data: [DONE]\n\n");
    last.into()
}
