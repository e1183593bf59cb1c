//! Owns what an answer tells while it flows: its first token, how many there are, and whether it has ended well.
//!
//! A stream of server-sent events is read event by event, however the bytes are cut. An event that carries text, reasoning
//! or a tool call is a token, at least; one that carries only a role is none. Where `usage` counts the tokens, its count is
//! believed. An answer in one piece has its first token with its first byte.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;

/// An event longer than this is not read; it counts as one token. Far beyond any chunk of text.
const MAX_EVENT: usize = 64 * 1024;

/// How an answer comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As server-sent events.
    Events,
    /// In one piece.
    Whole,
}

impl Form {
    /// The form that a `content-type` names.
    pub fn of(content_type: &[u8]) -> Self {
        let events = b"text/event-stream";
        let begins = content_type.get(..events.len());
        match begins.is_some_and(|kind| kind.eq_ignore_ascii_case(events)) {
            true => Self::Events,
            false => Self::Whole,
        }
    }
}

/// Reads along.
#[derive(Debug)]
pub struct Watch {
    form: Form,
    /// The beginning of a line whose end has not come.
    line: Vec<u8>,
    /// Whether the line is too long to be kept.
    skips: bool,
    counted: u64,
    told: Option<u64>,
    has_begun: bool,
    is_done: bool,
}

impl Watch {
    /// An answer of which nothing has come.
    pub fn new(form: Form) -> Self {
        Self {
            form,
            line: Vec::new(),
            skips: false,
            counted: 0,
            told: None,
            has_begun: false,
            is_done: false,
        }
    }

    /// Whether the first token has come.
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether the event that ends a stream well has come.
    pub fn is_done(&self) -> bool {
        self.is_done
    }

    /// Tokens so far: what `usage` says, else the events that carried any.
    pub fn tokens(&self) -> u64 {
        self.told.unwrap_or(0).max(self.counted)
    }

    /// Takes the next bytes.
    pub fn read(&mut self, mut bytes: &[u8]) {
        if self.form == Form::Whole {
            self.has_begun |= !bytes.is_empty();
            return;
        }
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (head, rest) = bytes.split_at(end);
            self.end_line(head);
            bytes = rest.get(1..).unwrap_or_default();
        }
        self.keep(bytes);
    }

    fn keep(&mut self, part: &[u8]) {
        if self.skips || self.line.len().saturating_add(part.len()) > MAX_EVENT {
            self.skips = true;
            self.line.clear();
            return;
        }
        self.line.extend_from_slice(part);
    }

    fn end_line(&mut self, head: &[u8]) {
        self.keep(head);
        let line = std::mem::take(&mut self.line);
        if std::mem::take(&mut self.skips) {
            self.count(1);
        } else {
            self.event(&line);
        }
        self.line = line;
        self.line.clear();
    }

    fn count(&mut self, tokens: u64) {
        self.counted = self.counted.saturating_add(tokens);
        self.has_begun |= tokens > 0;
    }

    fn event(&mut self, line: &[u8]) {
        let Some(data) = line.strip_prefix(b"data:") else {
            return;
        };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.is_done = true;
            return;
        }
        let Ok(event) = serde_json::from_slice::<Event<'_>>(data) else {
            return;
        };
        self.count(event.tokens());
        self.is_done |= event.ends_responses();
        if let Some(told) = event.usage() {
            self.told = Some(told);
        }
    }
}

/// What of an event counts: of chat completions and completions the choices, of responses the delta.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow, default, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    response: Option<Response>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    text: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    reasoning: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    refusal: Option<Cow<'a, str>>,
    #[serde(default)]
    tool_calls: Option<Vec<IgnoredAny>>,
}

#[derive(Deserialize)]
struct Response {
    #[serde(default)]
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    output_tokens: Option<u64>,
}

impl Choice<'_> {
    fn carries_a_token(&self) -> bool {
        let has = |text: &Option<Cow<'_, str>>| text.as_ref().is_some_and(|text| !text.is_empty());
        let delta = self.delta.as_ref();
        has(&self.text)
            || delta.is_some_and(|delta| {
                has(&delta.content)
                    || has(&delta.reasoning_content)
                    || has(&delta.reasoning)
                    || has(&delta.refusal)
                    || delta
                        .tool_calls
                        .as_ref()
                        .is_some_and(|calls| !calls.is_empty())
            })
    }
}

impl Event<'_> {
    fn tokens(&self) -> u64 {
        let choices = self.choices.as_deref().unwrap_or_default();
        let carrying = choices
            .iter()
            .filter(|choice| choice.carries_a_token())
            .count() as u64;
        carrying.saturating_add(u64::from(self.is_kind(".delta")))
    }

    fn ends_responses(&self) -> bool {
        self.is_kind("response.completed")
    }

    fn is_kind(&self, end: &str) -> bool {
        let kind = self.kind.as_deref().unwrap_or_default();
        kind.starts_with("response.") && kind.ends_with(end)
    }

    fn usage(&self) -> Option<u64> {
        let inner = self
            .response
            .as_ref()
            .and_then(|response| response.usage.as_ref());
        let usage = self.usage.as_ref().or(inner)?;
        usage.completion_tokens.or(usage.output_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHAT: &str = concat!(
        ": a comment\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"hm\"}}]}\n\n",
        "data:{\"choices\":[{\"delta\":{\"content\":\"\\u00e9\"}}],\"usage\":null}\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
    );

    fn read(parts: &[&[u8]]) -> Watch {
        let mut watch = Watch::new(Form::Events);
        for part in parts {
            watch.read(part);
        }
        watch
    }

    #[test]
    fn a_chunk_that_carries_only_a_role_is_no_token() {
        let role = &CHAT[..CHAT
            .find("data: {\"choices\":[{\"delta\":{\"reasoning")
            .unwrap()];
        let watch = read(&[role.as_bytes()]);
        assert!(!watch.has_begun());
        assert_eq!(watch.tokens(), 0);
        let watch = read(&[CHAT.as_bytes()]);
        assert!(watch.has_begun() && !watch.is_done());
        assert_eq!(watch.tokens(), 3);
    }

    #[test]
    fn usage_is_believed_and_the_end_is_seen() {
        let usage = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":17}}\n\ndata: [DONE]\n\n";
        let watch = read(&[CHAT.as_bytes(), usage]);
        assert_eq!(watch.tokens(), 17);
        assert!(watch.is_done());
    }

    #[test]
    fn completions_and_responses_are_read_too() {
        let watch = read(&[b"data: {\"choices\":[{\"text\":\"a\"},{\"text\":\"b\"}]}\n\n"]);
        assert_eq!(watch.tokens(), 2);
        let watch = read(&[
            b"event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"usage\":null}}\n\n",
            b"data: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n",
            b"data: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"output_tokens\":5}}}\n\n",
        ]);
        assert_eq!(watch.tokens(), 5);
        assert!(watch.is_done());
    }

    #[test]
    fn a_line_without_end_takes_no_room_and_counts_as_one_token() {
        let mut watch = Watch::new(Form::Events);
        watch.read(b"data: ");
        for _ in 0..100 {
            watch.read(&[b'x'; 4096]);
            assert!(watch.line.len() <= MAX_EVENT);
        }
        watch.read(b"\n\ndata: {\"choices\":[{\"text\":\"a\"}]}\n\n");
        assert_eq!(watch.tokens(), 2);
    }

    #[test]
    fn an_answer_in_one_piece_begins_with_its_first_byte() {
        let mut watch = Watch::new(Form::of(b"application/json"));
        watch.read(b"");
        assert!(!watch.has_begun());
        watch.read(b"{");
        assert!(watch.has_begun());
        assert_eq!(Form::of(b"Text/Event-Stream; charset=utf-8"), Form::Events);
    }

    proptest! {
        #[test]
        fn it_does_not_matter_where_the_bytes_are_cut(cuts in proptest::collection::vec(0..CHAT.len(), 0..20)) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut watch = Watch::new(Form::Events);
            let mut from = 0;
            for cut in cuts {
                watch.read(&CHAT.as_bytes()[from..cut]);
                from = cut;
            }
            watch.read(&CHAT.as_bytes()[from..]);
            prop_assert_eq!(watch.tokens(), 3);
        }

        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let mut watch = Watch::new(Form::Events);
            for part in bytes.chunks(7) {
                watch.read(part);
            }
            prop_assert!(watch.line.len() <= MAX_EVENT);
        }
    }
}
