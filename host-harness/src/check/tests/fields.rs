//! Tests of every field of the schema: a value of a wrong type is refused with its path, and bounds and defaults are as
//! documented.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::{SOURCES, parse, sound};
use crate::check::schema;
use crate::check::shape::{Absent, Field, Kind, Shape, Shapes};

/// The minimal valid value of a shape.
fn least(shape: &Shape<'_>) -> Value {
    match shape.kind() {
        Kind::Object => {
            let fields = shape.fields().into_iter();
            let required = fields.filter(|field| field.absent == Absent::Refused);
            required
                .map(|field| (field.name.to_owned(), least(&field.shape)))
                .collect::<Map<_, _>>()
                .into()
        }
        Kind::Choice(variants) => {
            let first = &variants[0];
            match &first.inner {
                Some(inner) => json!({first.name: least(inner)}),
                None => json!(first.name),
            }
        }
        Kind::List(_) => json!([]),
        Kind::Map(_) => json!({}),
        Kind::Plain => match shape.schema["type"].as_str() {
            Some("string") => json!("10.0.0.1:80"),
            Some("boolean") => json!(false),
            _ => json!(1),
        },
    }
}

/// A value whose type this shape does not accept.
fn wrong(shape: &Shape<'_>) -> Value {
    match shape.schema["type"] == "boolean" {
        true => json!("true"),
        false => json!(true),
    }
}

/// Documents with one error each, and its path.
struct Wrongs {
    found: Vec<(String, Value)>,
}

impl Wrongs {
    /// `document` embeds a value at `path` in a complete document.
    fn visit(&mut self, shape: &Shape<'_>, path: &str, document: &dyn Fn(Value) -> Value) {
        self.found.push((path.to_owned(), document(wrong(shape))));
        match shape.kind() {
            Kind::Object => {
                let around = least(shape);
                for field in shape.fields() {
                    let path = match path.is_empty() {
                        true => field.name.to_owned(),
                        false => format!("{path}.{}", field.name),
                    };
                    self.visit(&field.shape, &path, &|value| {
                        let mut around = around.clone();
                        around[field.name] = value;
                        document(around)
                    });
                }
            }
            Kind::List(item) => {
                self.visit(&item, &format!("{path}[0]"), &|value| {
                    document(json!([value]))
                });
            }
            Kind::Map(inner) => {
                self.visit(&inner, &format!("{path}.some"), &|value| {
                    document(json!({"some": value}))
                });
            }
            Kind::Choice(variants) => {
                for variant in variants {
                    let Some(inner) = variant.inner else {
                        continue;
                    };
                    let path = format!("{path}.{}", variant.name);
                    self.visit(&inner, &path, &|value| {
                        document(json!({variant.name: value}))
                    });
                }
            }
            Kind::Plain => {}
        }
    }
}

#[test]
fn a_wrong_type_is_refused_by_its_path() {
    let shapes = Shapes::new(schema::document());
    let mut wrongs = Wrongs { found: Vec::new() };
    wrongs.visit(&shapes.document(), "", &|value| value);
    let fields: BTreeSet<_> = wrongs.found.iter().map(|(path, _)| path).collect();
    assert!(fields.len() > 120, "only {} fields", fields.len());
    for (path, document) in &wrongs.found {
        let error = parse(document).unwrap_err();
        let path = if path.is_empty() { "." } else { path };
        assert!(
            error.starts_with(&format!("{path}: ")),
            "{document}\n  is refused with: {error}\n  and not at: {path}"
        );
    }
}

/// Every bounded number, in an otherwise valid document.
fn bounded(source: &str) -> Vec<(String, Value, String)> {
    let shapes = Shapes::new(schema::document());
    let mut found = Vec::new();
    collect(&shapes.document(), &sound(source), "", "", &mut found);
    found
}

/// Adds (path, schema, JSON pointer) of the numbers within a value.
fn collect(
    shape: &Shape<'_>,
    value: &Value,
    path: &str,
    pointer: &str,
    found: &mut Vec<(String, Value, String)>,
) {
    let inner = |name: &str| {
        let dot = if path.is_empty() { "" } else { "." };
        (format!("{path}{dot}{name}"), format!("{pointer}/{name}"))
    };
    match shape.kind() {
        Kind::Object => {
            for Field { name, shape, .. } in shape.fields() {
                let (path, pointer) = inner(name);
                let value = value.get(name).unwrap_or(&Value::Null);
                collect(&shape, value, &path, &pointer, found);
            }
        }
        Kind::List(item) => {
            for (index, value) in value.as_array().into_iter().flatten().enumerate() {
                let path = format!("{path}[{index}]");
                collect(&item, value, &path, &format!("{pointer}/{index}"), found);
            }
        }
        Kind::Map(of) => {
            for (name, value) in value.as_object().into_iter().flatten() {
                let (path, pointer) = inner(name);
                collect(&of, value, &path, &pointer, found);
            }
        }
        Kind::Choice(variants) => {
            for variant in variants {
                let shape = variant.inner;
                if let (Some(shape), Some(value)) = (shape, value.get(variant.name)) {
                    let (path, pointer) = inner(variant.name);
                    collect(&shape, value, &path, &pointer, found);
                }
            }
        }
        Kind::Plain => found.push((path.to_owned(), shape.schema.clone(), pointer.to_owned())),
    }
}

/// Sets a value at a JSON pointer, creating the objects on the way.
fn put(document: &mut Value, pointer: &str, value: Value) {
    let mut place = document;
    for name in pointer.split('/').skip(1) {
        place = match (name.parse::<usize>(), &place) {
            (Ok(index), Value::Array(_)) => &mut place[index],
            _ => &mut place[name],
        };
    }
    *place = value;
}

/// Parses a valid document with this one change; if refused, returns whether the error names this path.
fn with(source: &str, pointer: &str, value: &Value) -> Result<(), String> {
    let mut document = sound(source);
    put(&mut document, pointer, value.clone());
    parse(&document).map(drop)
}

#[test]
fn bounds_are_those_that_are_said() {
    let mut tried = 0;
    for source in SOURCES {
        for (path, schema, pointer) in bounded(source) {
            // With Dynamo, workers are not called directly, so that no metrics are polled.
            if source == "dynamo" && pointer.contains("/engine_metrics/") {
                continue;
            }
            for (bound, step) in [("minimum", -1), ("maximum", 1)] {
                let Some(bound) = schema[bound].as_i64() else {
                    continue;
                };
                let beyond = json!(bound + step);
                let refused = with(source, &pointer, &beyond).unwrap_err();
                assert!(refused.starts_with(&path), "{path} = {beyond}: {refused}");
                let accepted = with(source, &pointer, &json!(bound));
                // A few fields have another field as their lower bound.
                let is_bound = accepted
                    .as_ref()
                    .err()
                    .is_none_or(|error| error.contains("at least "));
                assert!(is_bound, "{path} = {bound}: {accepted:?}");
                tried += 1;
            }
        }
    }
    assert!(tried > 100, "only {tried} bounds");
}

/// The same with all defaults filled in.
fn filled(shape: &Shape<'_>, value: &Value) -> Value {
    match (shape.kind(), value) {
        (Kind::Object, Value::Object(_) | Value::Null) => {
            let fields = shape.fields().into_iter().filter_map(|field| {
                let value = match (value.get(field.name), field.absent) {
                    (Some(value), _) => filled(&field.shape, value),
                    (None, Absent::Default(default)) => default.clone(),
                    (None, Absent::Defaults) => filled(&field.shape, &Value::Null),
                    (None, Absent::Nothing | Absent::Refused) => return None,
                };
                Some((field.name.to_owned(), value))
            });
            fields.collect::<Map<_, _>>().into()
        }
        (Kind::List(item), Value::Array(values)) => {
            values.iter().map(|value| filled(&item, value)).collect()
        }
        (Kind::Map(of), Value::Object(values)) => values
            .iter()
            .map(|(name, value)| (name.clone(), filled(&of, value)))
            .collect::<Map<_, _>>()
            .into(),
        (Kind::Choice(variants), Value::Object(values)) => values
            .iter()
            .map(|(name, value)| {
                let variant = variants.iter().find(|variant| variant.name == name);
                let inner = variant.and_then(|variant| variant.inner).unwrap();
                (name.clone(), filled(&inner, value))
            })
            .collect::<Map<_, _>>()
            .into(),
        _ => value.clone(),
    }
}

#[test]
fn defaults_are_those_that_are_said() {
    let shapes = Shapes::new(schema::document());
    for source in SOURCES {
        let document = sound(source);
        let filled = filled(&shapes.document(), &document);
        assert!(filled["pools"][0]["prefill"]["attempts"].is_number());
        assert_eq!(parse(&filled), parse(&document), "{filled}");
    }
}
