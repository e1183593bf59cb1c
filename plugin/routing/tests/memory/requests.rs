//! Tests that request bodies have a bounded number of values, and that reading one holds no more than a few times the body.

use std::time::Duration;

use routing::config::Config;
use routing::json::MAX_VALUES;
use routing::request::Generation;
use routing::route::{Plan, PlanInput, Refusal, Router};
use serde_json::json;

use crate::peak::peak_of;

fn router(protocol: &str) -> Router {
    let worker = |role: &str, id: u64| json!({"role": role, "id": id, "address": format!("127.0.0.1:{id}"), "model": "m"});
    let workers = json!([worker("prefill", 1), worker("decode", 2)]);
    let pool =
        json!({"name": "p", "protocol": protocol, "discovery": {"static": {"workers": workers}}});
    let config = Config::parse(json!({"pools": [pool]}).to_string().as_bytes()).unwrap();
    Router::new(config.pools[0].clone(), 42, 7, Duration::ZERO)
}

fn plan(protocol: &str, generation: Generation, body: &[u8]) -> Result<Plan, Refusal> {
    let input = PlanInput {
        now: Duration::from_secs(1),
        ..PlanInput::default()
    };
    router(protocol).plan(generation, body, input)
}

/// A body with a list of `count` elements between `before` and `after`.
fn body(before: &str, element: &str, count: usize, after: &str) -> Vec<u8> {
    let list = vec![element; count].join(",");
    format!("{before}[{list}]{after}").into_bytes()
}

/// Positions of lists of small values: generation, text before, element, number of values per element, and text after.
const PLACES: [(Generation, &str, &str, usize, &str); 8] = [
    (
        Generation::Completions,
        r#"{"model":"m","prompt":"#,
        "\"\"",
        1,
        "}",
    ),
    (
        Generation::Completions,
        r#"{"model":"m","prompt":"#,
        "7",
        1,
        "}",
    ),
    (
        Generation::Completions,
        r#"{"model":"m","prompt":"#,
        "[7]",
        2,
        "}",
    ),
    (
        Generation::Chat,
        r#"{"model":"m","messages":"#,
        "{}",
        2,
        "}",
    ),
    (
        Generation::Chat,
        r#"{"model":"m","messages":[{"role":"user","content":"#,
        r#"{"type":"text","text":"a"}"#,
        5,
        "}]}",
    ),
    (
        Generation::Chat,
        r#"{"model":"m","messages":[{"role":"user","content":"#,
        "\"\"",
        1,
        "}]}",
    ),
    (
        Generation::Responses,
        r#"{"model":"m","input":"#,
        r#"{"role":"user","content":"a"}"#,
        5,
        "}",
    ),
    (
        Generation::Chat,
        r#"{"model":"m","messages":[],"tools":"#,
        "{}",
        2,
        "}",
    ),
];

#[test]
fn found_b13_a_body_of_more_values_than_may_be_is_refused_before_it_is_read() {
    for (generation, before, element, values, after) in PLACES {
        let long = body(before, element, MAX_VALUES / values + 1, after);
        let (peak, refused) = peak_of(|| plan("nixl", generation, &long).err());
        let is_about_the_body = matches!(refused, Some(Refusal::Field { name: "body", .. }));
        assert!(is_about_the_body, "{before}{element}: {refused:?}");
        assert!(peak < 1_000_000, "{before}{element}: {peak} bytes");
    }
}

#[test]
fn found_b13_a_body_of_almost_so_many_values_holds_a_few_times_its_own_length() {
    for (generation, before, element, values, after) in PLACES {
        let long = body(before, element, MAX_VALUES / values - 20, after);
        let (peak, plan) = peak_of(|| plan("nixl", generation, &long).err());
        let is_about_the_body = matches!(plan, Some(Refusal::Field { name: "body", .. }));
        assert!(!is_about_the_body, "{before}{element}: {plan:?}");
        // Sequence hashes, and text that is sorted: never a tree of the values.
        assert!(
            peak < 6 * long.len() + 4_000_000,
            "{before}{element}: {peak} bytes for {}",
            long.len()
        );
    }
}

#[test]
fn found_b13_text_is_no_value_however_it_is_written() {
    // Ten megabytes that would be values outside of a string.
    let text = r#"[{\"a\": [1, 2, 3]}, {\"b\\n\": \"x, y\"}] "#.repeat(250_000);
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#);
    assert!(plan("nixl", Generation::Chat, body.as_bytes()).is_ok());
}
