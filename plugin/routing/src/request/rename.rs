//! Owns the model's name in a request: the name that replaces it before routing, and the edit.
//!
//! A gateway's header takes precedence over a rewrite for the model, and that over a rewrite for any model (gateway
//! contract, 1.6).

use serde::Deserialize;

use crate::json::{Object, quoted};
use crate::selection::{Random, weighted};

const MODEL: &str = "model";
/// Longest model name, in bytes: a longer one is no real name, so it stays and is not found.
const LONGEST: usize = 1024;

/// Replacement of a model's name before a request is routed. The client reads its own name in the answer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ModelRewrite {
    /// Name that clients use; absent: any name without a replacement of its own.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub model: Option<String>,
    /// Names that workers know, one of which is drawn by its weight.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub targets: Vec<ModelTarget>,
}

/// A model name that workers know.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ModelTarget {
    /// Name of the model, or of an adapter.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub model: String,
    /// Share of the requests, in relation to the weights of the other targets.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    #[serde(default = "one")]
    pub weight: u32,
}

fn one() -> u32 {
    1
}

/// A request with a replaced model name.
#[derive(Debug, PartialEq, Eq)]
pub struct Renamed {
    /// The body with the new name, all other bytes unchanged.
    pub body: Vec<u8>,
    /// The client's name; none where the client sent none.
    pub was: Option<String>,
}

/// The body with the name that the gateway in front, or the pool's `rewrites`, give; none where the name stays, or the body
/// cannot be read: the next reader then reports why.
pub fn rename(
    body: &[u8],
    wanted: Option<&str>,
    rewrites: &[ModelRewrite],
    random: &mut Random,
) -> Option<Renamed> {
    if wanted.is_none() && rewrites.is_empty() {
        return None;
    }
    let object = Object::parse(body, &[MODEL]).ok()?;
    let member = object.get(MODEL);
    let was = match member {
        None => None,
        // A model that is no string is not replaced, so that it is refused as sent.
        Some(member) => Some(serde_json::from_str::<String>(member.value).ok()?),
    };
    // The name would be kept, and written into every piece of the answer.
    if was.as_ref().is_some_and(|name| name.len() > LONGEST) {
        return None;
    }
    let name = match wanted {
        Some(name) => name,
        None => target(rewrites, was.as_deref(), random)?,
    };
    if was.as_deref() == Some(name) {
        return None;
    }
    let mut edits = object.edit();
    edits.set(&object, MODEL, &quoted(name));
    Some(Renamed {
        body: edits.apply(body),
        was,
    })
}

fn target<'r>(
    rewrites: &'r [ModelRewrite],
    was: Option<&str>,
    random: &mut Random,
) -> Option<&'r str> {
    let exact = rewrites
        .iter()
        .find(|rewrite| was.is_some() && rewrite.model.as_deref() == was);
    let any = || rewrites.iter().find(|rewrite| rewrite.model.is_none());
    draw(&exact.or_else(any)?.targets, random)
}

/// Draws one of the targets by weight.
fn draw<'r>(targets: &'r [ModelTarget], random: &mut Random) -> Option<&'r str> {
    if let [only] = targets {
        return Some(&only.model);
    }
    let weights = targets.iter().map(|target| u64::from(target.weight));
    let drawn = weighted(&weights.collect::<Vec<_>>(), random)?;
    targets.get(drawn).map(|target| target.model.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewrite(model: Option<&str>, targets: &[(&str, u32)]) -> ModelRewrite {
        ModelRewrite {
            model: model.map(str::to_owned),
            targets: targets
                .iter()
                .map(|(model, weight)| ModelTarget {
                    model: (*model).to_owned(),
                    weight: *weight,
                })
                .collect(),
        }
    }

    fn renamed(body: &str, wanted: Option<&str>, rewrites: &[ModelRewrite]) -> Option<String> {
        let mut random = Random::with_seed(1);
        let renamed = rename(body.as_bytes(), wanted, rewrites, &mut random)?;
        Some(String::from_utf8(renamed.body).unwrap())
    }

    #[test]
    fn a_header_comes_before_the_exact_rewrite_and_that_before_any() {
        let rewrites = [
            rewrite(None, &[("any", 1)]),
            rewrite(Some("m"), &[("exact", 1)]),
            rewrite(Some("m"), &[("second", 1)]),
        ];
        let body = r#"{ "model":"m", "seed":9007199254740993,"x":"<model>" }"#;
        let wanted = |name: &str| Some(body.replace("\"m\"", &format!("\"{name}\"")));
        assert_eq!(renamed(body, Some("h\"x"), &rewrites), wanted("h\\\"x"));
        assert_eq!(renamed(body, None, &rewrites), wanted("exact"));
        assert_eq!(renamed(body, None, &rewrites[..1]), wanted("any"));
        assert_eq!(renamed(body, None, &[]), None);
        assert_eq!(renamed(body, Some("m"), &rewrites), None);
        let other = r#"{"model":"other"}"#;
        assert_eq!(
            renamed(other, None, &rewrites).as_deref(),
            Some(r#"{"model":"any"}"#)
        );
        assert_eq!(renamed(other, None, &rewrites[1..]), None);
    }

    #[test]
    fn a_request_without_a_name_gets_one_and_what_is_no_name_stays() {
        let rewrites = [rewrite(None, &[("any", 1)])];
        assert_eq!(
            renamed(r#"{"prompt":"x"}"#, None, &rewrites).as_deref(),
            Some(r#"{"model":"any","prompt":"x"}"#)
        );
        assert_eq!(
            renamed("{}", Some("h"), &[]).as_deref(),
            Some(r#"{"model":"h"}"#)
        );
        for body in [r#"{"model":7}"#, "[]", "{", ""] {
            assert_eq!(renamed(body, Some("h"), &rewrites), None, "{body}");
        }
        // No duplicate may keep the old name.
        assert_eq!(
            renamed(r#"{"model":"a","model":"b"}"#, None, &rewrites).as_deref(),
            Some(r#"{"model":"any","model":"any"}"#)
        );
    }

    #[test]
    fn a_name_beyond_reason_is_not_taken_up() {
        let rewrites = [rewrite(None, &[("any", 1)])];
        let body = |length| format!(r#"{{"model":"{}"}}"#, "m".repeat(length));
        assert!(renamed(&body(LONGEST), None, &rewrites).is_some());
        assert!(renamed(&body(LONGEST + 1), None, &rewrites).is_none());
    }

    #[test]
    fn targets_are_drawn_by_their_weights() {
        let rewrites = [rewrite(None, &[("a", 1), ("b", 3)])];
        let mut random = Random::with_seed(7);
        let drawn = (0..4000).filter(|_| {
            let renamed = rename(b"{}", None, &rewrites, &mut random).unwrap();
            renamed.body.ends_with(b"\"b\"}")
        });
        let share = drawn.count() as f64 / 4000.0;
        assert!((0.70..0.80).contains(&share), "{share}");
    }
}
