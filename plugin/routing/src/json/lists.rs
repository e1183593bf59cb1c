//! Owns JSON lists, read element by element: the memory held does not grow with the list.

use std::fmt;
use std::ops::ControlFlow;

use serde::de::{Deserializer, Error, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::{offset, outside_strings};

/// Maximum elements returned as one list: for millions of elements that takes eight times the text's size.
const MAX_LISTED: usize = 65_536;

/// Passes a list's elements to `visit` as written, one after the other, until `visit` breaks; none where `list` is no list.
fn visit_elements<'a>(list: &'a str, visit: impl FnMut(&'a str) -> ControlFlow<()>) -> Option<()> {
    struct Elements<F>(F);
    impl<'a, F: FnMut(&'a str) -> ControlFlow<()>> Visitor<'a> for Elements<F> {
        type Value = ();

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("a list")
        }

        fn visit_seq<A: SeqAccess<'a>>(mut self, mut list: A) -> Result<(), A::Error> {
            while let Some(element) = list.next_element::<&RawValue>()? {
                if (self.0)(element.get()).is_break() {
                    return Err(Error::custom("stopped"));
                }
            }
            Ok(())
        }
    }
    let mut json = serde_json::Deserializer::from_str(list);
    json.deserialize_seq(Elements(visit)).ok()?;
    json.end().ok()
}

/// The elements of a list as written; none where `list` is no list, or has more than 65,536 elements.
pub fn elements(list: &str) -> Option<Vec<&str>> {
    let mut found = Vec::new();
    visit_elements(list, |element| {
        if found.len() >= MAX_LISTED {
            return ControlFlow::Break(());
        }
        found.push(element);
        ControlFlow::Continue(())
    })?;
    Some(found)
}

/// Number of elements of a list; none where `list` is no list.
pub fn length(list: &str) -> Option<usize> {
    let elements: Vec<IgnoredAny> = serde_json::from_str(list).ok()?;
    Some(elements.len())
}

/// The list with each element replaced by `edit`'s result, or kept where `edit` returns none; none where `list` is no list.
pub fn each_edited(
    list: &str,
    mut edit: impl FnMut(usize, &str) -> Option<String>,
) -> Option<String> {
    let mut text = String::with_capacity(list.len());
    let (mut index, mut from) = (0_usize, 0);
    visit_elements(list, |element| {
        if let Some(other) = edit(index, element) {
            let start = offset(list, element);
            text.push_str(list.get(from..start).unwrap_or_default());
            text.push_str(&other);
            from = start.saturating_add(element.len());
        }
        index = index.saturating_add(1);
        ControlFlow::Continue(())
    })?;
    text.push_str(list.get(from..)?);
    Some(text)
}

/// Number of numbers in a list and in the lists inside it; 0 where `lists`, which must be valid JSON, is no list.
pub fn count_numbers(lists: &str) -> u64 {
    if !(lists.starts_with('[') && lists.ends_with(']')) {
        return 0;
    }
    let (mut count, mut objects, mut before) = (0_u64, 0_usize, b'[');
    for byte in outside_strings(lists.as_bytes()) {
        match byte {
            b'{' => objects = objects.saturating_add(1),
            b'}' => objects = objects.saturating_sub(1),
            b'-' | b'0'..=b'9' if objects == 0 => {
                let begins = matches!(before, b'[' | b',' | b' ' | b'\t' | b'\r' | b'\n');
                count = count.saturating_add(u64::from(begins));
            }
            _ => {}
        }
        before = byte;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_counted_however_the_lists_lie() {
        for (lists, count) in [
            ("[]", 0),
            ("[1, -2,3.5]", 3),
            ("[[1,2],[3],[]]", 3),
            (r#"[[1,"2",null,true,{"a":[4]}],18446744073709551616]"#, 2),
            ("7", 0),
            (r#"{"a":[1]}"#, 0),
            ("[1", 0),
        ] {
            assert_eq!(count_numbers(lists), count, "{lists}");
        }
    }

    #[test]
    fn no_more_elements_are_listed_than_may_be() {
        let list = |count: usize| format!("[{}]", vec!["0"; count].join(","));
        assert_eq!(elements(&list(MAX_LISTED)).unwrap().len(), MAX_LISTED);
        assert!(elements(&list(MAX_LISTED + 1)).is_none());
        assert_eq!(length(&list(MAX_LISTED + 1)), Some(MAX_LISTED + 1));
        assert_eq!(
            elements(r#"[1, {"a":[2]} ,"x"]"#),
            Some(vec!["1", r#"{"a":[2]}"#, r#""x""#])
        );
        assert!(
            elements("[1,]").is_none() && elements("{}").is_none() && elements("[] 1").is_none()
        );
    }
}
