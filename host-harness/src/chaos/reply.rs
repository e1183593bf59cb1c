//! Owns the judgement of one answer: right, an engine's own error, a visible reset, or a deception. Pure.

use bytes::Bytes;
use pd_harness_common::sse::{Event, EventReader};
use serde_json::Value;

use super::asks::{AnswerShape, Delivery, ExpectedAnswer};
use super::scenario::{INJECTED, RETRY_AFTER, has_retry_after, injected_body};

/// What a client received, and how it ended.
#[derive(Clone, Debug)]
pub struct ReceivedAnswer {
    /// The head of the answer, if one came.
    pub head: Option<AnswerHead>,
    /// The received part of the body.
    pub body: Bytes,
    /// How the answer ended.
    pub end: AnswerEnd,
}

/// The head of an answer.
#[derive(Clone, Debug)]
pub struct AnswerHead {
    /// HTTP status.
    pub status: u16,
    /// `content-type`, empty where there is none.
    pub content_type: String,
    /// `retry-after`.
    pub retry_after: Option<String>,
}

/// End of a client's exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerEnd {
    /// Ended as HTTP requires.
    Clean,
    /// A connection error.
    Broken(String),
    /// No end within the client's patience.
    Never,
}

/// Outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The complete and right answer.
    Answered,
    /// An engine's own error, unchanged.
    EngineStatus(u16),
    /// A refusal by the gateway because of the body: too long, too slow, or too many at once; the last with `retry-after`.
    Refused(u16),
    /// The answer had begun, and then ended in a way that any client recognises as an error.
    Reset,
    /// The connection broke before the answer began, or an error says so; with the reason. This includes a reset after the
    /// gateway had received the answer's headers: it holds them back until there is something to read.
    Unbegun(String),
    /// Every other honest failure; with the reason.
    Failed(String),
    /// The answer looked complete or like an engine's own, and was not; with the reason.
    Deceived(String),
}

/// Suffix of a reason: the refusal has no `retry-after`.
pub const NO_HINT: &str = ", without retry-after";

/// Words of an engine that was sent to a hand-off a second time: no engine may be.
const USED_HANDOFF: &str = "already pulled";

/// Maximum bytes of a body that are repeated in a reason.
const SHOWN: usize = 120;

impl ReceivedAnswer {
    /// No answer at all.
    pub fn nothing(end: AnswerEnd) -> Self {
        Self {
            head: None,
            body: Bytes::new(),
            end,
        }
    }

    /// Outcome of a request whose expected answer is `expected`.
    pub fn judge(&self, expected: ExpectedAnswer) -> Ending {
        let Some(head) = &self.head else {
            return match &self.end {
                AnswerEnd::Never => Ending::Failed("no answer".to_owned()),
                AnswerEnd::Broken(why) => {
                    Ending::Unbegun(format!("the connection ended before an answer: {why}"))
                }
                AnswerEnd::Clean => {
                    Ending::Unbegun("the connection ended before an answer".to_owned())
                }
            };
        };
        if self.end == AnswerEnd::Never {
            return Ending::Failed(format!("{} that never ended", head.status));
        }
        match (head.status, expected.delivery) {
            (200, Delivery::Unstreamed) => self.judge_whole(expected),
            (200, Delivery::Stream) => self.judge_stream(head, expected),
            _ => self.judge_error(head),
        }
    }

    fn judge_whole(&self, expected: ExpectedAnswer) -> Ending {
        if self.end != AnswerEnd::Clean {
            return Ending::Reset;
        }
        let Ok(answer) = serde_json::from_slice::<Value>(&self.body) else {
            return Ending::Deceived(format!("200 with what is no JSON: {:?}", shown(&self.body)));
        };
        let choice = &answer["choices"][0];
        let text = match expected.shape {
            AnswerShape::Chat => &choice["message"]["content"],
            AnswerShape::Text => &choice["text"],
        };
        let right = *text == expected.text()
            && choice["finish_reason"] == "length"
            && answer["usage"]["completion_tokens"] == expected.tokens;
        match right {
            true => Ending::Answered,
            false => Ending::Deceived(format!("200 with a wrong answer: {:?}", shown(&self.body))),
        }
    }

    fn judge_stream(&self, head: &AnswerHead, expected: ExpectedAnswer) -> Ending {
        let seen = Events::read(&self.body, expected.shape);
        let whole = seen.text == expected.text() && seen.finished;
        let so_far = match (whole, seen.text.is_empty()) {
            (true, _) => "after the last token",
            (false, true) => "before the first token",
            (false, false) => "in the middle",
        };
        if seen.done
            && let Some(error) = &seen.error
        {
            return match error {
                // vLLM's end of a stream whose KV never came: its last word, where no other worker could be asked.
                EventError::Engine {
                    status: status @ 400..600,
                    message,
                } if seen.is_bare_error() && !message.contains(USED_HANDOFF) => {
                    Ending::EngineStatus(*status)
                }
                _ => Ending::Deceived(format!("[DONE] {so_far} after an error event: {error:?}")),
            };
        }
        if seen.done && !whole {
            return Ending::Deceived(format!("[DONE] {so_far}"));
        }
        if seen.error.is_some() || (self.end != AnswerEnd::Clean && !seen.done) {
            return Ending::Reset;
        }
        if !seen.done {
            return Ending::Deceived(format!("a clean end without [DONE] {so_far}"));
        }
        if seen.rest || !head.content_type.starts_with("text/event-stream") {
            return Ending::Deceived("a whole answer that is no stream of events".to_owned());
        }
        Ending::Answered
    }

    fn judge_error(&self, head: &AnswerHead) -> Ending {
        let status = head.status;
        if self.end != AnswerEnd::Clean {
            return Ending::Failed(format!("{status} that broke off"));
        }
        if shown(&self.body).contains(INJECTED) {
            return judge_injected(head, &self.body);
        }
        let error = serde_json::from_slice::<Value>(&self.body).unwrap_or_default();
        let code = match &error["error"] {
            Value::Object(error) => error.get("code"),
            _ => error.get("code"),
        };
        match code {
            // An engine's code is its status as a number; pd-router's is a word, and the proxy's own answers are no JSON.
            Some(Value::Number(code)) if code.as_u64() == Some(status.into()) => {
                Ending::EngineStatus(status)
            }
            Some(Value::String(code)) if code == "broken_off" => {
                Ending::Unbegun(format!("{status} {code}"))
            }
            Some(Value::String(code)) if is_over_the_body(head, code) => Ending::Refused(status),
            Some(Value::String(code)) => {
                let lacks_hint = has_retry_after(status) && head.retry_after.is_none();
                let hint = if lacks_hint { NO_HINT } else { "" };
                // A client's own error is one that these requests do not have: its words are needed to find the cause.
                let words = match status {
                    400..=499 => error["error"]["message"].as_str().unwrap_or_default(),
                    _ => "",
                };
                Ending::Failed(
                    format!("{status} {code}{hint} {words}")
                        .trim_end()
                        .to_owned(),
                )
            }
            _ => Ending::Failed(format!("{status} {:?}", shown(&self.body))),
        }
    }
}

fn is_over_the_body(head: &AnswerHead, code: &str) -> bool {
    match (head.status, code) {
        (413, "body_too_large") | (408, "body_timeout") => true,
        (503, "bodies_in_flight") => head.retry_after.is_some(),
        _ => false,
    }
}

/// An injected error must arrive unchanged.
fn judge_injected(head: &AnswerHead, body: &[u8]) -> Ending {
    let status = head.status;
    if body != injected_body(status).as_bytes() {
        return Ending::Deceived(format!(
            "an engine's error in other words or with another status: {status} {:?}",
            shown(body)
        ));
    }
    let hint = has_retry_after(status).then_some(RETRY_AFTER);
    if head.retry_after.as_deref() != hint {
        return Ending::Deceived(format!(
            "an engine's {status} with retry-after {:?}, not {hint:?}",
            head.retry_after
        ));
    }
    Ending::EngineStatus(status)
}

/// An error among the events of a stream.
#[derive(Debug)]
enum EventError {
    /// An engine's: its code is a status as a number, where the gateway's is a word.
    Engine {
        status: u16,
        message: String,
    },
    Other,
}

impl EventError {
    fn of(error: &Value) -> Self {
        let status = error["code"].as_u64().and_then(|code| code.try_into().ok());
        let message = error["message"].as_str();
        match (status, message) {
            (Some(status), Some(message)) => Self::Engine {
                status,
                message: message.to_owned(),
            },
            _ => Self::Other,
        }
    }
}

/// Content of a stream of events.
#[derive(Debug, Default)]
struct Events {
    text: String,
    finished: bool,
    error: Option<EventError>,
    done: bool,
    /// The stream had data that is no event, or an event after the last one.
    rest: bool,
}

impl Events {
    fn read(body: &[u8], shape: AnswerShape) -> Self {
        let mut seen = Self::default();
        let mut reader = EventReader::default();
        for event in reader.read(body) {
            seen.add(&event, shape);
        }
        seen.rest |= reader.has_rest();
        seen
    }

    /// Whether an error and the end are all that came.
    fn is_bare_error(&self) -> bool {
        self.text.is_empty() && !self.finished && !self.rest
    }

    fn note_error(&mut self, error: EventError) {
        // Of several, one that is no engine's counts.
        if !matches!(self.error, Some(EventError::Other)) {
            self.error = Some(error);
        }
    }

    fn add(&mut self, event: &Event, shape: AnswerShape) {
        self.rest |= self.done;
        if event.kind.as_deref() == Some("error") {
            self.note_error(EventError::Other);
        }
        let Some(data) = &event.data else {
            return;
        };
        if data == "[DONE]" {
            self.done = true;
            return;
        }
        let chunk = serde_json::from_str::<Value>(data).unwrap_or_default();
        if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
            self.note_error(EventError::of(error));
        }
        let choice = &chunk["choices"][0];
        let piece = match shape {
            AnswerShape::Chat => &choice["delta"]["content"],
            AnswerShape::Text => &choice["text"],
        };
        self.text.push_str(piece.as_str().unwrap_or_default());
        self.finished |= choice["finish_reason"] == "length";
    }
}

/// The start of a body, for people.
fn shown(body: &[u8]) -> String {
    String::from_utf8_lossy(body).chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: u64 = 2;

    fn expected(delivery: Delivery) -> ExpectedAnswer {
        ExpectedAnswer {
            shape: AnswerShape::Chat,
            delivery,
            tokens: TWO,
        }
    }

    fn received(status: u16, body: &str, end: AnswerEnd) -> ReceivedAnswer {
        ReceivedAnswer {
            head: Some(AnswerHead {
                status,
                content_type: "text/event-stream; charset=utf-8".to_owned(),
                retry_after: None,
            }),
            body: Bytes::copy_from_slice(body.as_bytes()),
            end,
        }
    }

    fn broken() -> AnswerEnd {
        AnswerEnd::Broken("reset".to_owned())
    }

    fn judge_stream(body: &str, end: AnswerEnd) -> Ending {
        received(200, body, end).judge(expected(Delivery::Stream))
    }

    fn judge_whole(body: &str, end: AnswerEnd) -> Ending {
        received(200, body, end).judge(expected(Delivery::Unstreamed))
    }

    fn deceived(ending: &Ending) -> bool {
        matches!(ending, Ending::Deceived(_))
    }

    fn failed(ending: &Ending) -> bool {
        matches!(ending, Ending::Failed(_))
    }

    const FIRST: &str = r#"data: {"choices":[{"delta":{"role":"assistant","content":"token0"},"finish_reason":null}]}

"#;
    const LAST: &str = r#"data: {"choices":[{"delta":{"content":" token1"},"finish_reason":"length"}]}

"#;
    const USAGE: &str = "data: {\"choices\":[],\"usage\":{}}\n\n";
    const ERROR: &str = "data: {\"error\":{\"message\":\"gone\"}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    #[test]
    fn a_whole_stream_is_answered() {
        let whole = [FIRST, LAST, USAGE, DONE].concat();
        assert_eq!(judge_stream(&whole, AnswerEnd::Clean), Ending::Answered);
        // A client that has received [DONE] does not wait for the end of the connection.
        assert_eq!(judge_stream(&whole, broken()), Ending::Answered);
        assert!(deceived(&judge_stream(
            &(whole.clone() + "x"),
            AnswerEnd::Clean
        )));
        assert!(deceived(&judge_stream(&(whole + DONE), AnswerEnd::Clean)));
    }

    #[test]
    fn a_truncated_stream_that_looks_clean_deceives() {
        for body in ["", FIRST, &[FIRST, LAST].concat()] {
            assert!(deceived(&judge_stream(body, AnswerEnd::Clean)), "{body}");
            assert_eq!(judge_stream(body, broken()), Ending::Reset, "{body}");
        }
    }

    #[test]
    fn done_after_an_error_or_after_too_little_deceives_however_it_ends() {
        for end in [AnswerEnd::Clean, broken()] {
            for body in [
                [FIRST, DONE].concat(),
                [FIRST, ERROR, DONE].concat(),
                DONE.to_owned(),
            ] {
                assert!(deceived(&judge_stream(&body, end.clone())), "{body}");
            }
        }
    }

    #[test]
    fn an_engines_own_failed_stream_is_its_error_and_nobody_elses() {
        const ROLE: &str =
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
        const ENGINES: &str =
            "data: {\"error\": {\"message\": \"KV load failed\", \"code\": 500}}\n\n";
        const TWICE: &str = "data: {\"error\": {\"message\": \"the blocks were already pulled\", \"code\": 500}}\n\n";
        const OURS: &str =
            "data: {\"error\":{\"message\":\"gone\",\"code\":\"prefill_failed\"}}\n\n";
        let end = |events: &[&str]| judge_stream(&events.concat(), AnswerEnd::Clean);
        assert_eq!(end(&[ROLE, ENGINES, DONE]), Ending::EngineStatus(500));
        for deceit in [
            &[ROLE, TWICE, DONE][..],
            &[ROLE, OURS, DONE],
            &[FIRST, ENGINES, DONE],
            &[ROLE, ENGINES, OURS, DONE],
            &[ROLE, ENGINES, DONE, ROLE],
        ] {
            assert!(deceived(&end(deceit)), "{deceit:?}");
        }
    }

    #[test]
    fn an_error_event_is_seen_as_an_error() {
        let named = "event: error\ndata: {}\n\n";
        for body in [[FIRST, ERROR].concat(), [FIRST, named].concat()] {
            assert_eq!(judge_stream(&body, broken()), Ending::Reset);
            assert_eq!(judge_stream(&body, AnswerEnd::Clean), Ending::Reset);
        }
    }

    #[test]
    fn a_whole_answer_must_have_every_token() {
        let answer = |text: &str, tokens: u64| {
            format!(
                r#"{{"choices":[{{"message":{{"content":"{text}"}},"finish_reason":"length"}}],"usage":{{"completion_tokens":{tokens}}}}}"#
            )
        };
        let right = answer("token0 token1", TWO);
        assert_eq!(judge_whole(&right, AnswerEnd::Clean), Ending::Answered);
        assert_eq!(judge_whole("{", broken()), Ending::Reset);
        for wrong in [
            String::new(),
            "{}".to_owned(),
            answer("token0", TWO),
            answer("token0 token1", 1),
        ] {
            assert!(deceived(&judge_whole(&wrong, AnswerEnd::Clean)), "{wrong}");
        }
    }

    #[test]
    fn an_engines_error_is_told_from_the_gateways() {
        let judge = |status, body: &str| {
            received(status, body, AnswerEnd::Clean).judge(expected(Delivery::Unstreamed))
        };
        let vllm = r#"{"error":{"message":"m","code":500}}"#;
        let sglang = r#"{"object":"error","message":"m","code":500}"#;
        assert_eq!(judge(500, vllm), Ending::EngineStatus(500));
        assert_eq!(judge(500, sglang), Ending::EngineStatus(500));
        assert!(failed(&judge(503, vllm)));
        assert!(failed(&judge(503, r#"{"error":{"code":"unreachable"}}"#)));
        assert!(failed(&judge(503, "no healthy upstream")));
        assert!(failed(
            &received(500, vllm, broken()).judge(expected(Delivery::Unstreamed))
        ));
    }

    #[test]
    fn a_refusal_over_the_body_says_when_to_come_again() {
        let judge = |status, code: &str, retry_after: Option<&str>| {
            let body = format!(r#"{{"error":{{"code":"{code}"}}}}"#);
            let mut received = received(status, &body, AnswerEnd::Clean);
            if let Some(head) = &mut received.head {
                head.retry_after = retry_after.map(str::to_owned);
            }
            received.judge(expected(Delivery::Unstreamed))
        };
        assert_eq!(judge(413, "body_too_large", None), Ending::Refused(413));
        assert_eq!(judge(408, "body_timeout", None), Ending::Refused(408));
        assert_eq!(
            judge(503, "bodies_in_flight", Some("1")),
            Ending::Refused(503)
        );
        assert!(failed(&judge(503, "bodies_in_flight", None)));
        assert!(failed(&judge(503, "unreachable", Some("1"))));
        assert!(failed(&judge(400, "body_too_large", None)));
    }

    #[test]
    fn an_injected_error_must_come_as_it_was_given() {
        let judge = |status, body: &str, retry_after: Option<&str>| {
            let mut received = received(status, body, AnswerEnd::Clean);
            if let Some(head) = &mut received.head {
                head.retry_after = retry_after.map(str::to_owned);
            }
            received.judge(expected(Delivery::Stream))
        };
        let body = injected_body(429);
        assert_eq!(
            judge(429, &body, Some(RETRY_AFTER)),
            Ending::EngineStatus(429)
        );
        assert!(deceived(&judge(429, &body, None)));
        assert!(deceived(&judge(429, &body, Some("1"))));
        assert!(deceived(&judge(500, &body, Some(RETRY_AFTER))));
        assert!(deceived(&judge(429, &(body + " "), Some(RETRY_AFTER))));
        assert_eq!(
            judge(500, &injected_body(500), None),
            Ending::EngineStatus(500)
        );
    }

    #[test]
    fn no_answer_and_no_end_are_failures() {
        let none = |end| ReceivedAnswer {
            head: None,
            body: Bytes::new(),
            end,
        };
        let unbegun = none(broken()).judge(expected(Delivery::Unstreamed));
        assert!(matches!(unbegun, Ending::Unbegun(_)), "{unbegun:?}");
        assert!(failed(
            &none(AnswerEnd::Never).judge(expected(Delivery::Unstreamed))
        ));
        assert!(failed(&judge_stream(FIRST, AnswerEnd::Never)));
    }
}
