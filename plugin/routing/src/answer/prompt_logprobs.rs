//! Owns the log-probabilities of the prompt: prefill computed them, so they are put before those in decode's answer.
//!
//! They are in `meta_info` of the answers of `/generate`, and in each of its events. The answer to a batch is a list; its
//! events give the position in the batch as `index`.

use std::borrow::Cow;

use crate::json::{Edits, Object, each_edited, edited, elements};

const META: &str = "meta_info";

/// The lists about the prompt.
const LISTS: [&str; 3] = [
    "input_token_logprobs",
    "input_top_logprobs",
    "input_token_ids_logprobs",
];

/// The prompt's log-probabilities in prefill's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptLogprobs {
    answers: Vec<Lists>,
}

/// Contents of the lists of one answer, for each list that is there.
type Lists = Vec<(&'static str, String)>;

impl PromptLogprobs {
    /// Reads a prefill worker's answer; none where it has no such lists.
    pub fn read(answer: &[u8]) -> Option<Self> {
        let answer = std::str::from_utf8(answer).ok()?.trim_ascii();
        let answers = elements(answer).unwrap_or_else(|| vec![answer]);
        let answers: Vec<Lists> = answers
            .into_iter()
            .map(|answer| lists(answer).unwrap_or_default())
            .collect();
        let says_something = answers.iter().any(|lists| !lists.is_empty());
        says_something.then_some(Self { answers })
    }

    /// A document of decode (an answer, or the data of one event) with prefill's lists before its own, all other bytes
    /// unchanged. None where there is nothing to merge.
    pub fn before(&self, document: &str) -> Option<String> {
        if document.trim_ascii_start().starts_with('[') {
            return each_edited(document, |index, answer| self.before_one(index, answer));
        }
        let object = Object::parse(document.as_bytes(), &["index"]).ok()?;
        let index = object
            .get("index")
            .and_then(|index| index.value.parse().ok());
        self.before_one(index.unwrap_or_default(), document)
    }

    fn before_one(&self, index: usize, answer: &str) -> Option<String> {
        let lists = self.answers.get(index).filter(|lists| !lists.is_empty())?;
        let object = Object::parse(answer.as_bytes(), &[META]).ok()?;
        let meta = object.get(META)?;
        let merged = edited(meta.value, &LISTS, |meta, edits| {
            for (name, prefill) in lists {
                put_before(name, prefill, meta, edits);
            }
        })?;
        let mut edits = object.edit();
        edits.replace(meta, merged);
        String::from_utf8(edits.apply(answer.as_bytes())).ok()
    }
}

fn lists(answer: &str) -> Option<Lists> {
    let answer = Object::parse(answer.as_bytes(), &[META]).ok()?;
    let meta = Object::parse(answer.get(META)?.value.as_bytes(), &LISTS).ok()?;
    let inside = |name: &'static str| {
        let inside = opened(meta.get(name)?.value)?
            .strip_suffix(']')?
            .trim_ascii();
        (!inside.is_empty()).then(|| (name, on_one_line(inside).into_owned()))
    };
    Some(LISTS.into_iter().filter_map(inside).collect())
}

/// An event has its data on one line; JSON strings contain no line breaks.
fn on_one_line(json: &str) -> Cow<'_, str> {
    match json.contains(['\n', '\r']) {
        true => Cow::Owned(json.replace(['\n', '\r'], " ")),
        false => Cow::Borrowed(json),
    }
}

fn put_before(name: &str, prefill: &str, meta: &Object<'_>, edits: &mut Edits) {
    let Some(member) = meta.get(name) else {
        edits.insert(name, format!("[{prefill}]"));
        return;
    };
    let rest = match opened(member.value) {
        Some(rest) => rest,
        None if member.value == "null" => "]",
        None => return,
    };
    let comma = match rest.trim_ascii_start().starts_with(']') {
        true => "",
        false => ",",
    };
    edits.replace(member, format!("[{prefill}{comma}{rest}"));
}

/// What follows the opening bracket of a list; none where `value` is no list.
fn opened(value: &str) -> Option<&str> {
    value.strip_prefix('[')
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFILL: &str = r#"{"text":"x","meta_info":{"id":"a","input_token_logprobs":[ [null,1,null], [-0.10,9007199254740993,"\u00e9"] ],"input_top_logprobs":[null,[[1,2]]]}}"#;
    const FIRST: &str = r#"[null,1,null], [-0.10,9007199254740993,"\u00e9"]"#;
    const TOP: &str = "null,[[1,2]]";

    fn merged(prefill: &str, document: &str) -> Option<String> {
        PromptLogprobs::read(prefill.as_bytes())?.before(document)
    }

    #[test]
    fn prefills_lists_come_before_decodes_golden_bytes() {
        let decode = |logprobs: &str, top: &str| {
            format!(
                r#" {{"text": "yz","meta_info":{{"input_token_logprobs":{logprobs}, "completion_tokens":2,"input_top_logprobs" : {top}}}, "index":0}}"#
            )
        };
        for (before, after) in [
            ("[]", format!("[{FIRST}]")),
            ("[ ]", format!("[{FIRST} ]")),
            ("null", format!("[{FIRST}]")),
            ("[[-1,2,null]]", format!("[{FIRST},[-1,2,null]]")),
        ] {
            assert_eq!(
                merged(PREFILL, &decode(before, "[]")).unwrap(),
                decode(&after, &format!("[{TOP}]"))
            );
        }
        let absent = r#"{"meta_info":{"id":"b"}}"#;
        assert_eq!(
            merged(PREFILL, absent).unwrap(),
            format!(
                r#"{{"meta_info":{{"input_token_logprobs":[{FIRST}],"input_top_logprobs":[{TOP}],"id":"b"}}}}"#
            )
        );
    }

    #[test]
    fn a_batch_is_merged_one_by_one_and_its_events_by_index() {
        let one = |token: u32| format!(r#"{{"meta_info":{{"input_token_logprobs":[{token}]}}}}"#);
        let prefill = format!("[{}, {},{{}}]\n", one(1), one(2));
        assert_eq!(
            merged(&prefill, &format!("[{} ,{},{}]", one(8), one(9), one(7))).unwrap(),
            r#"[{"meta_info":{"input_token_logprobs":[1,8]}} ,{"meta_info":{"input_token_logprobs":[2,9]}},{"meta_info":{"input_token_logprobs":[7]}}]"#
        );
        let event = |index: u32| format!(r#"{{"index":{index},"meta_info":{{}}}}"#);
        assert_eq!(
            merged(&prefill, &event(1)).unwrap(),
            r#"{"index":1,"meta_info":{"input_token_logprobs":[2]}}"#
        );
        assert_eq!(merged(&prefill, &event(2)), None);
        assert_eq!(merged(&prefill, &event(3)), None);
    }

    #[test]
    fn what_stands_on_several_lines_comes_on_one() {
        let prefill = "{\"meta_info\":{\"input_token_logprobs\":[1,\r\n2\n]}}";
        assert_eq!(
            merged(prefill, r#"{"meta_info":{}}"#).unwrap(),
            r#"{"meta_info":{"input_token_logprobs":[1,  2]}}"#
        );
    }

    #[test]
    fn where_nothing_is_said_nothing_is_done() {
        for prefill in [
            "",
            "{}",
            "[]",
            "[{}]",
            "oops",
            r#"{"meta_info":null}"#,
            r#"{"meta_info":{"input_token_logprobs":[]}}"#,
            r#"{"meta_info":{"input_token_logprobs":null}}"#,
            r#"{"meta_info":{"input_token_logprobs":7}}"#,
        ] {
            assert_eq!(PromptLogprobs::read(prefill.as_bytes()), None, "{prefill}");
        }
        for decode in [
            "",
            "{}",
            "[1",
            "[DONE]",
            r#"{"meta_info":null}"#,
            r#"{"error":{}}"#,
        ] {
            assert_eq!(merged(PREFILL, decode), None, "{decode}");
        }
    }
}
