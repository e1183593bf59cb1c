//! Owns what is common to all legs that only compute the prompt, or only fetch the KV: one token, unstreamed.
//!
//! The limit is set under each name that the client uses, since engines differ in which one wins. Engines reject a lower bound
//! above the limit, so it becomes 1, and not 0: with a lower bound prefill's token is never the end of the answer. Stream
//! options without a stream are rejected too, and removed.

use crate::json::{Edits, Object, each_edited, edited};
use crate::request::sequences::SAMPLING;
use crate::request::{Generation, Request};

const LIMITS: [&str; 3] = ["max_tokens", "max_completion_tokens", "max_output_tokens"];

/// The limit among the sampling parameters of SGLang's `/generate`.
const SAMPLED: &str = "max_new_tokens";

/// Edits that make the client's body request one token, unstreamed.
pub fn edits(request: &Request<'_>) -> Edits {
    let body = &request.body;
    let mut edits = body.edit();
    match request.generation {
        Generation::Generate => limit_sampling(body, &mut edits),
        Generation::Responses => limit(body, "max_output_tokens", &mut edits),
        _ => limit(body, "max_tokens", &mut edits),
    }
    edits.replace_all(body, "stream", "false");
    edits.remove_all(body, "stream_options");
    bound(body, "min_tokens", &mut edits);
    edits
}

fn limit(body: &Object<'_>, name: &str, edits: &mut Edits) {
    if body.get(name).is_none() {
        edits.insert(name, "1");
    }
    for name in LIMITS {
        edits.replace_all(body, name, "1");
    }
}

/// Lowers a lower bound to 1, where it is more.
fn bound(body: &Object<'_>, name: &str, edits: &mut Edits) {
    let is_more =
        |value: &str| value != "null" && !value.parse().is_ok_and(|least: f64| least <= 1.0);
    body.all(name)
        .filter(|member| is_more(member.value))
        .for_each(|member| edits.replace(member, "1"));
}

fn limit_sampling(body: &Object<'_>, edits: &mut Edits) {
    const NAME: &str = "sampling_params";
    if body.get(NAME).is_none() {
        edits.insert(NAME, sampling("null"));
    }
    body.all(NAME)
        .for_each(|member| edits.replace(member, sampling(member.value)));
}

/// Sampling parameters, one object or a list of objects, with the limit set.
fn sampling(params: &str) -> String {
    let limited = match params.as_bytes().first() {
        Some(b'{') => sampling_object(params),
        Some(b'[') => each_edited(params, |_, object| sampling_object(object)),
        _ => Some(format!("{{\"{SAMPLED}\":1}}")),
    };
    limited.unwrap_or_else(|| params.to_owned())
}

fn sampling_object(params: &str) -> Option<String> {
    edited(params, SAMPLING, |object, edits| {
        edits.set(object, SAMPLED, "1");
        bound(object, "min_new_tokens", edits);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leg(generation: Generation, body: &str) -> String {
        let request = Request::parse(generation, body.as_bytes()).unwrap();
        String::from_utf8(edits(&request).apply(body.as_bytes())).unwrap()
    }

    #[test]
    fn golden_bytes() {
        for (generation, body, expected) in [
            (
                Generation::Chat,
                r#"{"model":"m", "stream" : true,"stream_options":{"include_usage":true},"messages":[],"seed":9007199254740993,"min_tokens":5,"max_tokens":100 }"#,
                r#"{"model":"m", "stream" : false,"messages":[],"seed":9007199254740993,"min_tokens":1,"max_tokens":1 }"#,
            ),
            (
                Generation::Chat,
                r#"{"model":"m","messages":[],"max_completion_tokens":null}"#,
                r#"{"max_tokens":1,"model":"m","messages":[],"max_completion_tokens":1}"#,
            ),
            (
                Generation::Completions,
                r#"{"max_tokens":3,"model":"m","prompt":[1,2],"max_tokens":null,"best_of":1}"#,
                r#"{"max_tokens":1,"model":"m","prompt":[1,2],"max_tokens":1,"best_of":1}"#,
            ),
            (
                Generation::Responses,
                r#"{"model":"m","input":"p"}"#,
                r#"{"max_output_tokens":1,"model":"m","input":"p"}"#,
            ),
        ] {
            assert_eq!(leg(generation, body), expected);
        }
    }

    #[test]
    fn a_lower_bound_is_at_most_one() {
        let leg = |least: &str| {
            let body = format!(r#"{{"model":"m","messages":[],"min_tokens":{least}}}"#);
            let leg: serde_json::Value =
                serde_json::from_str(&leg(Generation::Chat, &body)).unwrap();
            leg["min_tokens"].to_string()
        };
        for (least, bounded) in [
            ("null", "null"),
            ("0", "0"),
            ("1", "1"),
            ("2", "1"),
            ("100", "1"),
        ] {
            assert_eq!(leg(least), bounded, "{least}");
        }
    }

    #[test]
    fn generate_has_its_limit_among_the_sampling_parameters() {
        let sampled =
            |params: &str| format!(r#"{{"text":"t","sampling_params":{params}, "stream":false}}"#);
        for (params, limited) in [
            (
                r#"{"temperature":0, "max_new_tokens":64,"min_new_tokens":3}"#,
                r#"{"temperature":0, "max_new_tokens":1,"min_new_tokens":1}"#,
            ),
            ("{}", r#"{"max_new_tokens":1}"#),
            ("null", r#"{"max_new_tokens":1}"#),
            (r#"{ "n":2}"#, r#"{"max_new_tokens":1, "n":2}"#),
            (
                r#"[ {"max_new_tokens":9} , {}, {"min_new_tokens":1}]"#,
                r#"[ {"max_new_tokens":1} , {"max_new_tokens":1}, {"max_new_tokens":1,"min_new_tokens":1}]"#,
            ),
        ] {
            let body = sampled(params).replace("false", "true");
            assert_eq!(
                leg(Generation::Generate, &body),
                sampled(limited),
                "{params}"
            );
        }
        assert_eq!(
            leg(Generation::Generate, r#"{"input_ids":[[1],[2]]}"#),
            r#"{"sampling_params":{"max_new_tokens":1},"input_ids":[[1],[2]]}"#
        );
    }
}
