//! Owns the comparison of JSON as text: what was added, what was left out, and that every other byte is the same.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// A member of an object, as written: the quoted key and the value's text.
pub type Member = (String, String);

/// The value of the one member `name` that was spliced into `original` to give `spliced`.
///
/// # Errors
/// A sentence that says why `spliced` is not `original` with exactly that member added.
pub fn spliced_member(original: &str, spliced: &str, name: &str) -> Result<Value, String> {
    let (before, after) = (original.as_bytes(), spliced.as_bytes());
    let Some(added) = after.len().checked_sub(before.len()).filter(|n| *n > 0) else {
        return Err(format!("nothing was added: {spliced}"));
    };
    let same_head = before.iter().zip(after).take_while(|(a, b)| a == b).count();
    let same_tail = before
        .iter()
        .rev()
        .zip(after.iter().rev())
        .take_while(|(a, b)| a == b)
        .count();
    let first = before.len().saturating_sub(same_tail);
    // The same text may appear to be spliced in at more than one place; any place that contains the member alone will do.
    (first..=same_head)
        .filter_map(|at| after.get(at..at + added))
        .find_map(|inserted| sole_member(inserted, name))
        .ok_or_else(|| {
            format!("not the original with `{name}` alone spliced in.\noriginal: {original}\nspliced:  {spliced}")
        })
}

fn sole_member(inserted: &[u8], name: &str) -> Option<Value> {
    let text = std::str::from_utf8(inserted).ok()?.trim();
    let text = text
        .strip_prefix(',')
        .or_else(|| text.strip_suffix(','))
        .unwrap_or(text);
    let mut object: Map<String, Value> = serde_json::from_str(&format!("{{{text}}}")).ok()?;
    let value = object.remove(name)?;
    object.is_empty().then_some(value)
}

/// The members of the object in `text`, as written, in order, twice where written twice.
pub fn members(text: &str) -> Vec<Member> {
    let parsed: Members = serde_json::from_str(text)
        .unwrap_or_else(|error| panic!("not a JSON object ({error}): {text}"));
    parsed.0
}

/// The members whose keys, as written without their quotes, are none of `names`.
pub fn members_without(text: &str, names: &[&str]) -> Vec<Member> {
    let mut all = members(text);
    all.retain(|(key, _)| !names.contains(&key.trim_matches('"')));
    all
}

/// The values, as written, of every member called `name`.
pub fn values_of(text: &str, name: &str) -> Vec<String> {
    let named = |(key, value): Member| (key.trim_matches('"') == name).then_some(value);
    members(text).into_iter().filter_map(named).collect()
}

struct Members(Vec<Member>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
        let mut members = Vec::new();
        while let Some((key, value)) = map.next_entry::<Box<RawValue>, Box<RawValue>>()? {
            members.push((key.get().to_owned(), value.get().to_owned()));
        }
        Ok(Members(members))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_member_may_be_spliced_in_at_either_end_or_between() {
        let original = r#"{ "a" : 1, "b":{} }"#;
        for spliced in [
            r#"{"kv":{"x":[1,2]}, "a" : 1, "b":{} }"#,
            r#"{ "kv":{"x":[1,2]},"a" : 1, "b":{} }"#,
            r#"{ "a" : 1, "b":{},"kv":{"x":[1,2]} }"#,
            r#"{ "a" : 1, "b":{} ,"kv":{"x":[1,2]}}"#,
            r#"{ "a" : 1,"kv":{"x":[1,2]}, "b":{} }"#,
        ] {
            assert_eq!(
                spliced_member(original, spliced, "kv"),
                Ok(json!({"x": [1, 2]})),
                "{spliced}"
            );
        }
    }

    #[test]
    fn an_empty_object_takes_the_member_without_a_comma() {
        assert_eq!(spliced_member("{}", r#"{"kv":1}"#, "kv"), Ok(json!(1)));
    }

    #[test]
    fn any_other_change_is_found() {
        let original = r#"{"a":1.0,"b":"é"}"#;
        for spliced in [
            original,
            r#"{"a":1,"b":"é","kv":1}"#,
            r#"{"a":1.0,"b":"\u00e9","kv":1}"#,
            r#"{"a":1.0, "b":"é","kv":1}"#,
            r#"{"b":"é","a":1.0,"kv":1}"#,
            r#"{"a":1.0,"b":"é","kv":1,"c":2}"#,
            r#"{"a":1.0,"b":"é","c":1}"#,
            r#"{"a":1.0,"b":{"kv":1,"x":"é"}}"#,
        ] {
            assert!(
                spliced_member(original, spliced, "kv").is_err(),
                "{spliced}"
            );
        }
    }

    #[test]
    fn members_keep_their_text_order_and_doubles() {
        let text = r#" {"a" : 1.0, "\u0061":1e400,"a":"\ud83d\ude00" ,"b":[ 1 ]} "#;
        let as_written = |members: Vec<Member>| -> Vec<String> {
            let one = |(key, value): Member| format!("{key}:{value}");
            members.into_iter().map(one).collect()
        };
        assert_eq!(
            as_written(members(text)),
            [
                r#""a":1.0"#,
                r#""\u0061":1e400"#,
                r#""a":"\ud83d\ude00""#,
                r#""b":[ 1 ]"#
            ]
        );
        assert_eq!(
            as_written(members_without(text, &["a"])),
            [r#""\u0061":1e400"#, r#""b":[ 1 ]"#]
        );
        assert_eq!(values_of(text, "a"), ["1.0", r#""\ud83d\ude00""#]);
    }
}
