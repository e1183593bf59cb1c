use std::fmt::Write as _;

use proptest::prelude::*;
use serde_json::Value;

use super::super::*;
use super::{PLAIN, body, read_as};

/// Any JSON value, with frequent use of meaningful names among its keys and strings.
fn any_json() -> impl Strategy<Value = Value> {
    let word = || {
        prop_oneof![
            prop::sample::select(
                &[
                    "role",
                    "content",
                    "type",
                    "text",
                    "image_url",
                    "url",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "user",
                    "message",
                    "input_audio",
                    "",
                ][..]
            )
            .prop_map(str::to_owned),
            "\\PC{0,12}",
            any::<String>(),
        ]
    };
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<u32>().prop_map(Value::from),
        word().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((word(), inner), 0..6)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// Writes a value in one of its spellings.
fn spell(value: &Value, random: &mut fastrand::Rng) -> String {
    let space = |random: &mut fastrand::Rng| *random.choice(&["", "", " ", "\n\t"]).unwrap();
    let mut out = space(random).to_owned();
    match value {
        Value::String(text) => out += &spell_text(text, random),
        Value::Array(list) => {
            let parts: Vec<String> = list.iter().map(|part| spell(part, random)).collect();
            write!(out, "[{}]", parts.join(",")).unwrap();
        }
        Value::Object(members) => {
            let mut parts: Vec<String> = members
                .iter()
                .map(|(key, value)| {
                    let key = spell_text(key, random);
                    format!(
                        "{}{key}{}:{}",
                        space(random),
                        space(random),
                        spell(value, random)
                    )
                })
                .collect();
            random.shuffle(&mut parts);
            write!(out, "{{{}}}", parts.join(",")).unwrap();
        }
        other => write!(out, "{other}").unwrap(),
    }
    out + space(random)
}

fn spell_text(text: &str, random: &mut fastrand::Rng) -> String {
    let mut out = String::from("\"");
    for found in text.chars() {
        let must = matches!(found, '"' | '\\' | '\0'..='\x1f');
        match random.u8(0..4) {
            0 => {
                for unit in found.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}").unwrap();
                }
            }
            1 if found == '/' => out.push_str("\\/"),
            _ if must => {
                let whole = serde_json::to_string(&found.to_string()).unwrap();
                out.push_str(
                    whole
                        .trim_start_matches('"')
                        .strip_suffix('"')
                        .unwrap_or("\\\""),
                );
            }
            _ => out.push(found),
        }
    }
    out.push('"');
    out
}

/// A message that a client could send, its content in two shapes with the same meaning.
fn any_message() -> impl Strategy<Value = (Value, Value)> {
    let text = || "[a-zé/\"\\\\\n\u{1f600} ]{0,60}";
    let role = prop::sample::select(&["system", "user", "assistant", "tool"][..]);
    let content = prop_oneof![
        text().prop_map(|text| (
            Value::from(text.clone()),
            serde_json::json!([{"type": "text", "text": text}])
        )),
        text().prop_map(|text| (Value::from(text.clone()), serde_json::json!([text]))),
        prop::collection::vec(text(), 0..4).prop_map(|texts| {
            let parts: Vec<Value> = texts
                .iter()
                .map(|text| serde_json::json!({"text": text}))
                .collect();
            (Value::from(texts), Value::from(parts))
        }),
        Just((Value::Null, Value::from(""))),
        text().prop_map(|url| (
            serde_json::json!([{"type": "image_url", "image_url": {"url": url}}]),
            serde_json::json!([{"image_url": url}]),
        )),
    ];
    let calls = prop::collection::vec(("[a-z]{1,9}", text()), 0..3);
    (role, content, calls, any::<u32>()).prop_map(|(role, (left, right), calls, id)| {
        let message = |content: Value, id: u32| {
            let calls: Vec<Value> = calls
                .iter()
                .map(|(name, arguments)| {
                    serde_json::json!({"id": id.to_string(), "function": {"name": name, "arguments": arguments}})
                })
                .collect();
            serde_json::json!({"role": role, "content": content, "tool_calls": calls})
        };
        (message(left, id), message(right, id.wrapping_add(1)))
    })
}

proptest! {
    #[test]
    fn a_turn_more_keeps_all_blocks_and_spelling_changes_none(
        messages in prop::collection::vec(any_message(), 1..8),
        tools in prop::option::of(any_json()),
        seed in any::<u64>(),
        block_tokens in 1u32..20,
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let identity = Identity { block_tokens, ..PLAIN };
        // Nested members keep their order, since a template renders a tool as sent.
        let tools = tools.map_or(String::new(), |tools| format!(r#""tools":{tools},"#));
        let read = |messages: &[String]| {
            let body = body(&format!(r#"{tools}"messages":[{}]"#, messages.join(",")));
            read_as(Generation::Chat, &body, &identity)
        };
        let mut before = Prompt::default();
        for turns in 1..=messages.len() {
            let left: Vec<String> =
                messages[..turns].iter().map(|(left, _)| spell(left, &mut random)).collect();
            let right: Vec<String> =
                messages[..turns].iter().map(|(_, right)| spell(right, &mut random)).collect();
            let (left, right) = (read(&left), read(&right));
            prop_assert_eq!(&left, &right);
            prop_assert!(left.blocks.sequence.starts_with(&before.blocks.sequence));
            prop_assert!(left.tokens >= before.tokens);
            prop_assert_eq!(u64::from(left.blocks.count()), left.tokens.saturating_sub(1) / u64::from(block_tokens)
                + u64::from(left.blocks.count() as u64 * u64::from(block_tokens) == left.tokens));
            before = left;
        }
    }

    #[test]
    fn any_json_in_place_of_anything_is_read(value in any_json(), seed in any::<u64>()) {
        let value = spell(&value, &mut fastrand::Rng::with_seed(seed));
        for (generation, members) in [
            (Generation::Chat, format!(r#""messages":{value}"#)),
            (Generation::Chat, format!(r#""messages":[{value}]"#)),
            (Generation::Chat, format!(r#""messages":[{{"role":{value},"content":{value},"x":{value}}}]"#)),
            (Generation::Chat, format!(r#""messages":[{{"content":[{value},{value}]}}]"#)),
            (Generation::Chat, format!(r#""messages":[{{"content":[{{"type":"image_url","image_url":{value}}}]}}]"#)),
            (Generation::Chat, format!(r#""messages":[{{"content":[{{"type":{value},"text":{value}}}]}}]"#)),
            (Generation::Chat, format!(r#""messages":[{{"tool_calls":{value},"function_call":{value}}}]"#)),
            (Generation::Chat, format!(r#""messages":[{{"tool_calls":[{{"function":{value}}},{value}]}}]"#)),
            (Generation::Chat, format!(r#""messages":[],"tools":{value},"functions":{value},"cache_salt":{value}"#)),
            (Generation::Completions, format!(r#""prompt":{value},"nvext":{{"cache_salt":{value}}}"#)),
            (Generation::Completions, format!(r#""prompt":[{value},{value}],"nvext":{value}"#)),
            (Generation::Responses, format!(r#""input":{value},"instructions":{value},"tools":{value}"#)),
            (Generation::Responses, format!(r#""input":[{value}]"#)),
            (Generation::Other, format!(r#""messages":{value}"#)),
        ] {
            let body = body(&members);
            // A request that routing refuses has no prompt to be read.
            if let Ok(request) = Request::parse(generation, body.as_bytes()) {
                let first = read(&request, &PLAIN);
                prop_assert!(first.tokens >= 1);
                prop_assert_eq!(first, read(&request, &PLAIN));
            }
        }
    }

    #[test]
    fn text_is_unescaped_as_a_parser_does(text in any::<String>(), seed in any::<u64>()) {
        #[derive(Default)]
        struct Taken(Vec<u8>);
        impl Sink for Taken {
            fn put(&mut self, bytes: &[u8]) {
                self.0.extend_from_slice(bytes);
            }
            fn push(&mut self, byte: u8) {
                self.0.push(byte);
            }
        }
        let spelt = spell_text(&text, &mut fastrand::Rng::with_seed(seed));
        let mut taken = Taken::default();
        let Shape::String(inside) = shape(&spelt) else {
            panic!("a string has the shape of one");
        };
        canonical::text(inside, &mut taken);
        prop_assert_eq!(taken.0, text.as_bytes());
    }

    #[test]
    fn values_are_walked_as_a_parser_walks_them(value in any_json(), seed in any::<u64>()) {
        let spelt = spell(&value, &mut fastrand::Rng::with_seed(seed));
        let spelt = spelt.trim_ascii();
        let parsed = |raw: &str| serde_json::from_str::<Value>(raw).unwrap();
        let mut found = Vec::new();
        elements(spelt, |element| found.push(parsed(element)));
        let expected = value.as_array().cloned().unwrap_or_default();
        prop_assert_eq!(found, expected.iter().map(|value| parsed(&value.to_string())).collect::<Vec<_>>());
        let found = members(spelt, &[]).map(|members| {
            let members = members.into_iter();
            members.map(|(key, value)| (key.into_owned(), parsed(value))).collect::<Vec<_>>()
        });
        let expected = value.as_object().map(|members| {
            let members = members.iter().filter(|(_, value)| !value.is_null());
            let mut members: Vec<(String, Value)> =
                members.map(|(key, value)| (key.clone(), parsed(&value.to_string()))).collect();
            members.sort_by(|left, right| left.0.cmp(&right.0));
            members
        });
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn what_is_no_json_ends_all_the_same(text in "[\\[\\]{}\",:\\\\u0-9a é]{0,40}") {
        members(&text, &[]);
        elements(&text, |_| ());
        canonical::value(&text, &mut Text::new(1, RunLength::Graded));
        canonical::text(&text, &mut Text::new(1, RunLength::Graded));
        TokenIds::read(&text);
    }
}
