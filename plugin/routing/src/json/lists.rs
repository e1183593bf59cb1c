//! Owns JSON lists, read element by element: the memory held does not grow with the list.

use std::fmt;
use std::ops::ControlFlow;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::offset;

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

/// Number of numbers in a list and in the lists inside it; 0 where `lists` is no list.
pub fn count_numbers(lists: &str) -> u64 {
    match lists.as_bytes().first() {
        Some(b'[') => serde_json::from_str(lists).map_or(0, |Numbers(count)| count),
        _ => 0,
    }
}

/// Count of numbers, taken while they are read.
struct Numbers(u64);

impl<'de> Deserialize<'de> for Numbers {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Counting;
        impl<'de> Visitor<'de> for Counting {
            type Value = Numbers;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("lists of numbers")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Numbers, A::Error> {
                let mut count = 0_u64;
                while let Some(Numbers(inside)) = list.next_element()? {
                    count = count.saturating_add(inside);
                }
                Ok(Numbers(count))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Numbers, A::Error> {
                while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Numbers(0))
            }

            fn visit_u64<E>(self, _: u64) -> Result<Numbers, E> {
                Ok(Numbers(1))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Numbers, E> {
                Ok(Numbers(1))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Numbers, E> {
                Ok(Numbers(1))
            }

            fn visit_str<E>(self, _: &str) -> Result<Numbers, E> {
                Ok(Numbers(0))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Numbers, E> {
                Ok(Numbers(0))
            }

            fn visit_unit<E>(self) -> Result<Numbers, E> {
                Ok(Numbers(0))
            }
        }
        from.deserialize_any(Counting)
    }
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
