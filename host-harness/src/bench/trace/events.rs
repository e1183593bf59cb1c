//! Owns the parser of a streamed chat completion: whether text has come, and whether the answer is complete.

use pd_harness_common::sse::EventReader;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// State of the parsed stream.
#[derive(Default)]
pub struct StreamReader {
    events: EventReader,
    text: bool,
    /// Whether the answer gave its finish reason.
    finished: bool,
    failed: bool,
    done: bool,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct Delta {
    content: Option<String>,
}

impl StreamReader {
    /// Reads a piece of the body, cut at any byte.
    pub fn read(&mut self, piece: &[u8]) {
        for event in self.events.read(piece) {
            // A comment, sent to keep connections open, has no data.
            if let Some(data) = event.data {
                self.add(&data);
            }
        }
    }

    /// Whether an event had text.
    pub fn has_text(&self) -> bool {
        self.text
    }

    /// Whether the stream ended like a complete answer: with a reason, and `[DONE]` last.
    pub fn is_whole(&self) -> bool {
        self.done && self.finished && !self.failed && !self.events.has_rest()
    }

    fn add(&mut self, data: &str) {
        if data == "[DONE]" {
            self.failed |= self.done;
            self.done = true;
            return;
        }
        match serde_json::from_str(data) {
            Ok(Chunk {
                error: None,
                choices,
            }) => self.choices(&choices),
            Ok(Chunk { error: Some(_), .. }) | Err(_) => self.failed = true,
        }
        self.failed |= self.done;
    }

    fn choices(&mut self, choices: &[Choice]) {
        for choice in choices {
            let content = choice.delta.content.as_deref();
            self.text |= content.is_some_and(|text| !text.is_empty());
            self.finished |= choice.finish_reason.is_some();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLE: &str = r#"data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
    const TEXT: &str =
        r#"data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}"#;
    const LAST: &str =
        r#"data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"length"}]}"#;
    const USAGE: &str = r#"data: {"choices":[],"usage":{"prompt_tokens":1}}"#;
    const ERROR: &str = r#"data: {"error":{"message":"gone"}}"#;
    const DONE: &str = "data: [DONE]";

    fn read(events: &[&str]) -> StreamReader {
        let mut reader = StreamReader::default();
        for event in events {
            reader.read(format!("{event}\n\n").as_bytes());
        }
        reader
    }

    #[test]
    fn text_is_seen_when_it_comes_however_the_stream_is_cut() {
        assert!(!read(&[ROLE]).has_text());
        assert!(read(&[ROLE, TEXT]).has_text());
        let stream = [ROLE, TEXT, ": ping", LAST, USAGE, DONE, ""].join("\n\n");
        let mut reader = StreamReader::default();
        for byte in stream.as_bytes() {
            assert!(!reader.is_whole());
            reader.read(&[*byte]);
        }
        assert!(reader.is_whole() && reader.has_text());
    }

    #[test]
    fn an_answer_is_whole_when_it_says_so() {
        assert!(read(&[ROLE, TEXT, LAST, USAGE, DONE]).is_whole());
        let not_whole: [&[&str]; 7] = [
            &[],
            &[ROLE, TEXT, LAST],
            &[ROLE, TEXT, DONE],
            &[ROLE, TEXT, ERROR, DONE],
            &[ROLE, TEXT, LAST, ERROR, DONE],
            &[ROLE, TEXT, LAST, DONE, TEXT],
            &[r#"{"object":"chat.completion"}"#, DONE],
        ];
        for events in not_whole {
            assert!(!read(events).is_whole(), "{events:?}");
        }
        let mut reader = read(&[ROLE, LAST, DONE]);
        reader.read(b"data: {");
        assert!(!reader.is_whole());
    }
}
