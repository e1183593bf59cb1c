//! Owns the configuration's JSON Schema, made from its types: descriptions on one line, and each number's unit.

use routing::config::Config;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

/// Unit of a number by the suffix of its field's name. Other fields state it at the type, with `x-unit`.
const UNITS: [(&str, &str); 4] = [
    ("_ms", "milliseconds"),
    ("bytes", "bytes"),
    ("tokens", "tokens"),
    ("blocks", "blocks"),
];

/// The schema, in draft 2020-12.
pub fn document() -> Value {
    let generator = SchemaSettings::draft2020_12()
        .for_deserialize()
        .into_generator();
    let mut schema = generator.into_root_schema_for::<Config>().to_value();
    schema["title"] = json!("pd-router's plugin configuration");
    tidy(&mut schema);
    schema
}

/// The schema's text as committed.
pub fn text() -> String {
    format!("{:#}\n", document())
}

fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(keywords) => tidy_keywords(keywords),
        Value::Array(schemas) => schemas.iter_mut().for_each(tidy),
        _ => {}
    }
}

fn tidy_keywords(keywords: &mut Map<String, Value>) {
    if let Some(Value::String(text)) = keywords.get_mut("description") {
        *text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    }
    // A field's absence from `required` already says that it may be absent.
    if keywords.get("default").is_some_and(Value::is_null) {
        keywords.remove("default");
    }
    bound(keywords);
    if let Some(Value::Object(fields)) = keywords.get_mut("properties") {
        for (name, field) in fields {
            add_unit(name, field);
        }
    }
    for (_, inner) in keywords.iter_mut().filter(|(name, _)| *name != "default") {
        tidy(inner);
    }
}

/// Turns a width that only Rust knows into bounds that every validator knows.
fn bound(keywords: &mut Map<String, Value>) {
    let Some(Value::String(format)) = keywords.get("format") else {
        return;
    };
    let most = match format.as_str() {
        "uint32" => Some(u64::from(u32::MAX)),
        "int32" | "int64" | "uint" | "uint8" | "uint16" | "uint64" | "double" => None,
        _ => return,
    };
    keywords.remove("format");
    if let Some(most) = most {
        keywords.entry("maximum").or_insert(json!(most));
    }
}

fn add_unit(name: &str, field: &mut Value) {
    let is_integer = match &field["type"] {
        Value::Array(types) => types.contains(&json!("integer")),
        kind => kind == "integer",
    };
    let unit = UNITS.iter().find(|(ending, _)| name.ends_with(ending));
    if let (true, Some((_, unit)), Some(field)) = (is_integer, unit, field.as_object_mut()) {
        field.entry("x-unit").or_insert(json!(unit));
    }
}
