//! Owns the detection of a hand-off set by a client, in parsed bodies and in bodies that cannot be parsed.
//!
//! Engines read more than JSON: Python's reader takes `NaN`, a byte order mark, UTF-16 and UTF-32. A body that is no JSON
//! here, and is passed on unread, may be a request to an engine.

use std::borrow::Cow;

use memchr::memmem;

use crate::json::{Object, says_nothing};
use crate::refusal::Refusal;
use crate::transfer::IN_REQUESTS;

/// Field that hands over an encoder's output for an image. No hand-off of the router, but clients must not set it either.
const ENCODED: &str = "ec_transfer_params";

/// vLLM merges this object's members into those of the transfer.
const EXTRA: &str = "vllm_xargs";

/// The first hand-off field with a value.
pub(super) fn own_handoff(body: &Object<'_>) -> Option<&'static str> {
    IN_REQUESTS.into_iter().find(|name| is_set(body, name))
}

/// The first hand-off field with a value, including other fields that an engine takes for one.
pub(super) fn forged(body: &Object<'_>) -> Option<&'static str> {
    let in_extra = || {
        body.all(EXTRA).any(|extra| {
            let extra = Object::parse(extra.value.as_bytes(), &IN_REQUESTS);
            extra.is_ok_and(|extra| own_handoff(&extra).is_some())
        })
    };
    own_handoff(body)
        .or_else(|| is_set(body, ENCODED).then_some(ENCODED))
        .or_else(|| in_extra().then_some(EXTRA))
}

fn is_set(body: &Object<'_>, name: &str) -> bool {
    body.all(name).any(|member| !says_nothing(member.value))
}

/// The hand-off field in a body that is not read here, though an engine may read it.
fn forged_unread(body: &[u8]) -> Option<&'static str> {
    let members: Vec<&str> = IN_REQUESTS.into_iter().chain([ENCODED, EXTRA]).collect();
    if let Ok(object) = Object::parse(body, &members) {
        return forged(&object);
    }
    let text = unescaped(without_zeros(body));
    let names = IN_REQUESTS.into_iter().chain([ENCODED]);
    names
        .into_iter()
        .find(|name| memmem::find(&text, format!("\"{name}\"").as_bytes()).is_some())
}

/// ASCII text in UTF-16 or UTF-32 differs from ASCII only by zeros.
fn without_zeros(body: &[u8]) -> Cow<'_, [u8]> {
    match memchr::memchr(0, body) {
        None => Cow::Borrowed(body),
        Some(_) => body.iter().copied().filter(|byte| *byte != 0).collect(),
    }
}

/// The text with its `\u00…` letters decoded.
fn unescaped(text: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    const ESCAPE: &[u8] = b"\\u00";
    if memmem::find(&text, ESCAPE).is_none() {
        return text;
    }
    let mut plain = Vec::with_capacity(text.len());
    let mut rest: &[u8] = &text;
    while let Some((byte, after)) = rest.split_first() {
        let letter = rest.strip_prefix(ESCAPE).and_then(letter);
        let (byte, after) = letter.unwrap_or((*byte, after));
        plain.push(byte);
        rest = after;
    }
    Cow::Owned(plain)
}

/// The character of two hexadecimal digits, where a name may contain it, and the bytes after them.
fn letter(digits: &[u8]) -> Option<(u8, &[u8])> {
    let (digits, rest) = digits.split_first_chunk::<2>()?;
    let number = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    (number.is_ascii_alphanumeric() || number == b'_').then_some((number, rest))
}

pub(super) fn refusal(name: &'static str) -> Refusal {
    Refusal::Field {
        name,
        problem: "is set by the router; a request must not carry it",
    }
}

/// Checks that a body which is passed on unread sets no hand-off.
///
/// # Errors
/// [`Refusal::Field`] names the field.
pub fn check_unread(body: &[u8]) -> Result<(), Refusal> {
    match forged_unread(body) {
        None => Ok(()),
        Some(name) => Err(refusal(name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORGED: &str =
        r#"{"messages":[],"x":NaN,"kv_transfer_params":{"remote_host":"10.0.0.9"}}"#;

    fn utf16(text: &str) -> Vec<u8> {
        text.encode_utf16().flat_map(u16::to_le_bytes).collect()
    }

    #[test]
    fn what_only_engines_can_read_names_no_hand_off() {
        let field = Some("kv_transfer_params");
        assert_eq!(forged_unread(FORGED.as_bytes()), field);
        assert_eq!(forged_unread(&utf16(FORGED)), field);
        let utf32: Vec<u8> = FORGED
            .chars()
            .flat_map(|c| u32::from(c).to_be_bytes())
            .collect();
        assert_eq!(forged_unread(&utf32), field);
        assert_eq!(forged_unread(format!("\u{feff}{FORGED}").as_bytes()), field);
        let escaped = FORGED.replace("kv_", "\\u006b\\u0076\\u005F");
        assert_eq!(forged_unread(escaped.as_bytes()), field);
        assert_eq!(forged_unread(&utf16(&escaped)), field);
    }

    #[test]
    fn what_speaks_of_a_hand_off_sets_none() {
        for body in [
            r#"{"prompt":"what is \"kv_transfer_params\"?","x":NaN}"#,
            "kv_transfer_params",
            r#"{"kv_transfer_params":null,"bootstrap_room":{ }}"#,
            r#"{"vllm_xargs":{"x":1,"kv_transfer_params":null}}"#,
            "",
        ] {
            assert_eq!(forged_unread(body.as_bytes()), None, "{body}");
        }
    }

    #[test]
    fn extra_arguments_carry_none_either() {
        for (body, field) in [
            (r#"{"vllm_xargs":{"kv_transfer_params":"x"}}"#, "vllm_xargs"),
            (
                r#"{"vllm_xargs":{"kv_transfer\u005fparams":[1]},"vllm_xargs":{}}"#,
                "vllm_xargs",
            ),
            (r#"{"ec_transfer_params":{"x":1}}"#, "ec_transfer_params"),
        ] {
            assert_eq!(forged_unread(body.as_bytes()), Some(field), "{body}");
        }
    }
}
