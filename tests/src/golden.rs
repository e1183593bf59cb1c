//! Owns golden texts with holes: fixed bytes, except for the values that are random for each request.

use std::collections::BTreeMap;

/// Contents of the holes by name.
pub type Holes = BTreeMap<String, String>;

const OPENS: char = '‹';
const CLOSES: char = '›';

/// The contents of the holes `‹name›` of `template` in `text`; fails if the texts differ anywhere else, or if two holes of one
/// name differ.
#[track_caller]
pub fn holes(template: &str, text: &str) -> Holes {
    read(template, text).unwrap_or_else(|reason| {
        panic!("not the golden bytes: {reason}\ngolden: {template}\nseen:   {text}")
    })
}

/// The same, without failing the test.
///
/// # Errors
/// A sentence that says where the texts differ.
pub fn read(template: &str, text: &str) -> Result<Holes, String> {
    let mut pieces = template.split(OPENS);
    let first = pieces.next().unwrap_or_default();
    let mut rest = text
        .strip_prefix(first)
        .ok_or_else(|| format!("it does not begin with {first:?}"))?;
    let mut holes = Holes::new();
    let mut pieces = pieces.peekable();
    while let Some(piece) = pieces.next() {
        let (name, literal) = piece.split_once(CLOSES).unwrap_or((piece, ""));
        let end = match (literal, pieces.peek()) {
            ("", None) => rest.len(),
            _ => rest
                .find(literal)
                .ok_or_else(|| format!("{literal:?} does not follow ‹{name}›"))?,
        };
        let (held, after) = rest.split_at(end);
        let before = holes.insert(name.to_owned(), held.to_owned());
        if before.is_some_and(|before| before != held) {
            return Err(format!("‹{name}› is two things"));
        }
        rest = after.get(literal.len()..).unwrap_or_default();
    }
    match rest {
        "" => Ok(holes),
        more => Err(format!("{more:?} is too much")),
    }
}

/// `body` with these members, separated by commas, at the front of its object.
pub fn front(body: &str, members: &str) -> String {
    body.replacen('{', &format!("{{{members},"), 1)
}

/// The content of this hole as an integer.
#[track_caller]
pub fn number(holes: &Holes, name: &str) -> u64 {
    let text = &holes[name];
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    assert!(digits, "‹{name}› is no whole number: {text}");
    text.parse()
        .unwrap_or_else(|error| panic!("‹{name}› is {text}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_read_and_everything_else_compared() {
        let template = r#"{"room":‹room›,"host":"‹host›","a":1}"#;
        let found = holes(template, r#"{"room":17,"host":"::1","a":1}"#);
        assert_eq!(
            (number(&found, "room"), found["host"].as_str()),
            (17, "::1")
        );
        for other in [
            r#"{"room":17,"host":"::1","a":2}"#,
            r#"{"room":17,"host":"::1","a":1} "#,
            r#" {"room":17,"host":"::1","a":1}"#,
            r#"{"host":"::1","room":17,"a":1}"#,
        ] {
            assert!(read(template, other).is_err(), "{other}");
        }
    }

    #[test]
    fn a_hole_may_end_the_text_and_one_name_is_one_thing() {
        assert_eq!(holes("a‹x›", "abc")["x"], "bc");
        assert!(read("‹x›,‹x›", "1,1").is_ok());
        assert!(read("‹x›,‹x›", "1,2").is_err());
    }

    #[test]
    fn members_go_to_the_front() {
        assert_eq!(front(r#" {"a":{}}"#, r#""b":1"#), r#" {"b":1,"a":{}}"#);
    }
}
