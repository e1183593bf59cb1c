//! Owns the explanation of a configuration: every setting with its effective value, written or default, and a summary of each
//! pool.

use routing::config::Config;
use serde_json::Value;

use super::schema;
use super::shape::{Absent, Kind, Shape, Shapes};
use super::summary;

/// An explained configuration.
#[derive(Debug, PartialEq)]
pub struct Explanation {
    /// Path of the configuration.
    pub place: String,
    /// Summary of each pool.
    pub pools: Vec<Summary>,
    /// Every setting.
    pub settings: Vec<Setting>,
}

/// Summary of a pool, in sentences.
#[derive(Debug, PartialEq, serde::Serialize)]
pub struct Summary {
    /// Name of the pool.
    pub name: String,
    /// The sentences.
    pub says: Vec<String>,
}

/// One setting.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Setting {
    /// Path of the setting, written or not.
    pub path: String,
    /// Effective value; null: none.
    pub value: Value,
    /// Unit of a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Whether the value is written or the default.
    pub origin: Origin,
}

/// Origin of a setting's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Written in the configuration.
    Written,
    /// Not written.
    Default,
}

/// Replacement of a secret.
const HIDDEN: &str = "…";

impl Explanation {
    /// Explains `document`, which was parsed as `config`.
    pub fn of(place: &str, document: &Value, config: &Config) -> Self {
        let shapes = Shapes::new(schema::document());
        let mut settings = Settings::default();
        settings.written(&shapes.document(), document, "");
        Self {
            place: place.to_owned(),
            pools: config
                .pools
                .iter()
                .map(|pool| summary::of(pool, &shapes))
                .collect(),
            settings: settings.found,
        }
    }

    /// The settings of the pool at this index; without an index, those shared by all pools.
    pub fn settings_of(&self, pool: Option<usize>) -> Vec<(&str, &Setting)> {
        let prefix = pool.map_or_else(String::new, |index| format!("pools[{index}]."));
        let is_meant = |path: &str| pool.is_some() || !path.starts_with("pools[");
        let named = self.settings.iter().filter_map(|setting| {
            let path = setting.path.strip_prefix(&prefix)?;
            Some((path, setting))
        });
        named.filter(|(path, _)| is_meant(path)).collect()
    }
}

#[derive(Default)]
struct Settings {
    found: Vec<Setting>,
}

impl Settings {
    /// Adds the written value at a path, and the defaults of what is not written.
    fn written(&mut self, shape: &Shape<'_>, value: &Value, path: &str) {
        match (shape.kind(), value) {
            (Kind::Object, Value::Object(_)) => self.fields(shape, value, path),
            (Kind::List(item), Value::Array(values)) if is_composed(&item) => {
                for (index, value) in values.iter().enumerate() {
                    self.written(&item, value, &format!("{path}[{index}]"));
                }
            }
            (Kind::Map(inner), Value::Object(values)) if is_composed(&inner) => {
                for (name, value) in values {
                    self.written(&inner, value, &join(path, name));
                }
            }
            (Kind::Choice(variants), Value::Object(values)) => {
                for (name, value) in values {
                    let variant = variants.iter().find(|variant| variant.name == name);
                    if let Some(inner) = variant.and_then(|variant| variant.inner) {
                        self.written(&inner, value, &join(path, name));
                    }
                }
            }
            _ => self.add(shape, value.clone(), path, Origin::Written),
        }
    }

    fn fields(&mut self, shape: &Shape<'_>, value: &Value, path: &str) {
        for field in shape.fields() {
            let path = join(path, field.name);
            match (value.get(field.name), field.absent) {
                (Some(value), _) => self.written(&field.shape, value, &path),
                (None, Absent::Defaults) => self.fields(&field.shape, &Value::Null, &path),
                (None, Absent::Default(default)) => {
                    self.add(&field.shape, default.clone(), &path, Origin::Default);
                }
                (None, Absent::Nothing | Absent::Refused) => {
                    self.add(&field.shape, Value::Null, &path, Origin::Default);
                }
            }
        }
    }

    fn add(&mut self, shape: &Shape<'_>, value: Value, path: &str, origin: Origin) {
        let value = match shape.is_secret() {
            true => HIDDEN.into(),
            false => value,
        };
        self.found.push(Setting {
            path: path.to_owned(),
            value,
            unit: shape.unit().map(str::to_owned),
            origin,
        });
    }
}

/// Whether the shape has settings of its own.
fn is_composed(shape: &Shape<'_>) -> bool {
    matches!(shape.kind(), Kind::Object)
}

fn join(path: &str, name: &str) -> String {
    match path.is_empty() {
        true => name.to_owned(),
        false => format!("{path}.{name}"),
    }
}
