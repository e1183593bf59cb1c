//! Owns the check of the members that bound an answer. A prefill leg has its own values in their place, so that a wrong one
//! would show only when decode refuses it, after the prompt was computed for nothing.

use serde_json::value::RawValue;

use super::{Generation, sequences};
use crate::json::Object;
use crate::refusal::Refusal;

const MOST: [&str; 3] = ["max_tokens", "max_completion_tokens", "max_output_tokens"];
const LEAST: &str = "min_tokens";
const STREAM_OPTIONS: &str = "stream_options";

/// Checks the limits and the options of a stream.
///
/// # Errors
/// [`Refusal::Field`] names the wrong member.
pub(super) fn check(object: &Object<'_>) -> Result<(), Refusal> {
    for name in MOST.into_iter().chain([LEAST]) {
        let is_count = |value: &str| value == "null" || count(value).is_some();
        if !object.all(name).all(|member| is_count(member.value)) {
            return Err(Refusal::Field {
                name,
                problem: "must be a whole number of tokens, from 0",
            });
        }
    }
    let least = object.get(LEAST).and_then(|member| count(member.value));
    let most = MOST
        .iter()
        .filter_map(|name| count(object.get(name)?.value))
        .fold(f64::INFINITY, f64::min);
    if least.is_some_and(|least| least > most) {
        return Err(Refusal::Field {
            name: LEAST,
            problem: "must not be above the most tokens that the answer may have",
        });
    }
    let is_options = |value: &str| value == "null" || value.starts_with('{');
    match object
        .all(STREAM_OPTIONS)
        .all(|member| is_options(member.value))
    {
        true => Ok(()),
        false => Err(Refusal::Field {
            name: STREAM_OPTIONS,
            problem: "must be an object",
        }),
    }
}

/// A whole number, with `5.0` accepted as in engines; none of anything else, and of values that no count can have.
pub(super) fn whole(value: &str) -> Option<u64> {
    value.parse().ok().or_else(|| {
        let number = count(value)?;
        (number < EXACT).then_some(number as u64)
    })
}

/// Above it not every whole number is a 64-bit float.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// The client's limit on an answer's tokens; none where not set.
pub(super) fn max_tokens(generation: Generation, object: &Object<'_>) -> Option<u64> {
    if generation == Generation::Generate {
        return max_new_tokens(object);
    }
    let names = ["max_completion_tokens", "max_output_tokens", "max_tokens"];
    names.iter().find_map(|name| whole(object.get(name)?.value))
}

/// SGLang's limit: the largest of several, none where one of them is not set.
fn max_new_tokens(object: &Object<'_>) -> Option<u64> {
    #[derive(serde::Deserialize)]
    struct Sampling<'a> {
        #[serde(borrow)]
        max_new_tokens: &'a RawValue,
    }
    let objects = sequences::objects(object.get("sampling_params")?.value)?;
    let limits = objects
        .into_iter()
        .map(|object| serde_json::from_str::<Sampling<'_>>(object).ok());
    let limits: Option<Vec<u64>> = limits
        .map(|sampling| whole(sampling?.max_new_tokens.get()))
        .collect();
    limits?.into_iter().max()
}

/// A token count. Engines accept `5.0` for 5.
fn count(value: &str) -> Option<f64> {
    let number: f64 = serde_json::from_str(value).ok()?;
    (number >= 0.0 && number.fract() == 0.0).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(members: &str) -> Option<&'static str> {
        let body = format!("{{{members}}}");
        let wanted = ["max_tokens", "max_completion_tokens", LEAST, STREAM_OPTIONS];
        let object = Object::parse(body.as_bytes(), &wanted).unwrap();
        match check(&object) {
            Err(Refusal::Field { name, .. }) => Some(name),
            _ => None,
        }
    }

    #[test]
    fn what_an_engine_would_refuse_at_decode_is_refused_before_prefill() {
        for (members, wrong) in [
            (r#""max_tokens":"many""#, "max_tokens"),
            (r#""max_tokens":1.5"#, "max_tokens"),
            (r#""max_tokens":-1"#, "max_tokens"),
            (r#""max_tokens":"x","max_tokens":5"#, "max_tokens"),
            (r#""max_completion_tokens":{}"#, "max_completion_tokens"),
            (r#""min_tokens":"few""#, LEAST),
            (r#""min_tokens":6,"max_tokens":5"#, LEAST),
            (r#""stream_options":7"#, STREAM_OPTIONS),
        ] {
            assert_eq!(fault(members), Some(wrong), "{members}");
        }
    }

    #[test]
    fn what_can_be_meant_passes() {
        for members in [
            "",
            r#""max_tokens":null,"min_tokens":3,"stream_options":null"#,
            r#""max_tokens":5.0,"min_tokens":5"#,
            r#""max_tokens":0"#,
            r#""max_completion_tokens":18446744073709551616,"stream_options":{ }"#,
        ] {
            assert_eq!(fault(members), None, "{members}");
        }
    }
}
