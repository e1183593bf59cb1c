//! Owns the reading of the configuration's schema: fields and types, independent of the schema's notation.

use serde_json::Value;

/// The schema of the whole document.
pub struct Shapes {
    schema: Value,
}

/// A field of an object.
pub struct Field<'a> {
    /// Its name.
    pub name: &'a str,
    /// What it means.
    pub description: &'a str,
    /// Meaning of an absent field.
    pub absent: Absent<'a>,
    /// Its type.
    pub shape: Shape<'a>,
}

/// Effect of an absent field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Absent<'a> {
    /// The configuration is refused.
    Refused,
    /// This value applies.
    Default(&'a Value),
    /// An object in which each field has its own default.
    Defaults,
    /// No value applies.
    Nothing,
}

/// The accepted values of one place.
#[derive(Clone, Copy)]
pub struct Shape<'a> {
    shapes: &'a Shapes,
    /// The schema, with references resolved.
    pub schema: &'a Value,
    /// The type's name, if any.
    pub name: Option<&'a str>,
}

/// Kinds of accepted values.
pub enum Kind<'a> {
    /// An object with fields.
    Object,
    /// One of several values or objects with one field.
    Choice(Vec<Variant<'a>>),
    /// A list of this shape.
    List(Shape<'a>),
    /// An object with arbitrary names and values of this shape.
    Map(Shape<'a>),
    /// A number, a string, a bool.
    Plain,
}

/// One of several accepted alternatives.
pub struct Variant<'a> {
    /// Its name.
    pub name: &'a str,
    /// What it means.
    pub description: &'a str,
    /// The value's shape, if the name is the one field of an object; otherwise the name alone is the value.
    pub inner: Option<Shape<'a>>,
}

impl Shapes {
    /// The shapes of a schema.
    pub fn new(schema: Value) -> Self {
        Self { schema }
    }

    /// The whole document.
    pub fn document(&self) -> Shape<'_> {
        self.shape(&self.schema)
    }

    /// The type of this name.
    pub fn named(&self, name: &str) -> Option<Shape<'_>> {
        let (name, schema) = self.schema.get("$defs")?.as_object()?.get_key_value(name)?;
        Some(Shape {
            shapes: self,
            schema,
            name: Some(name),
        })
    }

    fn shape<'a>(&'a self, schema: &'a Value) -> Shape<'a> {
        let written = schema["anyOf"].as_array().and_then(|any| any.first());
        let schema = written.unwrap_or(schema);
        let named = schema["$ref"].as_str().and_then(|reference| {
            let name = reference.strip_prefix("#/$defs/")?;
            self.named(name)
        });
        named.unwrap_or(Shape {
            shapes: self,
            schema,
            name: None,
        })
    }
}

impl<'a> Shape<'a> {
    /// Its kind.
    pub fn kind(&self) -> Kind<'a> {
        if let Some(variants) = self.schema["oneOf"].as_array() {
            return Kind::Choice(variants.iter().flat_map(|one| self.variants(one)).collect());
        }
        if self.schema["enum"].is_array() {
            return Kind::Choice(self.variants(self.schema));
        }
        if self.schema["properties"].is_object() {
            return Kind::Object;
        }
        if self.schema["items"].is_object() {
            return Kind::List(self.shapes.shape(&self.schema["items"]));
        }
        match self.schema["additionalProperties"].is_object() {
            true => Kind::Map(self.shapes.shape(&self.schema["additionalProperties"])),
            false => Kind::Plain,
        }
    }

    /// The fields of an object: required ones first, then by name.
    pub fn fields(&self) -> Vec<Field<'a>> {
        let schema: &'a Value = self.schema;
        let required = schema["required"].as_array();
        let is_required =
            |name: &str| required.is_some_and(|names| names.iter().any(|one| one == name));
        let properties = schema["properties"].as_object();
        let mut fields: Vec<_> = properties
            .into_iter()
            .flatten()
            .map(|(name, property)| self.field(name, property, is_required(name)))
            .collect();
        fields.sort_by_key(|field| (field.absent != Absent::Refused, field.name));
        fields
    }

    fn field(&self, name: &'a str, property: &'a Value, is_required: bool) -> Field<'a> {
        let shape = self.shapes.shape(property);
        let absent = match property.get("default") {
            _ if is_required => Absent::Refused,
            Some(default) => Absent::Default(default),
            None if property["anyOf"].is_array() => Absent::Nothing,
            None if matches!(shape.kind(), Kind::Object) => Absent::Defaults,
            None => Absent::Nothing,
        };
        Field {
            name,
            description: property["description"].as_str().unwrap_or_default(),
            absent,
            shape,
        }
    }

    fn variants(&self, schema: &'a Value) -> Vec<Variant<'a>> {
        let description = schema["description"].as_str().unwrap_or_default();
        let plain = |name: &'a Value| {
            Some(Variant {
                name: name.as_str()?,
                description,
                inner: None,
            })
        };
        if let Some(names) = schema["enum"].as_array() {
            return names.iter().filter_map(plain).collect();
        }
        if let Some(variant) = schema.get("const").and_then(plain) {
            return vec![variant];
        }
        let properties = schema["properties"].as_object();
        properties
            .into_iter()
            .flatten()
            .map(|(name, inner)| Variant {
                name,
                description,
                inner: Some(self.shapes.shape(inner)),
            })
            .collect()
    }

    /// Whether the value must not be shown.
    pub fn is_secret(&self) -> bool {
        self.schema["writeOnly"] == true
    }

    /// Unit of a number.
    pub fn unit(&self) -> Option<&'a str> {
        self.schema["x-unit"].as_str()
    }
}
