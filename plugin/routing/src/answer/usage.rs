//! Owns the `usage` of a prompt: its tokens, and how many of them prefill had in its cache; and the edit that shows the
//! latter to the client, since decode cannot know it.
//!
//! Completions and chat completions count `prompt_tokens`, responses `input_tokens`; each has details of its own.

use memchr::memmem;

use crate::json::{Object, edited};

const USAGE: &str = "usage";
/// Field of an event of the Responses interface that holds the answer so far.
const RESPONSE: &str = "response";
const CACHED: &str = "cached_tokens";

/// Names of the fields in one interface.
struct Names {
    tokens: &'static str,
    details: &'static str,
}

const PROMPT: Names = Names {
    tokens: "prompt_tokens",
    details: "prompt_tokens_details",
};
const INPUT: Names = Names {
    tokens: "input_tokens",
    details: "input_tokens_details",
};

const MEMBERS: &[&str] = &[PROMPT.tokens, PROMPT.details, INPUT.tokens, INPUT.details];

impl Names {
    /// The names in a given `usage`.
    fn of(usage: &Object<'_>) -> &'static Self {
        let has = |name: &str| usage.get(name).is_some();
        match has(INPUT.details) || (has(INPUT.tokens) && !has(PROMPT.tokens)) {
            true => &INPUT,
            false => &PROMPT,
        }
    }
}

/// KV blocks of the prompt, from its tokens in an answer's `usage`; the last block may be partly filled. 0 without a count.
pub fn prompt_blocks(answer: &[u8], block_tokens: u32) -> u64 {
    prompt_tokens(answer).div_ceil(u64::from(block_tokens.max(1)))
}

/// Tokens of the prompt in an answer's `usage`; 0 without a count.
pub fn prompt_tokens(answer: &[u8]) -> u64 {
    let count = |usage: &Object<'_>| usage.get(Names::of(usage).tokens)?.value.parse().ok();
    read(answer, count).unwrap_or_default()
}

/// Tokens of an unstreamed answer, from this part of it; 0 without a count. A member's name with its colon cannot occur
/// inside a text, where quotes are escaped, so nothing needs to be parsed.
pub fn output_tokens(part: &[u8]) -> u64 {
    let names = [&b"\"completion_tokens\":"[..], b"\"output_tokens\":"];
    names
        .into_iter()
        .find_map(|name| number_behind(part, name))
        .unwrap_or_default()
}

fn number_behind(part: &[u8], name: &[u8]) -> Option<u64> {
    let at = memmem::rfind(part, name)?;
    let rest = part.get(at.checked_add(name.len())?..)?.trim_ascii_start();
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(rest.get(..digits)?).ok()?.parse().ok()
}

/// Tokens of the prompt that a prefill worker had in its cache, from its answer's `usage`; 0 without a count.
pub fn cached_tokens(answer: &[u8]) -> u64 {
    let count = |usage: &Object<'_>| {
        let details = usage.get(Names::of(usage).details)?.value;
        let details = Object::parse(details.as_bytes(), &[CACHED]).ok()?;
        details.get(CACHED)?.value.parse().ok()
    };
    read(answer, count).unwrap_or_default()
}

fn read(answer: &[u8], count: impl Fn(&Object<'_>) -> Option<u64>) -> Option<u64> {
    let answer = Object::parse(answer, &[USAGE]).ok()?;
    let usage = answer.get(USAGE)?.value;
    count(&Object::parse(usage.as_bytes(), MEMBERS).ok()?)
}

/// The document (an answer, or the data of one event) with `cached` cached tokens in its `usage`, all other bytes
/// unchanged. None where the document has no `usage`.
pub fn with_cached_tokens(document: &str, cached: u64) -> Option<String> {
    let object = Object::parse(document.as_bytes(), &[USAGE, RESPONSE]).ok()?;
    let with_usage = |object: &Object<'_>| {
        let member = object.get(USAGE)?;
        Some((member.place(), usage(member.value, cached)?))
    };
    let inside = || {
        let member = object.get(RESPONSE)?;
        let response = Object::parse(member.value.as_bytes(), &[USAGE]).ok()?;
        let (place, usage) = with_usage(&response)?;
        let mut edits = response.edit();
        edits.replace_at(&place, usage);
        let bytes = edits.apply(member.value.as_bytes());
        Some((member.place(), String::from_utf8(bytes).ok()?))
    };
    let (place, value) = with_usage(&object).or_else(inside)?;
    let mut edits = object.edit();
    edits.replace_at(&place, value);
    String::from_utf8(edits.apply(document.as_bytes())).ok()
}

/// A `usage` with the count; none where `usage` is no object.
fn usage(usage: &str, cached: u64) -> Option<String> {
    edited(usage, MEMBERS, |object, edits| {
        let name = Names::of(object).details;
        let Some(member) = object.get(name) else {
            edits.insert(name, details("null", cached));
            return;
        };
        edits.replace(member, details(member.value, cached));
    })
}

/// Details with the count: details that are null, or no object, are replaced.
fn details(details: &str, cached: u64) -> String {
    let count = cached.to_string();
    let kept = edited(details, &[CACHED], |object, edits| {
        match object.get(CACHED) {
            Some(member) => edits.replace(member, count.as_str()),
            None => edits.insert(CACHED, count.as_str()),
        }
    });
    kept.unwrap_or_else(|| format!("{{\"{CACHED}\":{count}}}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_of_an_answer_in_one_piece_are_found_and_not_those_in_its_text() {
        for (answer, tokens) in [
            (
                r#"{"usage":{"prompt_tokens":9,"completion_tokens": 17}}"#,
                17,
            ),
            (
                r#"{"usage":{"input_tokens":9,"output_tokens":5,"total_tokens":14}}"#,
                5,
            ),
            (
                r#"{"choices":[{"text":"\"completion_tokens\":99"}],"usage":null}"#,
                0,
            ),
            (r#"{"completion_tokens":null}"#, 0),
            (r#"{"completion_tokens":99999999999999999999"}"#, 0),
            (r#""completion_tokens":"#, 0),
            ("", 0),
        ] {
            assert_eq!(output_tokens(answer.as_bytes()), tokens, "{answer}");
        }
    }

    #[test]
    fn what_prefill_counted_is_read_and_0_where_it_says_nothing() {
        for (answer, tokens, cached) in [
            (
                r#"{"usage":{"prompt_tokens":33,"prompt_tokens_details":{"cached_tokens":32}}}"#,
                33,
                32,
            ),
            (
                r#"{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8}}}"#,
                9,
                8,
            ),
            (
                r#"{"usage":{"prompt_tokens":33,"prompt_tokens_details":null}}"#,
                33,
                0,
            ),
            (
                r#"{"usage":{"prompt_tokens":33,"prompt_tokens_details":{"cached_tokens":null}}}"#,
                33,
                0,
            ),
            (
                r#"{"usage":{"prompt_tokens":-1,"prompt_tokens_details":[]}}"#,
                0,
                0,
            ),
            (r#"{"usage":{}}"#, 0, 0),
            (r#"{"usage":null}"#, 0, 0),
            ("{}", 0, 0),
            ("oops", 0, 0),
        ] {
            assert_eq!(prompt_tokens(answer.as_bytes()), tokens, "{answer}");
            assert_eq!(cached_tokens(answer.as_bytes()), cached, "{answer}");
        }
        assert_eq!(prompt_blocks(br#"{"usage":{"prompt_tokens":33}}"#, 0), 33);
    }

    #[test]
    fn the_count_is_put_where_the_interface_has_it() {
        for (usage, expected) in [
            (
                r#"{"prompt_tokens": 9, "prompt_tokens_details":{"audio_tokens":0 , "cached_tokens": 3}}"#,
                r#"{"prompt_tokens": 9, "prompt_tokens_details":{"audio_tokens":0 , "cached_tokens": 7}}"#,
            ),
            (
                r#"{"prompt_tokens":9, "prompt_tokens_details":null }"#,
                r#"{"prompt_tokens":9, "prompt_tokens_details":{"cached_tokens":7} }"#,
            ),
            (
                r#"{"prompt_tokens":9, "prompt_tokens_details":{"cached_tokens":null}}"#,
                r#"{"prompt_tokens":9, "prompt_tokens_details":{"cached_tokens":7}}"#,
            ),
            (
                r#"{"prompt_tokens":9, "prompt_tokens_details":{"x":1}}"#,
                r#"{"prompt_tokens":9, "prompt_tokens_details":{"cached_tokens":7,"x":1}}"#,
            ),
            (
                r#"{"prompt_tokens":9}"#,
                r#"{"prompt_tokens_details":{"cached_tokens":7},"prompt_tokens":9}"#,
            ),
            (
                r#"{"input_tokens":9,"input_tokens_details":{"cached_tokens":0}}"#,
                r#"{"input_tokens":9,"input_tokens_details":{"cached_tokens":7}}"#,
            ),
            (
                r#"{"input_tokens":9}"#,
                r#"{"input_tokens_details":{"cached_tokens":7},"input_tokens":9}"#,
            ),
        ] {
            let document =
                format!(r#" {{"id":"x", "usage" : {usage},"big":18446744073709551617}}"#);
            let edited = with_cached_tokens(&document, 7).unwrap();
            assert_eq!(edited, document.replace(usage, expected));
            let event = format!(r#"{{"type":"response.completed","response":{document} }}"#);
            let edited = with_cached_tokens(&event, 7).unwrap();
            assert_eq!(edited, event.replace(usage, expected));
        }
    }

    #[test]
    fn a_document_without_usage_stays_as_it_is() {
        for document in [
            "{}",
            "[]",
            "oops",
            r#"{"usage":null,"choices":[]}"#,
            r#"{"usage":7}"#,
            r#"{"type":"response.created","response":{"usage":null}}"#,
            r#"{"response":[]}"#,
        ] {
            assert_eq!(with_cached_tokens(document, 7), None, "{document}");
        }
    }
}
