//! Tests of answers, whatever they contain and however they are cut.

mod golden;

use proptest::prelude::*;

use super::*;
use golden::{GOLDEN, Golden, GoldenForm};

fn read(parts: &[&[u8]]) -> Reader {
    let mut reader = Reader::of_events();
    for part in parts {
        reader.read(part);
    }
    reader
}

fn event(line: &str) -> Reader {
    read(&[line.as_bytes(), b"\n\n"])
}

fn over(mut reader: Reader) -> Verdict {
    reader.finish();
    reader.verdict()
}

impl Golden {
    fn reader(&self) -> Reader {
        match self.mode {
            GoldenForm::Events => Reader::new(b"text/event-stream; charset=utf-8", None),
            GoldenForm::Whole => Reader::new(b"application/json", None),
            GoldenForm::Compressed => Reader::new(b"text/event-stream", Some(b"gzip")),
        }
    }
}

#[test]
fn golden_answers_come_to_what_they_say() {
    for golden in GOLDEN {
        let mut reader = golden.reader();
        reader.read(golden.text.as_bytes());
        reader.finish();
        assert_eq!(reader.verdict(), golden.verdict, "{}", golden.name);
        assert_eq!(reader.tokens(), golden.tokens, "{}", golden.name);
    }
}

/// The stream with other line ends; the final one is left out.
fn with_line_ends(text: &str, end: &str) -> String {
    text.trim_end_matches('\n').replace('\n', end)
}

#[test]
fn found_w9_lines_end_with_lf_cr_or_both_and_the_last_one_with_nothing() {
    let streams = GOLDEN
        .iter()
        .filter(|golden| golden.mode == GoldenForm::Events);
    for golden in streams {
        for end in ["\n", "\r", "\r\n"] {
            let text = with_line_ends(golden.text, end);
            for step in [1, 7, text.len().max(1)] {
                let mut reader = golden.reader();
                text.as_bytes()
                    .chunks(step)
                    .for_each(|part| reader.read(part));
                reader.finish();
                let found = (reader.verdict(), reader.tokens());
                let wanted = (golden.verdict, golden.tokens);
                assert_eq!(found, wanted, "{} {end:?} by {step}", golden.name);
            }
        }
    }
}

#[test]
fn found_w9_an_event_is_read_at_its_cr() {
    let role = b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\r\r";
    let token = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\r";
    assert_eq!(read(&[role]).verdict(), Verdict::Nothing);
    assert_eq!(read(&[role, token]).verdict(), Verdict::Content);
    assert!(read(&[role, b"data: [DONE]\r"]).is_over());
}

/// An answer without content counts as empty only when it is over.
#[test]
fn found_w2_what_says_nothing_is_empty_when_it_is_over() {
    for line in [
        ": ping",
        "event: ping",
        "id: 7",
        "retry: 100",
        "data:",
        "data",
        "data: {}",
        r#"data: {"choices":[]}"#,
        r#"data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[]}"#,
        r#"data: {"choices":[],"usage":{"prompt_tokens":1}}"#,
        r#"data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":0}}"#,
        r#"data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":null}]}"#,
        r#"data: {"choices":[{"delta":{"role":"assistant","content":"","tool_calls":[],"function_call":null},"finish_reason":""}]}"#,
        r#"data: {"choices":[{"text":"","logprobs":{"tokens":[],"top_logprobs":[]},"token_ids":[],"finish_reason":null}]}"#,
        r#"data: {"type":"response.created","response":{}}"#,
        r#"data: {"type":"response.in_progress","response":{"status":"in_progress","output":[]}}"#,
        r#"data: {"type":"response.output_item.added"}"#,
        r#"data: {"type":"response.output_item.added","item":{"type":"message","content":[]}}"#,
        r#"data: {"type":"response.content_part.added","part":{"type":"output_text","text":""}}"#,
        r#"data: {"type":"response.output_text.delta","item_id":"i","output_index":0,"content_index":0,"delta":"","logprobs":[]}"#,
        r#"data: {"type":"message_start","message":{"role":"assistant","content":[],"usage":{"input_tokens":9,"output_tokens":1}}}"#,
        r#"data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
        r#"data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":""}}"#,
        r#"data: {"type":"content_block_stop","index":0}"#,
        r#"data: {"type":"ping"}"#,
        r#"data: {"text":"","meta_info":{"finish_reason":null,"completion_tokens":0}}"#,
    ] {
        let reader = event(line);
        assert_eq!(reader.verdict(), Verdict::Nothing, "{line}");
        assert!(!reader.has_begun() && reader.tokens() == 0, "{line}");
        assert_eq!(over(reader), Verdict::Empty, "{line}");
    }
    assert_eq!(over(read(&[])), Verdict::Empty);
    assert_eq!(event("data: [DONE]").verdict(), Verdict::Empty);
}

#[test]
fn found_w2_an_engine_that_gives_up_before_its_first_token_has_said_nothing() {
    for line in [
        r#"data: {"choices":[{"delta":{},"finish_reason":"abort"}]}"#,
        r#"data: {"choices":[{"text":"","finish_reason":"error"}],"usage":{"completion_tokens":3}}"#,
        r#"data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"no KV","status_code":500}}}"#,
        r#"data: {"type":"response.cancelled","response":{}}"#,
    ] {
        assert_eq!(event(line).verdict(), Verdict::Empty, "{line}");
        let begun = read(&[
            b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n",
            line.as_bytes(),
            b"\n",
        ]);
        assert_eq!(begun.verdict(), Verdict::Failed(Why::GaveUp), "{line}");
    }
}

#[test]
fn an_end_without_a_text_is_legal() {
    for (line, end) in [
        (
            r#"data: {"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
            End::Itself,
        ),
        (
            r#"data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}"#,
            End::Itself,
        ),
        (
            r#"data: {"choices":[{"text":"","finish_reason":"length"}]}"#,
            End::Limit,
        ),
        (
            r#"data: {"text":"","meta_info":{"finish_reason":{"type":"length","length":0}}}"#,
            End::Limit,
        ),
        (
            r#"data: {"type":"response.completed","response":{}}"#,
            End::Itself,
        ),
        (
            r#"data: {"type":"response.incomplete","response":{"incomplete_details":{"reason":"max_output_tokens"}}}"#,
            End::Limit,
        ),
        (
            r#"data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":0}}"#,
            End::Itself,
        ),
    ] {
        let reader = event(line);
        assert_eq!(reader.verdict(), Verdict::Ended(end), "{line}");
        assert!(!reader.has_begun() && reader.may_have_ended(), "{line}");
    }
}

/// A token in an unknown shape counts as a token.
#[test]
fn found_w6_what_is_not_known_is_content_in_every_interface() {
    for (line, tokens) in [
        (
            r#"data: {"choices":[{"delta":{"content":"","token_ids":[7]}}]}"#,
            1,
        ),
        (
            r#"data: {"choices":[{"delta":{"content":""},"token_ids":[7]}]}"#,
            1,
        ),
        (
            r#"data: {"choices":[{"delta":{"content":null,"function_call":{"name":"f"}}}]}"#,
            1,
        ),
        (
            r#"data: {"choices":[{"delta":{"content":[{"type":"text","text":"a"}]}}]}"#,
            1,
        ),
        (
            r#"data: {"choices":[{"delta":{"audio":{"data":"UklGRg=="}}}]}"#,
            1,
        ),
        (
            r#"data: {"choices":[{"delta":{"content":""},"logprobs":{"content":[{"token":"","logprob":-0.5}]}}]}"#,
            1,
        ),
        (
            r#"data: {"choices":[{"delta":{"content":""}}],"usage":{"completion_tokens":1}}"#,
            1,
        ),
        (r#"data: {"choices":[{"delta":"a"}]}"#, 1),
        (r#"data: {"choices":[{"index":0,"token_ids":[7]}]}"#, 1),
        (r#"data: {"choices":[{"text":"","token_ids":[7]}]}"#, 1),
        (r#"data: {"choices":"a"}"#, 1),
        (r#"data: {"output_ids":[7],"meta_info":{}}"#, 1),
        (
            r#"data: {"text":"","meta_info":{"completion_tokens":1}}"#,
            1,
        ),
        (
            r#"data: {"type":"response.output_text.delta","delta":"x"}"#,
            1,
        ),
        (r#"data: {"type":"response.audio.delta"}"#, 1),
        (
            r#"data: {"type":"response.output_text.delta","delta":"","token_ids":[7]}"#,
            1,
        ),
        (
            r#"data: {"type":"response.output_item.added","item":{"type":"function_call","name":"f"}}"#,
            0,
        ),
        (
            r#"data: {"type":"response.web_search_call.in_progress"}"#,
            0,
        ),
        (
            r#"data: {"type":"response.output_text.done","text":"x"}"#,
            0,
        ),
        (r#"data: {"type":"content_block_delta"}"#, 1),
        (
            r#"data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}"#,
            1,
        ),
        (
            r#"data: {"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}"#,
            1,
        ),
        (
            r#"data: {"type":"content_block_start","content_block":{"type":"tool_use","id":"t","name":"f","input":{}}}"#,
            0,
        ),
        (r#"data: {"type":"of_the_future"}"#, 1),
        (r#"data: {"answer":"a"}"#, 1),
        (r#"data: {"text":"a"}"#, 1),
        (r#"data: {"response":"a"}"#, 1),
        (r#"data: {"content":"a","stop":false}"#, 1),
        ("data: 7", 1),
        ("data: plain text", 1),
        ("data: {\"cut", 1),
        ("{\"choices\":[]}", 1),
    ] {
        let reader = event(line);
        assert_eq!(reader.verdict(), Verdict::Content, "{line}");
        assert!(reader.has_begun(), "{line}");
        assert_eq!(reader.tokens(), tokens, "{line}");
    }
}

#[test]
fn an_error_is_one_whatever_comes_before_and_behind() {
    for line in [
        r#"data: {"error":{"message":"no"}}"#,
        r#"data: {"error":"no"}"#,
        r#"data: {"object":"error","message":"no"}"#,
        r#"data: {"type":"error","message":"no"}"#,
        r#"data: {"type":"response.failed","response":{}}"#,
        r#"data: {"choices":[{"delta":{},"error":{"code":500}}]}"#,
        "event: error\ndata: {\"message\":\"no\"}",
        "event: error\n: no",
        "data: {\"error\":\ndata: {\"message\":\"no\"}}",
    ] {
        let token = b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
        for reader in [
            event(line),
            read(&[token, line.as_bytes(), b"\n\ndata: [DONE]\n\n"]),
        ] {
            assert_eq!(reader.verdict(), Verdict::Failed(Why::Error), "{line}");
        }
    }
    for nothing in ["null", "false", "\"\"", "{}"] {
        let line =
            format!(r#"data: {{"choices":[{{"delta":{{"content":"a"}}}}],"error":{nothing}}}"#);
        assert_eq!(event(&line).verdict(), Verdict::Content, "{line}");
    }
}

/// vLLM's answer where the KV could not be fetched: an error, then a normal end; on the Responses interface two events,
/// then the connection breaks.
#[test]
fn found_v2_an_error_is_no_good_end_and_two_events_are_no_content() {
    let failed = b"data: {\"error\": {\"message\": \"Internal server error\", \"type\": \"InternalServerError\", \"param\": null, \"code\": 500}}\n\ndata: [DONE]\n\n";
    assert_eq!(over(read(&[failed])), Verdict::Failed(Why::Error));
    assert!(!read(&[failed]).has_begun());
    let cut = b"event: response.created\ndata: {\"response\":{\"id\":\"resp_1\",\"status\":\"in_progress\",\"output\":[],\"usage\":null},\"sequence_number\":0,\"type\":\"response.created\"}\n\nevent: response.in_progress\ndata: {\"response\":{\"id\":\"resp_1\",\"status\":\"in_progress\",\"output\":[]},\"sequence_number\":1,\"type\":\"response.in_progress\"}\n\n";
    let cut = read(&[cut]);
    assert_eq!(cut.verdict(), Verdict::Nothing);
    assert!(!cut.has_begun() && !cut.may_have_ended());
}

#[test]
fn found_b12_a_line_that_may_become_the_end_is_held_back_from_its_first_byte() {
    let token = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    let done = "data: [DONE]";
    assert!(!read(&[token.as_bytes()]).may_have_ended());
    for end in 1..=done.len() {
        let reader = read(&[token.as_bytes(), &done.as_bytes()[..end]]);
        assert!(reader.may_have_ended() && !reader.is_over(), "{end}");
    }
    for end in ["\n", "\r", "\r\n"] {
        let reader = read(&[token.as_bytes(), done.as_bytes(), end.as_bytes()]);
        assert!(reader.is_over() && reader.may_have_ended(), "{end:?}");
    }
    // The event's name announces the end before its data, even where the data is too long to be read.
    for name in ["response.completed", "response.incomplete", "message_stop"] {
        let named = format!("event: {name}\n");
        assert!(read(&[named.as_bytes()]).may_have_ended(), "{name}");
        let long = format!(
            "{named}data: {{\"x\":\"{}\"}}\n\n",
            "x".repeat(2 * MAX_EVENT)
        );
        assert!(read(&[long.as_bytes()]).is_over(), "{name}");
    }
    // In an unreadable answer any byte may be the end.
    let mut compressed = Reader::new(b"text/event-stream", Some(b"gzip"));
    compressed.read(b"\x1f\x8b");
    assert!(compressed.may_have_ended());
}

#[test]
fn why_it_ended_is_a_good_end_to_who_reads_it() {
    let finish = r#"data: {"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
    let reader = event(finish);
    assert!(reader.may_have_ended() && !reader.is_over());
}

#[test]
fn usage_is_believed() {
    let usage = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":17}}\n\ndata: [DONE]\n\n";
    let reader = read(&[b"data: {\"choices\":[{\"text\":\"a\"},{\"text\":\"b\"}]}\n\n"]);
    assert_eq!(reader.tokens(), 2);
    let reader = read(&[b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n", usage]);
    assert_eq!(reader.tokens(), 17);
    assert!(reader.is_over());
}

#[test]
fn a_line_without_end_takes_no_room_and_counts_as_one_token() {
    for (field, tokens) in [("data: ", 2), (": ", 1), ("", 2)] {
        let mut reader = read(&[field.as_bytes()]);
        for _ in 0..100 {
            reader.read(&[b'x'; 4096]);
            let Sight::Events(lines) = &reader.sight else {
                panic!("no events");
            };
            assert!(lines.line.len() <= MAX_EVENT);
        }
        assert!(!reader.is_amid_line());
        reader.read(b"\n\ndata: {\"choices\":[{\"text\":\"a\"}]}\n\n");
        assert_eq!(reader.tokens(), tokens, "{field}");
    }
}

#[test]
fn an_answer_in_one_piece_is_judged_when_it_is_over() {
    let mut reader = Reader::new(b"application/json", None);
    assert!(!reader.has_begun());
    reader.read(b"{\"choices\":[{\"text\":\"a\",");
    assert!(reader.has_begun());
    assert_eq!(reader.verdict(), Verdict::Nothing);
    reader.read(b"\"finish_reason\":\"stop\"}],\"usage\":{\"completion_tokens\":1}}");
    reader.finish();
    assert_eq!(reader.verdict(), Verdict::Ended(End::Itself));
    assert_eq!(reader.tokens(), 1);
}

#[test]
fn a_long_answer_in_one_piece_says_something_and_takes_no_room() {
    let mut reader = Reader::new(b"application/json", None);
    reader.read(b"{\"x\":\"");
    for _ in 0..100 {
        reader.read(&[b'x'; 4096]);
        let Sight::Document(document) = &reader.sight else {
            panic!("no document");
        };
        assert!(document.kept.len() <= 2 * MAX_DOCUMENT);
    }
    assert_eq!(reader.verdict(), Verdict::Content);
    reader.read(b"\",\"usage\":{\"completion_tok");
    reader.read(b"ens\":9}}");
    reader.finish();
    assert_eq!((reader.verdict(), reader.tokens()), (Verdict::Content, 9));
}

#[test]
fn what_cannot_be_read_is_content_from_its_first_byte() {
    for (kind, encoding) in [
        (&b"text/event-stream"[..], Some(&b"gzip"[..])),
        (b"application/json", Some(b"br")),
        (b"application/x-ndjson", None),
        (b"text/plain", None),
        (b"", None),
    ] {
        let mut reader = Reader::new(kind, encoding);
        assert_eq!(reader.verdict(), Verdict::Nothing);
        reader.read(b"");
        assert_eq!(reader.verdict(), Verdict::Nothing);
        reader.read(b"\x1f");
        assert_eq!(reader.verdict(), Verdict::Content);
        assert_eq!(over(Reader::new(kind, encoding)), Verdict::Empty);
    }
    let mut plain = Reader::new(b"application/json", Some(b"identity"));
    plain.read(b"{\"choices\":[]}");
    assert_eq!(over(plain), Verdict::Empty);
}

#[test]
fn a_form_is_told_by_the_content_type() {
    assert_eq!(Form::of(b"Text/Event-Stream; charset=utf-8"), Form::Events);
    assert_eq!(Form::of(b"application/json"), Form::Whole);
    assert_eq!(Form::of(b""), Form::Whole);
}

/// An engine whose `/v1/responses` always reports completion: a single token is no complete answer.
#[test]
fn found_l2_a_prefill_that_used_up_its_token_has_not_ended_by_itself() {
    let of = |tokens: u64| {
        let answer = format!(
            r#"{{"object":"response","status":"completed","incomplete_details":null,"output":[{{"type":"message"}}],"usage":{{"input_tokens":9,"output_tokens":{tokens}}}}}"#
        );
        (
            Verdict::of_prefill(answer.as_bytes()),
            Verdict::of_document(answer.as_bytes()),
        )
    };
    let (itself, limit) = (Verdict::Ended(End::Itself), Verdict::Ended(End::Limit));
    assert_eq!(of(1), (limit, itself));
    assert_eq!(of(0), (itself, itself));
    // Other interfaces give the reason.
    let chat = br#"{"choices":[{"message":{"content":"No"},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}"#;
    assert_eq!(Verdict::of_prefill(chat), itself);
}

#[test]
fn a_prefill_that_was_given_up_has_failed() {
    for answer in [
        r#"{"choices":[{"text":"","finish_reason":"abort"}]}"#,
        r#"{"text":"","meta_info":{"finish_reason":{"type":"abort"}}}"#,
        r#"[{"text":"a","meta_info":{"finish_reason":{"type":"length"}}},{"text":"","meta_info":{"finish_reason":{"type":"abort"}}}]"#,
    ] {
        let verdict = Verdict::of_prefill(answer.as_bytes());
        assert_eq!(verdict, Verdict::Failed(Why::GaveUp), "{answer}");
    }
}

/// What is known at one point of an answer.
type State = (Verdict, u64, [bool; 4]);

fn state(reader: &Reader) -> State {
    let known = [
        reader.has_begun(),
        reader.is_over(),
        reader.may_have_ended(),
        reader.is_amid_line(),
    ];
    (reader.verdict(), reader.tokens(), known)
}

/// What is known after each byte, and at the end.
fn bytewise(golden: &Golden, text: &[u8]) -> Vec<State> {
    let mut reader = golden.reader();
    let mut states = vec![state(&reader)];
    states.extend(text.iter().map(|byte| {
        reader.read(std::slice::from_ref(byte));
        state(&reader)
    }));
    reader.finish();
    states.push(state(&reader));
    states
}

proptest! {
    #[test]
    fn it_does_not_matter_where_the_bytes_are_cut(
        golden in prop::sample::select(GOLDEN),
        end in prop::sample::select(&["\n", "\r", "\r\n"][..]),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let text = golden.text.replace('\n', end);
        let text = text.as_bytes();
        let wanted = bytewise(&golden, text);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.push(text.len());
        cuts.sort_unstable();
        let mut reader = golden.reader();
        let mut from = 0;
        for cut in cuts {
            reader.read(&text[from..cut]);
            prop_assert_eq!(state(&reader), wanted[cut], "{} up to {}", golden.name, cut);
            from = cut;
        }
        reader.finish();
        prop_assert_eq!(Some(&state(&reader)), wanted.last());
    }

    #[test]
    fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        for (kind, encoding) in [(&b"text/event-stream"[..], None), (b"application/json", None), (b"", None)] {
            let mut reader = Reader::new(kind, encoding);
            for part in bytes.chunks(7) {
                reader.read(part);
            }
            reader.finish();
            let verdict = reader.verdict();
            prop_assert!(verdict != Verdict::Nothing);
        }
    }
}
