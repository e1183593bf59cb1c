//! Owns the positions of an object's members of interest, apart from its bytes: a kept text need not be read again.

use std::borrow::Cow;

use super::{Member, Object, Position};

/// A parsed object without its bytes.
#[derive(Debug, Clone)]
pub struct ObjectSpans {
    open: usize,
    count: usize,
    /// The members by their keys.
    members: Vec<(String, Position)>,
}

impl Object<'_> {
    /// Positions of the members, valid as long as the text is kept.
    pub fn spans(&self) -> ObjectSpans {
        let members = self.members.iter();
        ObjectSpans {
            open: self.open,
            count: self.count,
            members: members
                .map(|member| (member.key.to_string(), member.at))
                .collect(),
        }
    }
}

impl ObjectSpans {
    /// The object over its `text`, which must be the text it was read from. Cost grows with the members of interest, not
    /// with the text.
    pub fn over<'a>(&'a self, text: &'a str) -> Object<'a> {
        let member = |(key, at): &'a (String, Position)| {
            Some(Member {
                key: Cow::Borrowed(key.as_str()),
                value: text.get(at.value_start..at.end)?,
                at: *at,
            })
        };
        Object {
            open: self.open,
            count: self.count,
            members: self.members.iter().filter_map(member).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_over_its_text_is_the_one_that_was_read() {
        let text = " {\"a\":1 , \"b\\u0063\" :[2,{}],\"a\":\"\u{e9}\",\"z\":null} ";
        let wanted = ["a", "bc"];
        let read = Object::parse(text.as_bytes(), &wanted).unwrap();
        let spans = read.spans();
        let again = spans.over(text);
        assert_eq!(format!("{again:?}"), format!("{read:?}"));
        let edited = |object: &Object<'_>| {
            let mut edits = object.edit();
            object.all("a").for_each(|member| edits.remove(member));
            edits.insert("k", "7");
            edits.apply(text.as_bytes())
        };
        assert_eq!(edited(&again), edited(&read));
        // Over another text, members that do not fit are missing.
        assert!(spans.over("{}").get("a").is_none());
    }
}
