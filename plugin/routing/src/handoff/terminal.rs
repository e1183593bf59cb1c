//! Owns the prefill answer that is already the whole answer: generation ended by itself at the first token.
//!
//! Such an answer carries no hand-off, since nothing is left to decode. It is the client's, without the fields of the
//! transfer, as JSON or, where a stream was asked for, as events that say the same.

use serde_json::{Value, json};

use crate::json::Object;

/// Fields of a transfer, which are no client's business.
const TRANSFER_FIELDS: &[&str] = &["kv_transfer_params", "disaggregated_params"];

/// A prefill answer that ended by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terminal {
    /// The answer's type.
    pub content_type: &'static str,
    /// The answer.
    pub body: Vec<u8>,
}

/// How the client asked for its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One JSON document.
    Whole,
    /// Server-sent events.
    Stream {
        /// Whether they end with the usage.
        usage: bool,
    },
}

impl Terminal {
    /// The whole answer; none where the length limit ended it (then the missing hand-off is a failure), or where it is
    /// no answer.
    pub fn read(answer: &[u8], form: Form) -> Option<Self> {
        let object = Object::parse(answer, TRANSFER_FIELDS).ok()?;
        let value: Value = serde_json::from_slice(answer).ok()?;
        if !ended_by_itself(&value) {
            return None;
        }
        match form {
            Form::Whole => {
                let mut edits = object.edit();
                for name in TRANSFER_FIELDS {
                    object.all(name).for_each(|member| edits.remove(member));
                }
                Some(Self {
                    content_type: "application/json",
                    body: edits.apply(answer),
                })
            }
            Form::Stream { usage } => Some(Self {
                content_type: "text/event-stream",
                body: events(&value, usage)?.into_bytes(),
            }),
        }
    }
}

/// Every choice has a reason to have ended, and none of them is the length limit.
fn ended_by_itself(answer: &Value) -> bool {
    let Some(choices) = answer.get("choices").and_then(Value::as_array) else {
        return false;
    };
    let ended = |choice: &Value| {
        let reason = choice.get("finish_reason").and_then(Value::as_str);
        reason.is_some_and(|reason| reason != "length")
    };
    !choices.is_empty() && choices.iter().all(ended)
}

/// The answer as a stream would have brought it: one chunk, the usage where it was asked for, and the end.
fn events(answer: &Value, usage: bool) -> Option<String> {
    let choices = answer.get("choices")?.as_array()?;
    let object = match answer.get("object").and_then(Value::as_str) {
        Some("chat.completion") => "chat.completion.chunk",
        Some(other) => other,
        None => "text_completion",
    };
    let chunk = |choices: Vec<Value>, usage: Value| {
        let field = |name: &str| answer.get(name).cloned().unwrap_or(Value::Null);
        json!({"id": field("id"), "object": object, "created": field("created"), "model": field("model"),
               "choices": choices, "usage": usage})
    };
    let mut text = format!(
        "data: {}\n\n",
        chunk(choices.iter().map(as_delta).collect(), Value::Null)
    );
    if let Some(counted) = answer.get("usage").filter(|_| usage) {
        text.push_str(&format!("data: {}\n\n", chunk(Vec::new(), counted.clone())));
    }
    text.push_str("data: [DONE]\n\n");
    Some(text)
}

/// In a stream a message is called a delta.
fn as_delta(choice: &Value) -> Value {
    let mut choice = choice.clone();
    if let Some(fields) = choice.as_object_mut()
        && let Some(message) = fields.remove("message")
    {
        fields.insert("delta".to_owned(), message);
    }
    choice
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &str = r#"{"id":"c1","object":"chat.completion","created":9007199254740993,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"No."},"finish_reason":"stop"}],"usage":{"total_tokens":3}, "kv_transfer_params":null}"#;

    #[test]
    fn the_answer_goes_out_as_it_is_without_the_transfer() {
        let terminal = Terminal::read(CHAT.as_bytes(), Form::Whole).unwrap();
        let expected = CHAT.replace(r#", "kv_transfer_params":null"#, "");
        assert_eq!(String::from_utf8(terminal.body).unwrap(), expected);
    }

    #[test]
    fn a_stream_says_the_same_and_ends() {
        let terminal = Terminal::read(CHAT.as_bytes(), Form::Stream { usage: true }).unwrap();
        assert_eq!(terminal.content_type, "text/event-stream");
        let text = String::from_utf8(terminal.body).unwrap();
        let events: Vec<&str> = text.split_terminator("\n\n").collect();
        assert_eq!(events.len(), 3);
        let first: Value = serde_json::from_str(events[0].strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(first["object"], "chat.completion.chunk");
        assert_eq!(first["choices"][0]["delta"]["content"], "No.");
        assert_eq!(first["choices"][0]["finish_reason"], "stop");
        assert!(events[1].contains(r#""usage":{"total_tokens":3}"#));
        assert_eq!(events[2], "data: [DONE]");
        let without = Terminal::read(CHAT.as_bytes(), Form::Stream { usage: false }).unwrap();
        assert_eq!(
            String::from_utf8(without.body)
                .unwrap()
                .matches("data: ")
                .count(),
            2
        );
    }

    #[test]
    fn what_the_length_limit_ended_is_not_an_answer() {
        for body in [
            CHAT.replace(r#""stop""#, r#""length""#),
            CHAT.replace(r#""stop""#, "null"),
            r#"{"choices":[]}"#.to_owned(),
            "{}".to_owned(),
            "[]".to_owned(),
            "oops".to_owned(),
        ] {
            assert_eq!(Terminal::read(body.as_bytes(), Form::Whole), None, "{body}");
        }
    }
}
