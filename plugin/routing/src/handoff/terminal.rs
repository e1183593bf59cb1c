//! Owns the prefill answer that is already complete: generation ended by itself at the first token.
//!
//! Such an answer carries no hand-off, since nothing is left to decode. The client gets it without the fields of the
//! transfer, as JSON or, where the client requested a stream, as equivalent events.

mod events;

use crate::answer::{End, Verdict};
use crate::json::{each_edited, edited};
use crate::request::AnswerForm;
use crate::transfer::{DISAGGREGATED, IN_ANSWERS};

/// Token ids that TensorRT-LLM returns for decode. Other engines return them only on request.
const PROMPT_IDS: &str = "prompt_token_ids";

/// Longest answer, in bytes, that is converted to a stream: one token, and its log-probabilities.
const MAX_RETOLD: usize = 1024 * 1024;

/// A prefill answer that ended by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terminal {
    /// Content type of the answer.
    pub content_type: &'static str,
    /// Body of the answer.
    pub body: Vec<u8>,
}

impl Terminal {
    /// The complete answer; none where the length limit ended it (then a missing hand-off is a failure), where it is no
    /// answer, or where more than a megabyte would have to be streamed.
    pub fn read(answer: &[u8], form: AnswerForm) -> Option<Self> {
        if Verdict::of_prefill(answer) != Verdict::Ended(End::Itself) {
            return None;
        }
        let body = without_transfer(answer)?;
        match form {
            AnswerForm::Unstreamed => Some(Self {
                content_type: "application/json",
                body: body.into_bytes(),
            }),
            // Conversion holds the answer in memory many times over.
            AnswerForm::Stream { .. } if body.len() > MAX_RETOLD => None,
            AnswerForm::Stream { usage } => Some(Self {
                content_type: "text/event-stream",
                body: events::of(&serde_json::from_str(&body).ok()?, usage)?.into_bytes(),
            }),
        }
    }
}

/// The answer without the fields of the transfer, every other byte unchanged.
fn without_transfer(answer: &[u8]) -> Option<String> {
    let answer = std::str::from_utf8(answer).ok()?;
    let known = [IN_ANSWERS.as_slice(), &[PROMPT_IDS, "choices"]].concat();
    let params = DISAGGREGATED.name();
    edited(answer, &known, |object, edits| {
        let mut is_context = object.get(params).is_some();
        for member in object.all("choices") {
            let cleaned = each_edited(member.value, |_, choice| {
                let cleaned = choice_without_transfer(choice)?;
                is_context = true;
                Some(cleaned)
            });
            if let Some(cleaned) = cleaned {
                edits.replace(member, cleaned);
            }
        }
        let ids = is_context.then_some(PROMPT_IDS);
        for name in IN_ANSWERS.into_iter().chain(ids) {
            edits.remove_all(object, name);
        }
    })
}

/// A choice without TensorRT-LLM's parameters; none where the choice has none.
fn choice_without_transfer(choice: &str) -> Option<String> {
    let params = DISAGGREGATED.name();
    let mut is_there = false;
    let cleaned = edited(choice, &[params], |object, edits| {
        is_there = edits.remove_all(object, params);
    });
    cleaned.filter(|_| is_there)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::answer::Why;

    const CHAT: &str = r#"{"id":"c1","object":"chat.completion","created":9007199254740993,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"No."},"finish_reason":"stop"}],"usage":{"total_tokens":3}, "kv_transfer_params":null}"#;

    const RESPONSE: &str = r#"{"id":"r1","object":"response","status":"completed","output":[{"type":"reasoning","id":"i0","summary":[]},{"type":"message","id":"i1","role":"assistant","content":[{"type":"output_text","text":"No.","annotations":[]}]}],"usage":{"output_tokens":2},"kv_transfer_params":null}"#;

    fn whole(answer: &str) -> Option<String> {
        let terminal = Terminal::read(answer.as_bytes(), AnswerForm::Unstreamed)?;
        Some(String::from_utf8(terminal.body).unwrap())
    }

    fn stream(answer: &str, usage: bool) -> Vec<String> {
        let terminal = Terminal::read(answer.as_bytes(), AnswerForm::Stream { usage }).unwrap();
        assert_eq!(terminal.content_type, "text/event-stream");
        let text = String::from_utf8(terminal.body).unwrap();
        text.split_terminator("\n\n").map(str::to_owned).collect()
    }

    fn data(event: &str) -> Value {
        let (_, data) = event.split_once("data: ").unwrap();
        serde_json::from_str(data).unwrap()
    }

    #[test]
    fn the_answer_goes_out_as_it_is_without_the_transfer() {
        let expected = CHAT.replace(r#", "kv_transfer_params":null"#, "");
        assert_eq!(whole(CHAT).unwrap(), expected);
    }

    #[test]
    fn what_a_context_answers_for_decode_goes_wherever_it_stands() {
        let trtllm = r#"{"prompt_token_ids":[1,2],"choices":[ {"text":"x" ,"finish_reason":"stop", "disaggregated_params":{"ctx_request_id":null}} ],"usage":null}"#;
        let expected = r#"{"choices":[ {"text":"x" ,"finish_reason":"stop"} ],"usage":null}"#;
        assert_eq!(whole(trtllm).unwrap(), expected);
        assert!(
            !stream(trtllm, true)
                .concat()
                .contains("disaggregated_params")
        );
        // vLLM returns the ids because the client requested them.
        let vllm = r#"{"prompt_token_ids":[1,2],"choices":[{"finish_reason":"stop"}]}"#;
        assert_eq!(whole(vllm).unwrap(), vllm);
    }

    #[test]
    fn a_stream_says_the_same_and_ends() {
        let events = stream(CHAT, true);
        assert_eq!(events.len(), 3);
        let first = data(&events[0]);
        assert_eq!(first["object"], "chat.completion.chunk");
        assert_eq!(first["choices"][0]["delta"]["content"], "No.");
        assert_eq!(first["choices"][0]["finish_reason"], "stop");
        assert!(events[1].contains(r#""usage":{"total_tokens":3}"#));
        assert_eq!(events[2], "data: [DONE]");
        assert_eq!(stream(CHAT, false).len(), 2);
    }

    #[test]
    fn calls_in_a_stream_are_numbered() {
        let calls = CHAT.replace(
            r#""content":"No.""#,
            r#""tool_calls":[{"id":"a"},{"id":"b"}]"#,
        );
        let first = data(&stream(&calls, false)[0]);
        let calls = &first["choices"][0]["delta"]["tool_calls"];
        assert_eq!(
            (&calls[0]["index"], &calls[1]["index"]),
            (&Value::from(0), &Value::from(1))
        );
    }

    #[test]
    fn a_response_is_told_item_by_item() {
        assert_eq!(
            whole(RESPONSE).unwrap(),
            RESPONSE.replace(r#","kv_transfer_params":null"#, "")
        );
        let events = stream(RESPONSE, false);
        let kinds: Vec<Value> = events
            .iter()
            .map(|event| data(event)["type"].clone())
            .collect();
        assert_eq!(
            kinds,
            [
                "response.created",
                "response.output_item.added",
                "response.output_item.done",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.completed",
            ]
        );
        assert!(events[0].starts_with("event: response.created\ndata: {"));
        let delta = data(&events[5]);
        assert_eq!(
            (&delta["delta"], &delta["item_id"]),
            (&Value::from("No."), &Value::from("i1"))
        );
        assert_eq!(data(&events[9])["response"]["usage"]["output_tokens"], 2);
        assert_eq!(data(&events[9])["sequence_number"], 9);
    }

    #[test]
    fn what_the_length_limit_ended_is_not_an_answer() {
        let limited = RESPONSE.replace(
            r#""status":"completed""#,
            r#""status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}"#,
        );
        const LIMIT: Verdict = Verdict::Ended(End::Limit);
        for (body, verdict) in [
            (CHAT.replace(r#""stop""#, r#""length""#), LIMIT),
            (CHAT.replace(r#""stop""#, r#""not_finished""#), LIMIT),
            (CHAT.replace(r#""stop""#, "null"), Verdict::Content),
            (limited.clone(), LIMIT),
            (
                RESPONSE.replace("completed", "failed"),
                Verdict::Failed(Why::Error),
            ),
            (RESPONSE.replace("completed", "queued"), Verdict::Content),
            (
                RESPONSE.replace("completed", "incomplete"),
                Verdict::Content,
            ),
            (
                r#"{"choices":[{"finish_reason":"stop"},{"finish_reason":"length"}]}"#.to_owned(),
                LIMIT,
            ),
            (r#"{"choices":[]}"#.to_owned(), Verdict::Empty),
            (
                r#"{"choices":[{"finish_reason":"abort"}]}"#.to_owned(),
                Verdict::Failed(Why::GaveUp),
            ),
            ("{}".to_owned(), Verdict::Content),
            ("[]".to_owned(), Verdict::Content),
            ("oops".to_owned(), Verdict::Content),
        ] {
            assert_eq!(whole(&body), None, "{body}");
            assert_eq!(Verdict::of_prefill(body.as_bytes()), verdict, "{body}");
        }
        let filtered = limited.replace("max_output_tokens", "content_filter");
        assert_eq!(
            Verdict::of_prefill(filtered.as_bytes()),
            Verdict::Ended(End::Itself)
        );
        let last = stream(&filtered, false).pop().unwrap();
        assert!(last.starts_with("event: response.incomplete\n"), "{last}");
    }
}
