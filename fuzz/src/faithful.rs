//! Owns the check of an edited body: it is still JSON, and every member that no edit names is unchanged, byte for byte.
//!
//! The body is read by a parser of its own: the parser under test would be blind to its own faults.

use std::fmt;

use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

/// A member as written: its key in quotes, its value.
type Member<'a> = (&'a str, &'a str);

struct Members<'a>(Vec<Member<'a>>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Members<'de>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Members<'de>, M::Error> {
                let mut members = Vec::new();
                while let Some(key) = map.next_key::<&RawValue>()? {
                    members.push((key.get(), map.next_value::<&RawValue>()?.get()));
                }
                Ok(Members(members))
            }
        }
        from.deserialize_map(Reads)
    }
}

fn members(body: &[u8]) -> Option<Vec<Member<'_>>> {
    serde_json::from_slice::<Members<'_>>(body)
        .ok()
        .map(|members| members.0)
}

fn name(key: &str) -> String {
    serde_json::from_str(key).unwrap_or_else(|_| key.to_owned())
}

/// Checks that `edited` is `body` with only the members in `named` changed, added or removed.
///
/// # Panics
/// When it is not.
pub fn check_edited(body: &[u8], edited: &[u8], named: &[&str]) {
    let before = members(body).expect("an edited body was an object");
    let after = members(edited).unwrap_or_else(|| {
        panic!(
            "{} became {}",
            String::from_utf8_lossy(body),
            String::from_utf8_lossy(edited)
        )
    });
    let others = |members: &[Member<'_>]| -> Vec<(String, String)> {
        let others = members
            .iter()
            .filter(|(key, _)| !named.contains(&name(key).as_str()));
        others
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    };
    assert_eq!(others(&before), others(&after));
    let opening = |body: &[u8]| body.iter().position(|byte| *byte == b'{');
    let closing = |body: &[u8]| body.iter().rposition(|byte| *byte == b'}');
    let (from, to) = (opening(body), opening(edited));
    assert_eq!(from.map(|at| &body[..at]), to.map(|at| &edited[..at]));
    let (from, to) = (closing(body), closing(edited));
    assert_eq!(from.map(|at| &body[at..]), to.map(|at| &edited[at..]));
}
