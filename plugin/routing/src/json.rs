//! Owns JSON objects as spans over the client's own bytes, and edits that leave every other byte alone.
//!
//! A body is read once and never re-serialised: numbers beyond 2^53, duplicate keys, odd white space, key order and unknown
//! fields stay as the client sent them. Only top-level members with requested names are kept, so the memory held does not
//! grow with the body.

mod bounds;
mod lists;
mod spans;

pub use bounds::{MAX_VALUES, has_more_values_than, is_deeper_than};
pub use lists::{count_numbers, each_edited, elements, length};
pub use spans::ObjectSpans;

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use memchr::memchr2;
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Maximum repeats of members of interest in one object; a body with more is refused.
const MAX_MEMBERS: usize = 64;

/// Maximum nesting of lists and objects in a request: engines may be less careful with their stack. The same limit as
/// `serde_json`'s for parsed values.
pub const MAX_DEPTH: usize = 128;

/// A top-level member of interest.
#[derive(Debug, Clone)]
pub struct Member<'a> {
    /// The key, unescaped.
    pub key: Cow<'a, str>,
    /// The value's own bytes.
    pub value: &'a str,
    at: Position,
}

/// Position of a member in its object, with what is needed to remove its comma too.
#[derive(Debug, Clone, Copy)]
struct Position {
    index: usize,
    start: usize,
    value_start: usize,
    end: usize,
    previous_end: usize,
    next_start: Option<usize>,
}

/// A JSON object over borrowed bytes.
#[derive(Debug)]
pub struct Object<'a> {
    open: usize,
    count: usize,
    members: Vec<Member<'a>>,
}

/// Why bytes are not a usable JSON object.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum JsonError {
    /// Not JSON at all.
    #[error("not valid JSON: {0}")]
    Syntax(String),
    /// JSON, but a list, a string, a number.
    #[error("a JSON object is required")]
    NotAnObject,
    /// A member of interest occurs too often.
    #[error("a member is repeated too often")]
    TooManyRepeats,
}

/// Byte range of a member's value in its object, for use when the member itself is no longer at hand.
#[derive(Debug, Clone)]
pub struct ValueSpan(Range<usize>);

impl Member<'_> {
    /// Byte range of the value.
    pub fn place(&self) -> ValueSpan {
        ValueSpan(self.at.value_start..self.at.end)
    }
}

impl<'a> Object<'a> {
    /// Reads `body`, keeping the members that `wanted` names.
    ///
    /// # Errors
    /// [`JsonError`] when the bytes are not one JSON object in UTF-8.
    pub fn parse(body: &'a [u8], wanted: &[&str]) -> Result<Self, JsonError> {
        let text = simdutf8::compat::from_utf8(body).map_err(|error| {
            JsonError::Syntax(format!("not UTF-8 from byte {}", error.valid_up_to()))
        })?;
        let mut json = serde_json::Deserializer::from_str(text);
        let outcome = json
            .deserialize_map(Members { text, wanted })
            .and_then(|found| json.end().map(|()| found));
        let found = outcome.map_err(|error| classify(text, &error))?;
        if found.members.len() > MAX_MEMBERS {
            return Err(JsonError::TooManyRepeats);
        }
        Ok(found)
    }

    /// The member that counts: the last of duplicates, as in the engines' parsers.
    pub fn get(&self, key: &str) -> Option<&Member<'a>> {
        self.all(key).next_back()
    }

    /// Every occurrence of a member, in order.
    pub fn all<'s>(&'s self, key: &str) -> impl DoubleEndedIterator<Item = &'s Member<'a>> {
        self.members.iter().filter(move |member| member.key == key)
    }

    /// Starts a list of edits of this object.
    pub fn edit(&self) -> Edits {
        Edits {
            insert_at: self.open.saturating_add(1),
            inserted: Vec::new(),
            remaining: self.count,
            removed: Vec::new(),
            splices: Vec::new(),
        }
    }
}

/// An object inside another value, edited; none where `object` is not a usable JSON object.
pub fn edited(
    object: &str,
    wanted: &[&str],
    edit: impl FnOnce(&Object<'_>, &mut Edits),
) -> Option<String> {
    let read = Object::parse(object.as_bytes(), wanted).ok()?;
    let mut edits = read.edit();
    edit(&read, &mut edits);
    String::from_utf8(edits.apply(object.as_bytes())).ok()
}

/// A text as a JSON string, in quotes.
pub fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The bytes after the closing quote of a string, given the bytes after its opening quote.
pub(crate) fn behind_string(opened: &[u8]) -> &[u8] {
    let mut rest = opened;
    loop {
        let stop = match memchr2(b'"', b'\\', rest) {
            Some(at) => rest.get(at..).unwrap_or_default(),
            None => return &[],
        };
        rest = match stop.split_first() {
            Some((b'\\', after)) => after.get(1..).unwrap_or_default(),
            Some((_, after)) => return after,
            None => return &[],
        };
    }
}

/// The bytes outside of strings; an opening quote stands for its string.
fn outside_strings(json: &[u8]) -> impl Iterator<Item = u8> {
    let mut rest = json;
    std::iter::from_fn(move || {
        let (byte, after) = rest.split_first()?;
        rest = match byte {
            b'"' => behind_string(after),
            _ => after,
        };
        Some(*byte)
    })
}

/// Whether a value is empty: null, or an object without members.
pub fn says_nothing(value: &str) -> bool {
    value == "null" || is_blank_between('{', '}', value)
}

/// Whether a value is an empty list.
pub fn is_empty_list(value: &str) -> bool {
    is_blank_between('[', ']', value)
}

fn is_blank_between(open: char, close: char, value: &str) -> bool {
    let inside = value.strip_prefix(open);
    let inside = inside.and_then(|rest| rest.strip_suffix(close));
    inside.is_some_and(|inside| inside.trim_ascii().is_empty())
}

/// Separates a body of another JSON type from one that is not JSON.
fn classify(text: &str, error: &serde_json::Error) -> JsonError {
    let is_json = serde_json::from_str::<IgnoredAny>(text).is_ok();
    match is_json {
        true => JsonError::NotAnObject,
        false => JsonError::Syntax(error.to_string()),
    }
}

struct Members<'w, 'a> {
    text: &'a str,
    wanted: &'w [&'w str],
}

impl<'a> Visitor<'a> for Members<'_, 'a> {
    type Value = Object<'a>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a JSON object")
    }

    fn visit_map<M: MapAccess<'a>>(self, mut map: M) -> Result<Object<'a>, M::Error> {
        let open = self.text.len() - self.text.trim_start().len();
        let mut object = Object {
            open,
            count: 0,
            members: Vec::new(),
        };
        let mut previous_end = open.saturating_add(1);
        while let Some(raw_key) = map.next_key::<&RawValue>()? {
            let start = offset(self.text, raw_key.get());
            object.close_previous(start);
            let raw_value = map.next_value::<&RawValue>()?;
            let value_start = offset(self.text, raw_value.get());
            let end = value_start.saturating_add(raw_value.get().len());
            let key = unquoted(raw_key.get());
            // One member beyond the limit is kept, so that the excess is noticed.
            if self.wanted.contains(&key.as_ref()) && object.members.len() <= MAX_MEMBERS {
                object.members.push(Member {
                    key,
                    value: raw_value.get(),
                    at: Position {
                        index: object.count,
                        start,
                        value_start,
                        end,
                        previous_end,
                        next_start: None,
                    },
                });
            }
            object.count = object.count.saturating_add(1);
            previous_end = end;
        }
        Ok(object)
    }
}

impl Object<'_> {
    /// Sets what follows the previous member: the member that starts at `start`.
    fn close_previous(&mut self, start: usize) {
        let previous = self.count.checked_sub(1);
        if let Some(last) = self.members.last_mut()
            && Some(last.at.index) == previous
        {
            last.at.next_start = Some(start);
        }
    }
}

/// Offset of `part`, a slice of `whole`.
fn offset(whole: &str, part: &str) -> usize {
    (part.as_ptr() as usize).saturating_sub(whole.as_ptr() as usize)
}

/// The key without its quotes; copied only where it holds an escape.
fn unquoted(quoted: &str) -> Cow<'_, str> {
    let inner = quoted
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'));
    match inner {
        Some(plain) if !plain.contains('\\') => Cow::Borrowed(plain),
        _ => serde_json::from_str::<String>(quoted).map_or(Cow::Borrowed(quoted), Cow::Owned),
    }
}

/// Edits of one object, kept as positions, so that they can be applied later to the same bytes.
#[derive(Debug, Clone)]
pub struct Edits {
    insert_at: usize,
    inserted: Vec<(String, String)>,
    remaining: usize,
    removed: Vec<Position>,
    splices: Vec<(Range<usize>, String)>,
}

impl Edits {
    /// Replaces a member's value with another, written as JSON.
    pub fn replace(&mut self, member: &Member<'_>, value: impl Into<String>) {
        self.replace_at(&member.place(), value);
    }

    /// Replaces the value at a value span with another, written as JSON.
    pub fn replace_at(&mut self, place: &ValueSpan, value: impl Into<String>) {
        self.splices.push((place.0.clone(), value.into()));
    }

    /// Removes a member.
    pub fn remove(&mut self, member: &Member<'_>) {
        self.remaining = self.remaining.saturating_sub(1);
        self.removed.push(member.at);
    }

    /// Removes every occurrence of a member; returns whether there was one.
    pub fn remove_all(&mut self, object: &Object<'_>, key: &str) -> bool {
        let before = self.removed.len();
        object.all(key).for_each(|member| self.remove(member));
        self.removed.len() > before
    }

    /// Replaces the value of every occurrence of a member; returns whether there was one.
    pub fn replace_all(&mut self, object: &Object<'_>, key: &str, value: &str) -> bool {
        let before = self.splices.len();
        object
            .all(key)
            .for_each(|member| self.replace(member, value));
        self.splices.len() > before
    }

    /// Sets every occurrence of a member; inserts the member where there is none.
    pub fn set(&mut self, object: &Object<'_>, key: &str, value: &str) {
        if !self.replace_all(object, key, value) {
            self.insert(key, value);
        }
    }

    /// Inserts a member before all others. `key` must need no escaping; `value` is JSON.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<String>) {
        self.inserted.push((key.into(), value.into()));
    }

    /// The edited bytes. `body` must be the bytes that the object was read from; parts beyond a shorter `body` are left out.
    pub fn apply(&self, body: &[u8]) -> Vec<u8> {
        // The insertion comes first: a removal may start at the same position, and the sort is stable.
        let mut splices = vec![(self.insert_at..self.insert_at, self.insertion())];
        splices.extend(self.splices.iter().cloned());
        splices.extend(
            self.removals()
                .into_iter()
                .map(|range| (range, String::new())),
        );
        splices.sort_by_key(|(range, _)| range.start);

        let grown: usize = splices.iter().map(|(_, text)| text.len()).sum();
        let mut edited = Vec::with_capacity(body.len().saturating_add(grown));
        let mut from = 0;
        for (range, text) in &splices {
            edited.extend_from_slice(body.get(from..range.start).unwrap_or_default());
            edited.extend_from_slice(text.as_bytes());
            from = range.end;
        }
        edited.extend_from_slice(body.get(from..).unwrap_or_default());
        edited
    }

    fn insertion(&self) -> String {
        let members: Vec<String> = self
            .inserted
            .iter()
            .map(|(key, value)| format!("\"{key}\":{value}"))
            .collect();
        let mut text = members.join(",");
        if !text.is_empty() && self.remaining > 0 {
            text.push(',');
        }
        text
    }

    /// Ranges that remove each run of neighbouring members with exactly the commas that go with it.
    fn removals(&self) -> Vec<Range<usize>> {
        let mut spans = self.removed.clone();
        spans.sort_by_key(|span| span.index);
        let mut ranges = Vec::new();
        let mut spans = spans.into_iter().peekable();
        while let Some(first) = spans.next() {
            let mut last = first;
            while let Some(next) = spans.next_if(|next| next.index == last.index.saturating_add(1))
            {
                last = next;
            }
            ranges.push(match last.next_start {
                Some(next_start) => first.start..next_start,
                None if first.index > 0 => first.previous_end..last.end,
                None => first.start..last.end,
            });
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn edited(body: &str, wanted: &[&str], edit: impl Fn(&Object<'_>, &mut Edits)) -> String {
        let object = Object::parse(body.as_bytes(), wanted).unwrap();
        let mut edits = object.edit();
        edit(&object, &mut edits);
        String::from_utf8(edits.apply(body.as_bytes())).unwrap()
    }

    #[test]
    fn an_insertion_leaves_every_other_byte_alone() {
        let body = " {\r\n \"seed\" : 9007199254740993,\"a\":1.0,\t\"a\":1e400 , \"u\":\"\\u00e9\u{e9}\"} \n";
        let after = edited(body, &[], |_, edits| edits.insert("k", "{\"x\":1}"));
        assert_eq!(after, body.replacen('{', "{\"k\":{\"x\":1},", 1));
    }

    #[test]
    fn depth_is_that_of_lists_and_objects_and_brackets_in_text_are_none() {
        let nested = |depth: usize| format!("{}{}", "[{\"a\":".repeat(depth), "}]".repeat(depth));
        let nested = |depth: usize| nested(depth).replace(":}", ":1}");
        assert!(!is_deeper_than(4, nested(2).as_bytes()));
        assert!(is_deeper_than(3, nested(2).as_bytes()));
        let beside = format!("[{}]", vec!["[]"; 1000].join(","));
        assert!(!is_deeper_than(2, beside.as_bytes()) && is_deeper_than(1, beside.as_bytes()));
        let text = format!("[\"{}\\\"{}\"]", "[".repeat(1000), "{".repeat(1000));
        assert!(!is_deeper_than(1, text.as_bytes()));
        assert!(!is_deeper_than(0, b"7"));
    }

    #[test]
    fn all_ways_of_removing_keep_the_commas_right() {
        let names = ["a", "b", "c", "d"];
        for present in 1..=names.len() {
            let members: Vec<String> = names[..present]
                .iter()
                .map(|n| format!(" \"{n}\" : [1, 2]"))
                .collect();
            let body = format!("{{{} }}", members.join(" ,"));
            for mask in 0..(1u32 << present) {
                let gone: Vec<&str> = (0..present)
                    .filter(|i| mask & (1 << i) != 0)
                    .map(|i| names[i])
                    .collect();
                for insert in [false, true] {
                    let after = edited(&body, &names, |object, edits| {
                        gone.iter()
                            .for_each(|name| edits.remove(object.get(name).unwrap()));
                        if insert {
                            edits.insert("new", "0");
                        }
                    });
                    let map: serde_json::Map<_, _> = serde_json::from_str(&after)
                        .unwrap_or_else(|e| panic!("{body} - {gone:?} = {after}: {e}"));
                    assert_eq!(
                        map.len(),
                        present - gone.len() + usize::from(insert),
                        "{after}"
                    );
                    assert!(gone.iter().all(|name| !map.contains_key(*name)));
                }
            }
        }
    }

    #[test]
    fn duplicates_are_all_seen_and_the_last_one_counts() {
        let object = Object::parse(br#"{"a":1,"b":2,"a":3,"\u0061":4}"#, &["a"]).unwrap();
        let values: Vec<_> = object.all("a").map(|member| member.value).collect();
        assert_eq!(values, ["1", "3", "4"]);
        assert_eq!(object.get("a").unwrap().value, "4");
    }

    #[test]
    fn what_is_not_an_object_is_told_apart_from_what_is_not_json() {
        let kind = |body: &[u8]| Object::parse(body, &[]).unwrap_err();
        for list in [&b"[]"[..], b"null", b"\"x\"", b"12", b" [1,{}] "] {
            assert_eq!(kind(list), JsonError::NotAnObject, "{list:?}");
        }
        for bad in [
            &b""[..],
            b"{",
            b"{}x",
            b"{\"a\":NaN}",
            b"\xef\xbb\xbf{}",
            b"{\"a\":\"\xff\"}",
            b"{'a':1}",
            b"\x1f\x8b",
        ] {
            assert!(matches!(kind(bad), JsonError::Syntax(_)), "{bad:?}");
        }
    }

    #[test]
    fn the_elements_of_a_list_are_edited_where_they_are() {
        let list = "[ 1e400 ,\t{\"a\":1},\"]\" ]";
        assert_eq!(elements(list).unwrap(), ["1e400", "{\"a\":1}", "\"]\""]);
        assert_eq!(length(list), Some(3));
        let after = each_edited(list, |index, element| {
            let edit = |_: &Object<'_>, edits: &mut Edits| edits.insert("b", "2");
            super::edited(element, &["a"], edit).filter(|_| index == 1)
        });
        assert_eq!(after.unwrap(), "[ 1e400 ,\t{\"b\":2,\"a\":1},\"]\" ]");
        for other in ["{}", "null", "\"[]\"", "[", ""] {
            assert_eq!((elements(other), length(other)), (None, None), "{other}");
            assert_eq!(each_edited(other, |_, _| None), None, "{other}");
        }
    }

    #[test]
    fn what_says_nothing_is_told_from_what_says_something() {
        assert!(["null", "{}", "{ \n}"].into_iter().all(says_nothing));
        assert!(
            !["[]", "0", "\"\"", "{\"a\":null}", "false"]
                .into_iter()
                .any(says_nothing)
        );
    }

    #[test]
    fn deep_nesting_and_endless_repeats_are_no_danger() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(
            Object::parse(deep.as_bytes(), &["a"])
                .unwrap()
                .all("a")
                .count(),
            1
        );
        let open = format!("{{\"a\":{}", "[".repeat(100_000));
        assert!(Object::parse(open.as_bytes(), &["a"]).is_err());
        let many = format!("{{{}\"b\":1}}", "\"a\":1,".repeat(100_000));
        assert_eq!(
            Object::parse(many.as_bytes(), &["a"]).unwrap_err(),
            JsonError::TooManyRepeats
        );
        assert!(Object::parse(many.as_bytes(), &["b"]).is_ok());
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_object_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Object::parse(&bytes, &["a"]);
        }

        #[test]
        fn edits_of_any_object_say_what_was_asked(
            keys in proptest::collection::vec("[a-d]", 0..8),
            space in "[ \n\t]{0,2}",
        ) {
            let members: Vec<String> = keys.iter().enumerate()
                .map(|(i, key)| format!("{space}\"{key}\"{space}:{space}{i}{space}")).collect();
            let body = format!("{space}{{{space}{}}}", members.join(","));
            let after = edited(&body, &["a", "b"], |object, edits| {
                object.all("a").for_each(|member| edits.remove(member));
                object.all("b").for_each(|member| edits.replace(member, "\"new\""));
                edits.insert("z", "true");
            });
            let before: Vec<(String, String)> = pairs(&body);
            let expected: Vec<(String, String)> = std::iter::once(("z".to_owned(), "true".to_owned()))
                .chain(before.into_iter().filter(|(key, _)| key != "a")
                    .map(|(key, value)| if key == "b" { (key, "\"new\"".to_owned()) } else { (key, value) }))
                .collect();
            prop_assert_eq!(pairs(&after), expected);
        }
    }

    /// All members in order, duplicates kept.
    fn pairs(body: &str) -> Vec<(String, String)> {
        let object = Object::parse(body.as_bytes(), &["a", "b", "c", "d", "z"]).unwrap();
        object
            .members
            .iter()
            .map(|m| (m.key.to_string(), m.value.to_owned()))
            .collect()
    }
}
