//! Owns the files made from the configuration's schema: the schema itself, and the tables of `envoy/config-reference.md`. The prose
//! around those is the page's own.
//!
//! A table stands between `<!-- fields of TYPE -->` or `<!-- values of TYPE -->` and `<!-- end -->`. A type with its own table is
//! linked; the fields of a type without one stand in the table of its parent.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;

use pd_harness::schema;
use pd_harness::shape::{Absent, Field, Kind, Shape, Shapes, Variant};
use serde_json::Value;

const SCHEMA: &str = "config.schema.json";
const PAGE: &str = "config-reference.md";
const END: &str = "<!-- end -->";
/// Bounds from here on come from a number's width, and are not shown.
const WIDE: f64 = u32::MAX as f64;

/// Why the files cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    /// The page cannot be made.
    #[error("{PAGE}: {0}")]
    Page(#[from] PageError),
    /// A file cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why the page cannot be made.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum PageError {
    /// A marker names no type of the configuration.
    #[error("there is no type {0} to make a table of")]
    NoSuchType(String),
    /// A table has no end.
    #[error("the table of {0} is not followed by `{END}`")]
    NoEnd(String),
}

/// Writes the files in this folder anew; prints the names of those that have changed.
///
/// # Errors
/// When the page cannot be made, or a file cannot be read or written.
pub fn write(folder: &Path) -> Result<(), ReferenceError> {
    let made = page(&fs::read_to_string(folder.join(PAGE))?)?;
    for (name, text) in [(SCHEMA, schema::text()), (PAGE, made)] {
        let file = folder.join(name);
        if fs::read(&file).ok().as_deref() != Some(text.as_bytes()) {
            fs::write(&file, text)?;
            println!("{name}");
        }
    }
    Ok(())
}

/// The page with new tables.
///
/// # Errors
/// When a marker names an unknown type, or a table does not end.
fn page(page: &str) -> Result<String, PageError> {
    let shapes = Shapes::new(schema::document());
    let tables = Tables {
        sections: sections(page),
    };
    let mut made = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let _ = writeln!(made, "{line}");
        let Some((what, name)) = marker(line) else {
            continue;
        };
        let shape = match name {
            "Config" => Some(shapes.document()),
            name => shapes.named(name),
        };
        let shape = shape.ok_or_else(|| PageError::NoSuchType(name.to_owned()))?;
        made.push_str(&match what {
            Table::Fields => tables.of_fields(&shape),
            Table::Values => of_values(&shape),
        });
        if !lines.any(|line| line == END) {
            return Err(PageError::NoEnd(name.to_owned()));
        }
        let _ = writeln!(made, "{END}");
    }
    Ok(made)
}

#[derive(Clone, Copy, PartialEq)]
enum Table {
    Fields,
    Values,
}

fn marker(line: &str) -> Option<(Table, &str)> {
    let inner = line.strip_prefix("<!-- ")?.strip_suffix(" -->")?;
    let fields = inner
        .strip_prefix("fields of ")
        .map(|name| (Table::Fields, name));
    let values = || {
        inner
            .strip_prefix("values of ")
            .map(|name| (Table::Values, name))
    };
    fields.or_else(values)
}

/// Sections by type.
fn sections(page: &str) -> BTreeMap<&str, Section> {
    let mut heading = "";
    let mut found = BTreeMap::new();
    for line in page.lines() {
        if let Some((level, title)) = line.split_once(' ')
            && !level.is_empty()
            && level.bytes().all(|byte| byte == b'#')
        {
            heading = title;
        }
        if let Some((table, name)) = marker(line) {
            let link = link_to(heading);
            found.insert(name, Section { table, link });
        }
    }
    found
}

fn link_to(heading: &str) -> String {
    let anchor: String = heading
        .to_lowercase()
        .chars()
        .filter_map(|letter| match letter {
            ' ' => Some('-'),
            '-' | '_' => Some(letter),
            letter => letter.is_alphanumeric().then_some(letter),
        })
        .collect();
    format!("[{}](#{anchor})", heading.to_lowercase())
}

fn of_values(shape: &Shape<'_>) -> String {
    let mut table = String::from("| value | meaning |\n|---|---|\n");
    if let Kind::Choice(variants) = shape.kind() {
        for variant in variants {
            let _ = writeln!(
                table,
                "| `{}` | {} |",
                variant.name,
                cell(variant.description)
            );
        }
    }
    table
}

struct Tables<'p> {
    sections: BTreeMap<&'p str, Section>,
}

/// The section of a type's table.
struct Section {
    table: Table,
    /// A link to the heading above it.
    link: String,
}

impl Tables<'_> {
    fn of_fields(&self, shape: &Shape<'_>) -> String {
        let mut table = String::from("| field | type | default | meaning |\n|---|---|---|---|\n");
        self.add_inner(&mut table, shape, "");
        table
    }

    /// Adds the fields within `shape`, with `prefix` before their names.
    fn add_inner(&self, table: &mut String, shape: &Shape<'_>, prefix: &str) {
        match shape.kind() {
            Kind::Object => {
                for field in shape.fields() {
                    self.add(table, &field, &format!("{prefix}{}", field.name));
                }
            }
            Kind::Choice(variants) => {
                for variant in variants {
                    if let Some(inner) = variant.inner.filter(|inner| !self.has_section(inner)) {
                        self.add_inner(table, &inner, &format!("{prefix}{}.", variant.name));
                    }
                }
            }
            Kind::List(_) | Kind::Map(_) | Kind::Plain => {}
        }
    }

    fn add(&self, table: &mut String, field: &Field<'_>, name: &str) {
        let is_spread = field.absent == Absent::Defaults && !self.has_section(&field.shape);
        if !is_spread {
            let _ = writeln!(
                table,
                "| `{name}` | {} | {} | {} |",
                self.written(field),
                default(field.absent),
                self.meaning(field)
            );
        }
        if self.has_section(&field.shape) {
            return;
        }
        match field.shape.kind() {
            Kind::List(item) if !self.has_section(&item) => {
                self.add_inner(table, &item, &format!("{name}[]."));
            }
            Kind::Map(value) if !self.has_section(&value) => {
                self.add_inner(table, &value, &format!("{name}.*."));
            }
            _ => self.add_inner(table, &field.shape, &format!("{name}.")),
        }
    }

    fn section(&self, shape: &Shape<'_>) -> Option<&Section> {
        self.sections.get(shape.name?)
    }

    fn has_section(&self, shape: &Shape<'_>) -> bool {
        self.section(shape).is_some()
    }

    /// The accepted values.
    fn written(&self, field: &Field<'_>) -> String {
        let or_null = match field.absent {
            Absent::Default(_) if is_nullable(&field.shape) => ", or `null`",
            _ => "",
        };
        format!("{}{or_null}", self.type_of(&field.shape))
    }

    fn type_of(&self, shape: &Shape<'_>) -> String {
        match (self.section(shape), shape.kind()) {
            (Some(section), Kind::Choice(variants)) if section.table == Table::Fields => {
                format!("{} ({})", self.choice(&variants), section.link)
            }
            (Some(section), _) => section.link.clone(),
            (None, Kind::Object) => "object".to_owned(),
            (None, Kind::List(item)) => self.list_of(shape, &item),
            (None, Kind::Map(value)) => format!("name → {}", self.type_of(&value)),
            (None, Kind::Choice(variants)) => self.choice(&variants),
            (None, Kind::Plain) => plain(shape),
        }
    }

    fn list_of(&self, list: &Shape<'_>, item: &Shape<'_>) -> String {
        let items = match self.type_of(item).as_str() {
            "string" => "strings".to_owned(),
            "object" => "objects".to_owned(),
            other => other.to_owned(),
        };
        match count(list.schema, "minItems", "maxItems") {
            Some(count) => format!("list of {items}, {count}"),
            None => format!("list of {items}"),
        }
    }

    fn choice(&self, variants: &[Variant<'_>]) -> String {
        let written = variants.iter().map(|variant| self.variant(variant));
        written.collect::<Vec<_>>().join(", ")
    }

    fn variant(&self, variant: &Variant<'_>) -> String {
        match &variant.inner {
            None => format!("`\"{}\"`", variant.name),
            Some(inner) if self.has_section(inner) => {
                format!("`{{\"{}\": …}}` {}", variant.name, self.type_of(inner))
            }
            Some(_) => format!("`{{\"{}\": …}}`", variant.name),
        }
    }

    /// The field's meaning, and each of its values that no other table explains.
    fn meaning(&self, field: &Field<'_>) -> String {
        let mut meaning = cell(field.description);
        let item = match field.shape.kind() {
            Kind::List(item) => item,
            _ => field.shape,
        };
        let Kind::Choice(variants) = item.kind() else {
            return meaning;
        };
        let section = self.section(&item);
        if section.is_some_and(|section| section.table == Table::Values) {
            return meaning;
        }
        for variant in variants.iter().filter(|one| !one.description.is_empty()) {
            let _ = write!(
                meaning,
                " `{}`: {}",
                variant.name,
                cell(variant.description)
            );
        }
        meaning.trim().to_owned()
    }
}

fn default(absent: Absent<'_>) -> String {
    match absent {
        Absent::Refused => "required".to_owned(),
        Absent::Default(value) => format!("`{value}`"),
        Absent::Defaults => String::new(),
        Absent::Nothing => "none".to_owned(),
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn is_nullable(shape: &Shape<'_>) -> bool {
    let types = shape.schema["type"].as_array();
    types.is_some_and(|types| types.iter().any(|one| one == "null"))
}

/// A number with its unit and bounds, a string, a bool.
fn plain(shape: &Shape<'_>) -> String {
    let kind = match &shape.schema["type"] {
        Value::Array(types) => types.first().and_then(Value::as_str),
        kind => kind.as_str(),
    };
    let (name, bounds) = match kind {
        Some("integer" | "number") => {
            let bounds = count(shape.schema, "minimum", "maximum");
            (shape.unit().unwrap_or("number"), bounds)
        }
        Some("boolean") => ("bool", None),
        Some("string") => {
            let least = shape.schema["minLength"].as_u64();
            ("string", least.map(|_| "not empty".to_owned()))
        }
        _ => ("any", None),
    };
    match bounds {
        Some(bounds) => format!("{name}, {bounds}"),
        None => name.to_owned(),
    }
}

/// The bounds from these two keywords, if tighter than the number's width.
fn count(schema: &Value, least: &str, most: &str) -> Option<String> {
    let is_whole = match &schema["type"] {
        Value::Array(types) => !types.iter().any(|one| one == "number"),
        kind => kind != "number",
    };
    let least = schema[least]
        .as_f64()
        .filter(|least| *least > 0.0 || !is_whole);
    let most = schema[most].as_f64().filter(|most| *most < WIDE);
    match (least, most) {
        (None, None) => None,
        (Some(least), None) => Some(format!("at least {least}")),
        (None, Some(most)) => Some(format!("at most {most}")),
        (Some(least), Some(most)) => Some(format!("{least} to {most}")),
    }
}

#[cfg(test)]
mod tests;
