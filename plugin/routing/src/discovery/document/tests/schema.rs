//! Tests that `docs/workers.schema.json` and the parser agree: the same fields, the same bounds, the same examples.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::{WrittenDocument, parse};
use crate::config::{ListedWorker, ProtocolName};
use crate::fleet::Role;
use crate::fleet::topology::Topology;

fn schema() -> Value {
    let text = include_str!("../../../../../../docs/workers.schema.json");
    serde_json::from_str(text).unwrap()
}

/// The fields of a type, taken from serde's error for an unknown one.
fn fields<T: DeserializeOwned>() -> BTreeSet<String> {
    let refused = serde_json::from_value::<T>(json!({"no such field": 1}));
    let said = refused.err().unwrap().to_string();
    let quoted = said.split('`').skip(1).step_by(2);
    quoted
        .filter(|name| *name != "no such field")
        .map(str::to_owned)
        .collect()
}

fn properties(schema: &Value) -> BTreeSet<String> {
    assert_eq!(schema["additionalProperties"], false);
    let properties = schema["properties"].as_object().unwrap();
    properties.keys().cloned().collect()
}

#[test]
fn it_has_the_fields_that_are_read() {
    let schema = schema();
    let worker = &schema["$defs"]["worker"];
    assert_eq!(properties(&schema), fields::<WrittenDocument>());
    assert_eq!(properties(worker), fields::<ListedWorker>());
    assert_eq!(
        properties(&schema["$defs"]["topology"]),
        fields::<Topology>()
    );
    let roles = Role::ALL.map(|role| json!(role.name()));
    assert_eq!(worker["properties"]["role"]["enum"], json!(roles));
}

/// Whether a worker with the required fields and this one is accepted.
fn reads(field: &str, value: &Value) -> bool {
    let mut worker = json!({"address": "10.0.0.1:8000", "role": "decode"});
    worker[field] = value.clone();
    let document = json!({ "workers": [worker] }).to_string();
    parse(document.as_bytes(), ProtocolName::Nixl).is_ok()
}

#[test]
fn what_it_requires_bounds_and_leaves_out_is_what_the_parser_does() {
    let schema = schema();
    let worker = &schema["$defs"]["worker"];
    assert_eq!(worker["required"], json!(["role"]));
    for (field, property) in worker["properties"].as_object().unwrap() {
        let is_of = |name: &str| match &property["type"] {
            Value::Array(names) => names.iter().any(|one| one == name),
            one => one == name,
        };
        // A property without a type is a choice or a reference.
        let is_plain = !property["type"].is_null();
        let may_be_null = is_of("null") || property["anyOf"].is_array();
        if field != "address" {
            assert_eq!(reads(field, &Value::Null), may_be_null, "{field}: null");
        }
        if is_plain && field != "address" {
            assert_eq!(
                reads(field, &json!("text")),
                is_of("string"),
                "{field}: text"
            );
            assert_eq!(reads(field, &json!(7)), is_of("integer"), "{field}: 7");
            assert_eq!(
                reads(field, &json!(true)),
                is_of("boolean"),
                "{field}: true"
            );
            assert_eq!(reads(field, &json!(["a"])), is_of("array"), "{field}: list");
        }
        for (bound, step) in [("minimum", -1_i128), ("maximum", 1)] {
            let Some(number) = property[bound].as_u64() else {
                continue;
            };
            assert!(reads(field, &json!(number)), "{field}: {bound}");
            let Ok(beyond) = i64::try_from(i128::from(number) + step) else {
                continue;
            };
            assert!(!reads(field, &json!(beyond)), "{field}: beyond {bound}");
        }
        if !property["default"].is_null() {
            assert!(reads(field, &property["default"]), "{field}: default");
        }
    }
    let name = &worker["properties"]["name"];
    let longest = name["maxLength"].as_u64().unwrap() as usize;
    assert!(reads("name", &json!("n".repeat(longest))));
    assert!(!reads("name", &json!("n".repeat(longest + 1))));
    assert!(!reads("name", &json!("")));
}

#[test]
fn its_examples_are_read() {
    let schema = schema();
    let examples = schema["examples"].as_array().unwrap();
    assert!(!examples.is_empty());
    for example in examples {
        let workers = parse(example.to_string().as_bytes(), ProtocolName::Nixl).unwrap();
        assert_eq!(workers.len(), example["workers"].as_array().unwrap().len());
    }
}
