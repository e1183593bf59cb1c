//! Owns what an answer tells while it flows: its first token, how many there are, and whether it has ended well.
//!
//! A stream of server-sent events is read event by event, however the bytes are cut. An event that carries text, reasoning
//! or a tool call is a token, at least; one that carries only a role is none. Where `usage` counts the tokens, its count is
//! believed. An answer in one piece has its first token with its first byte. An event of a shape that is not known counts as
//! a token: a worker must not be blamed for what is not understood here.

mod event;
mod model_name;
mod rewriter;

pub use rewriter::{EventEdit, Rewriter};

use event::Event;
use memchr::memchr;

/// A line longer than this, in bytes, is not read; it counts as one token. Far beyond any chunk of text.
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
    has_answered: bool,
    has_failed: bool,
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
            has_answered: false,
            has_failed: false,
            is_done: false,
        }
    }

    /// Whether the first token has come.
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether it says anything at all: a token, why it ended, or what went wrong; in one piece a byte.
    pub fn has_answered(&self) -> bool {
        self.has_begun || self.has_answered
    }

    /// Whether it says that something went wrong, and has said nothing else.
    pub fn is_error_alone(&self) -> bool {
        self.has_failed && !self.has_begun
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
        while let Some(end) = memchr(b'\n', bytes) {
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
        // Mostly a line comes whole, and is read where it lies.
        if self.line.is_empty() && !self.skips && head.len() <= MAX_EVENT {
            return self.event(head);
        }
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
        if data.is_empty() {
            return;
        }
        let Ok(event) = serde_json::from_slice::<Event<'_>>(data) else {
            self.count(1);
            return;
        };
        self.count(event.tokens());
        self.has_answered |= event.is_last_word();
        self.has_failed |= event.is_error();
        self.is_done |= event.ends_responses();
        if let Some(told) = event.usage() {
            self.has_answered |= told > 0;
            self.told = Some(told);
        }
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
    fn an_error_alone_is_told_from_one_after_a_token() {
        let error = b"data: {\"error\":{\"message\":\"no\"}}\n\n";
        assert!(read(&[error]).is_error_alone());
        assert!(!read(&[CHAT.as_bytes(), error]).is_error_alone());
        assert!(!read(&[b": ping\n\n"]).is_error_alone());
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
    fn generate_is_read_too() {
        let begun = b"data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":null,\"completion_tokens\":0}}\n\n";
        let watch = read(&[begun]);
        assert!(!watch.has_begun() && !watch.has_answered());
        let watch = read(&[
            begun,
            b"data: {\"text\":\"ab\",\"meta_info\":{\"finish_reason\":null,\"completion_tokens\":2}}\n\n",
            b"data: {\"text\":\"abc\",\"meta_info\":{\"finish_reason\":{\"type\":\"stop\"},\"completion_tokens\":3}}\n\n",
            b"data: [DONE]\n\n",
        ]);
        assert!(watch.has_begun() && watch.is_done());
        assert_eq!(watch.tokens(), 3);
        let ids = read(&[b"data: {\"output_ids\":[7],\"meta_info\":{}}\n\n"]);
        assert_eq!(ids.tokens(), 1);
    }

    #[test]
    fn an_answer_that_says_nothing_is_told_from_one_that_does() {
        for (event, answered, tokens) in [
            (": ping", false, 0),
            ("event: ping", false, 0),
            ("data:", false, 0),
            ("data: [DONE]", false, 0),
            (r#"data: {"choices":[]}"#, false, 0),
            (
                r#"data: {"choices":[],"usage":{"prompt_tokens":1}}"#,
                false,
                0,
            ),
            (
                r#"data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":null}]}"#,
                false,
                0,
            ),
            (
                r#"data: {"type":"response.created","response":{}}"#,
                false,
                0,
            ),
            (r#"data: {"type":"response.output_item.added"}"#, false, 0),
            (
                r#"data: {"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
                true,
                0,
            ),
            (
                r#"data: {"choices":[{"text":"","finish_reason":"length"}]}"#,
                true,
                0,
            ),
            (
                r#"data: {"text":"","meta_info":{"finish_reason":{"type":"abort"}}}"#,
                true,
                0,
            ),
            (r#"data: {"error":{"message":"no"}}"#, true, 0),
            (r#"data: {"error":"no"}"#, true, 0),
            (r#"data: {"object":"error","message":"no"}"#, true, 0),
            (r#"data: {"type":"error","message":"no"}"#, true, 0),
            (r#"data: {"type":"response.failed","response":{}}"#, true, 0),
            (
                r#"data: {"type":"response.completed","response":{}}"#,
                true,
                0,
            ),
            (
                r#"data: {"choices":[],"usage":{"completion_tokens":0}}"#,
                false,
                0,
            ),
            (r#"data: {"choices":[{"text":"a"}]}"#, true, 1),
            (r#"data: {"type":"content_block_delta"}"#, true, 1),
            (r#"data: {"answer":"a"}"#, true, 1),
            (r#"data: {"text":"a"}"#, true, 1),
            (r#"data: {"choices":"a"}"#, true, 1),
            ("data: 7", true, 1),
            ("data: plain text", true, 1),
            ("data: {\"cut", true, 1),
        ] {
            let watch = read(&[event.as_bytes(), b"\n\n"]);
            assert_eq!(
                (watch.has_answered(), watch.tokens()),
                (answered, tokens),
                "{event}"
            );
            assert_eq!(watch.has_begun(), tokens > 0, "{event}");
        }
        let counted = read(&[b"data: {\"choices\":[],\"usage\":{\"completion_tokens\":2}}\n\n"]);
        assert!(counted.has_answered() && !counted.has_begun());
        let incomplete = read(&[b"data: {\"type\":\"response.incomplete\"}\n\n"]);
        assert!(incomplete.is_done());
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
        assert!(!watch.has_begun() && !watch.has_answered());
        watch.read(b"{");
        assert!(watch.has_begun() && watch.has_answered());
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
