//! Owns the positions of an object's members of interest, apart from its bytes: a kept text need not be read again.

use std::borrow::Cow;

use super::{Member, Object};

/// A parsed object without its bytes.
#[derive(Debug, Clone)]
pub struct ObjectSpans {
    open: usize,
    count: usize,
    members: Vec<MemberSpan>,
}

/// Position of one member.
#[derive(Debug, Clone)]
struct MemberSpan {
    key: String,
    index: usize,
    start: usize,
    value_start: usize,
    end: usize,
    previous_end: usize,
    next_start: Option<usize>,
}

impl Object<'_> {
    /// Positions of the members, valid as long as the text is kept.
    pub fn spans(&self) -> ObjectSpans {
        let span = |member: &Member<'_>| MemberSpan {
            key: member.key.to_string(),
            index: member.index,
            start: member.start,
            value_start: member.value_start,
            end: member.end,
            previous_end: member.previous_end,
            next_start: member.next_start,
        };
        ObjectSpans {
            open: self.open,
            count: self.count,
            members: self.members.iter().map(span).collect(),
        }
    }
}

impl ObjectSpans {
    /// The object over its `text`, which must be the text it was read from. Cost grows with the members of interest, not
    /// with the text.
    pub fn over<'a>(&'a self, text: &'a str) -> Object<'a> {
        let member = |span: &'a MemberSpan| {
            Some(Member {
                key: Cow::Borrowed(span.key.as_str()),
                value: text.get(span.value_start..span.end)?,
                index: span.index,
                start: span.start,
                value_start: span.value_start,
                end: span.end,
                previous_end: span.previous_end,
                next_start: span.next_start,
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
