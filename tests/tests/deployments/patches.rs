//! Owns the effect of gateways' patches: JSON Patch's `add`, and merging as protocol buffers do.

use serde_json::{Map, Value};

/// Merges like a protocol buffer: field by field, lists concatenated.
pub fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                merge(into.entry(name).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) => into.extend(from.iter().cloned()),
        (into, from) => *into = from.clone(),
    }
}

/// `add` of RFC 6902, which creates missing parents, as in Envoy Gateway.
pub fn add(into: &mut Value, pointer: &str, value: &Value) {
    let mut at = into;
    for step in pointer.split('/').skip(1) {
        let step = step.replace("~1", "/").replace("~0", "~");
        at = match at {
            Value::Array(items) => {
                let index: usize = step
                    .parse()
                    .unwrap_or_else(|_| panic!("{pointer}: {step} is no index"));
                items
                    .get_mut(index)
                    .unwrap_or_else(|| panic!("{pointer}: there is no {index}"))
            }
            other => {
                if other.is_null() {
                    *other = Value::Object(Map::new());
                }
                let fields = other
                    .as_object_mut()
                    .unwrap_or_else(|| panic!("{pointer}: {step} is below a value"));
                fields.entry(step).or_insert(Value::Null)
            }
        };
    }
    *at = value.clone();
}

/// Selection by a JSON path of the one form that the manifests use: `$..LIST[?(@.name=='NAME')].FIELD.FIELD`.
pub fn selected<'a>(within: &'a mut Value, json_path: &str) -> Vec<&'a mut Value> {
    let parts = json_path
        .strip_prefix("$..")
        .and_then(|path| path.split_once("[?(@.name=='"))
        .and_then(|(list, rest)| Some((list, rest.split_once("')]")?)));
    let (list, (name, fields)) = parts.unwrap_or_else(|| panic!("{json_path}: another form"));
    let mut named = Vec::new();
    named_within(within, list, name, &mut named);
    let below = |found: &'a mut Value| {
        fields
            .split('.')
            .skip(1)
            .fold(found, |at, field| &mut at[field])
    };
    named.into_iter().map(below).collect()
}

fn named_within<'a>(value: &'a mut Value, list: &str, name: &str, found: &mut Vec<&'a mut Value>) {
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                if field == list {
                    let items = value.as_array_mut().into_iter().flatten();
                    found.extend(items.filter(|item| item["name"] == name));
                } else {
                    named_within(value, list, name, found);
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                named_within(item, list, name, found);
            }
        }
        _ => {}
    }
}
