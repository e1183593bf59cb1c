//! Owns the canonical bytes of JSON values: two spellings of one value have the same bytes.
//!
//! Text is written unescaped. Structure is written as marks, bytes that never occur in UTF-8, so that text cannot be taken
//! for structure. The values must be valid JSON, as in a parsed body; they can then be walked in a fraction of the time
//! that a parser needs.

use std::borrow::Cow;

use memchr::{memchr, memchr2};
use xxhash_rust::xxh3::Xxh3Default;

use crate::json::behind_string;
use crate::prefix::hash::Text;

/// Members of one object that are sorted; an object with more is taken as written, and not held in memory.
const MAX_MEMBERS: usize = 64;

/// Structure of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mark {
    /// The opening quote of a string inside another value.
    Open = 0xf5,
    /// The closing quote.
    Close = 0xf6,
    /// A message begins, with its role.
    Message = 0xf7,
    /// A member begins, with its key.
    Member = 0xf8,
    /// A member's value follows.
    Value = 0xf9,
    /// A message's content follows.
    Content = 0xfa,
    /// The next part of a list.
    Part = 0xfb,
    /// An image or another medium, with its hash.
    Media = 0xfc,
    /// The next prompt of a batch.
    Prompt = 0xfd,
}

/// Receives the stream.
pub trait Sink {
    /// Takes the next bytes.
    fn put(&mut self, bytes: &[u8]);

    /// Takes the next byte.
    fn push(&mut self, byte: u8);

    /// Takes a mark.
    fn mark(&mut self, mark: Mark) {
        self.push(mark as u8);
    }

    /// Takes the key of a member whose value follows.
    fn member(&mut self, key: &str) {
        self.mark(Mark::Member);
        self.put(key.as_bytes());
        self.mark(Mark::Value);
    }
}

impl Sink for Text {
    fn put(&mut self, bytes: &[u8]) {
        Text::put(self, bytes);
    }

    fn push(&mut self, byte: u8) {
        Text::push(self, byte);
    }
}

impl Sink for Xxh3Default {
    fn put(&mut self, bytes: &[u8]) {
        self.update(bytes);
    }

    fn push(&mut self, byte: u8) {
        self.update(&[byte]);
    }
}

/// The type of a value, from its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape<'a> {
    /// `null`
    Null,
    /// A string: the bytes between its quotes, escapes included.
    String(&'a str),
    /// A list.
    List,
    /// An object.
    Object,
    /// A number, true, false.
    Other,
}

/// The shape of a value without white space around it.
pub fn shape(value: &str) -> Shape<'_> {
    match value.as_bytes().first() {
        Some(b'"') => {
            let quoted = value.strip_prefix('"').unwrap_or_default();
            Shape::String(quoted.strip_suffix('"').unwrap_or(quoted))
        }
        Some(b'[') => Shape::List,
        Some(b'{') => Shape::Object,
        Some(b'n') => Shape::Null,
        _ => Shape::Other,
    }
}

/// Writes the inside of a string, unescaped.
pub fn text(inside: &str, sink: &mut impl Sink) {
    let mut rest = inside.as_bytes();
    while let Some(at) = memchr(b'\\', rest) {
        let (plain, escape) = rest.split_at_checked(at).unwrap_or((rest, &[]));
        sink.put(plain);
        rest = unescape(escape.get(1..).unwrap_or_default(), sink);
    }
    sink.put(rest);
}

/// Writes a value as written, without white space, strings unescaped and between marks.
pub fn value(raw: &str, sink: &mut impl Sink) {
    let mut rest = raw.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        rest = match byte {
            b'"' => {
                sink.mark(Mark::Open);
                let closed = put_string(after, sink);
                sink.mark(Mark::Close);
                closed
            }
            b' ' | b'\t' | b'\n' | b'\r' => after,
            bare => {
                sink.push(*bare);
                after
            }
        };
    }
}

/// Writes a string, given the bytes after its opening quote, unescaped; returns the bytes after its closing quote.
fn put_string<'a>(opened: &'a [u8], sink: &mut impl Sink) -> &'a [u8] {
    let mut rest = opened;
    loop {
        let stop = memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
        let Some((plain, stop)) = rest.split_at_checked(stop) else {
            return &[];
        };
        sink.put(plain);
        rest = match stop.split_first() {
            Some((b'\\', after)) => unescape(after, sink),
            Some((_, after)) => return after,
            None => return &[],
        };
    }
}

/// Writes the character of an escape, given the bytes after its backslash; returns the bytes after the escape.
fn unescape<'a>(after: &'a [u8], sink: &mut impl Sink) -> &'a [u8] {
    let Some((letter, rest)) = after.split_first() else {
        return after;
    };
    let byte = match letter {
        b'b' => 8,
        b'f' => 12,
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'u' => return unescape_unicode(rest, sink),
        itself => *itself,
    };
    sink.push(byte);
    rest
}

/// Like `unescape`, for the bytes after `\u`: four digits, or two such escapes that form one character.
fn unescape_unicode<'a>(after: &'a [u8], sink: &mut impl Sink) -> &'a [u8] {
    let Some((first, rest)) = unit(after) else {
        return &[];
    };
    let second = rest.strip_prefix(b"\\u").and_then(unit);
    let (low, behind_both) = second.unwrap_or((0, rest));
    match char::decode_utf16([first, low]).next() {
        Some(Ok(found)) => {
            sink.put(found.encode_utf8(&mut [0; 4]).as_bytes());
            match found.len_utf16() {
                2 => behind_both,
                _ => rest,
            }
        }
        // Half a character: written as UTF-8 would write it if it could.
        _ => {
            let [high, low] = first.to_be_bytes();
            let middle = 0x80 | ((high & 0x0f) << 2) | (low >> 6);
            sink.put(&[0xe0 | (high >> 4), middle, 0x80 | (low & 0x3f)]);
            rest
        }
    }
}

/// Four hexadecimal digits, and the bytes after them.
fn unit(text: &[u8]) -> Option<(u16, &[u8])> {
    let (digits, rest) = text.split_first_chunk::<4>()?;
    let digits = std::str::from_utf8(digits).ok()?;
    Some((u16::from_str_radix(digits, 16).ok()?, rest))
}

/// A member: its key, unescaped, and its value as written.
pub type CanonicalMember<'a> = (Cow<'a, str>, &'a str);

/// The members of an object that are not null, sorted: those in `order` first, then the others by key. The last of
/// duplicates counts. None if `object` is no object, or has more than 64 members.
pub fn members<'a>(object: &'a str, order: &[&str]) -> Option<Vec<CanonicalMember<'a>>> {
    let mut members = members_as_written(object)?;
    let place = |key: &str| order.iter().position(|named| *named == key);
    members.sort_by(|(left, _), (right, _)| {
        let rank = |key: &str| place(key).unwrap_or(order.len());
        rank(left).cmp(&rank(right)).then_with(|| left.cmp(right))
    });
    // The sort is stable, so the last of equal keys is the last one written.
    members.dedup_by(|later, kept| {
        let same = later.0 == kept.0;
        if same {
            kept.1 = later.1;
        }
        same
    });
    members.retain(|(_, value)| shape(value) != Shape::Null);
    Some(members)
}

fn members_as_written(object: &str) -> Option<Vec<CanonicalMember<'_>>> {
    let mut rest = object.strip_prefix('{')?.trim_ascii_start();
    let mut members = Vec::with_capacity(4);
    while rest.starts_with('"') {
        if members.len() >= MAX_MEMBERS {
            return None;
        }
        let (key, after) = split_value(rest);
        let value = after.trim_ascii_start().strip_prefix(':')?;
        let (value, after) = split_value(value.trim_ascii_start());
        members.push((plain(key), value));
        rest = next(after);
    }
    Some(members)
}

/// The value of a member; none where missing or null.
pub fn find<'a>(members: &[CanonicalMember<'a>], key: &str) -> Option<&'a str> {
    let found = members.iter().find(|(name, _)| name == key);
    found.map(|(_, value)| *value)
}

/// Calls `each` with every element of a list, and never for another value.
pub fn elements<'a>(list: &'a str, mut each: impl FnMut(&'a str)) {
    let mut rest = list
        .strip_prefix('[')
        .unwrap_or_default()
        .trim_ascii_start();
    loop {
        let (element, after) = split_value(rest);
        if element.is_empty() {
            return;
        }
        each(element);
        rest = next(after);
    }
}

/// The bytes after the comma behind a value; empty at the end.
fn next(after: &str) -> &str {
    let comma = after.trim_ascii_start().strip_prefix(',');
    comma.unwrap_or_default().trim_ascii_start()
}

/// Splits after the value at the beginning of `text`; that value is empty before a closing bracket.
fn split_value(text: &str) -> (&str, &str) {
    let bytes = text.as_bytes();
    let rest = match bytes.split_first() {
        Some((b'"', opened)) => behind_string(opened),
        Some((b'{' | b'[', _)) => skip_nested(bytes),
        _ => skip_bare(bytes),
    };
    let length = text.len().saturating_sub(rest.len());
    text.split_at_checked(length).unwrap_or((text, ""))
}

/// The bytes after a list or an object. Needs no stack, however deep the nesting.
fn skip_nested(text: &[u8]) -> &[u8] {
    let mut open = 0usize;
    let mut rest = text;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'"' => rest = behind_string(after),
            b'{' | b'[' => open = open.saturating_add(1),
            b'}' | b']' => open = open.saturating_sub(1),
            _ => {}
        }
        if open == 0 {
            break;
        }
    }
    rest
}

/// The bytes after a number, true, false or null.
fn skip_bare(text: &[u8]) -> &[u8] {
    let ends = |byte: &u8| matches!(byte, b',' | b']' | b'}' | b' ' | b'\t' | b'\n' | b'\r');
    let end = text.iter().position(ends);
    text.get(end.unwrap_or(text.len())..).unwrap_or_default()
}

/// The text of a string, or another value as written.
pub fn plain(value: &str) -> Cow<'_, str> {
    match shape(value) {
        Shape::String(inside) if !inside.contains('\\') => Cow::Borrowed(inside),
        Shape::String(_) => {
            serde_json::from_str::<String>(value).map_or(Cow::Borrowed(value), Cow::Owned)
        }
        _ => Cow::Borrowed(value),
    }
}
