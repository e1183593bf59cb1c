//! Owns a node of a document: its value and its path.

use serde_json::Value;

/// A node, which may be absent.
#[derive(Clone, Debug)]
pub struct Node<'a> {
    value: &'a Value,
    path: String,
}

impl<'a> Node<'a> {
    /// The whole document.
    pub fn root(value: &'a Value) -> Self {
        Self {
            value,
            path: String::new(),
        }
    }

    /// Its path, such as `static_resources.clusters[0].name`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its value.
    pub fn value(&self) -> &'a Value {
        self.value
    }

    /// Whether it exists.
    pub fn is_there(&self) -> bool {
        !self.value.is_null()
    }

    /// A field by its name with underscores; Envoy accepts camel case too.
    pub fn field(&self, name: &str) -> Self {
        let (name, value) = match self.value.get(name) {
            Some(value) => (name.to_owned(), value),
            None => {
                let other = camel(name);
                match self.value.get(&other) {
                    Some(value) => (other, value),
                    None => (name.to_owned(), &Value::Null),
                }
            }
        };
        let dot = if self.path.is_empty() { "" } else { "." };
        Self {
            value,
            path: format!("{}{dot}{name}", self.path),
        }
    }

    /// A nested field: names separated by dots.
    pub fn at(&self, path: &str) -> Self {
        let names = path.split('.');
        names.fold(self.clone(), |node, name| node.field(name))
    }

    /// The items of a list; none for anything else.
    pub fn items(&self) -> Vec<Self> {
        let items = self.value.as_array().into_iter().flatten().enumerate();
        items
            .map(|(index, value)| Self {
                value,
                path: format!("{}[{index}]", self.path),
            })
            .collect()
    }

    /// Its value as text.
    pub fn text(&self) -> Option<&'a str> {
        self.value.as_str()
    }

    /// Its value as an integer, which may be written as text.
    pub fn number(&self) -> Option<u64> {
        let number = self.value.as_u64();
        number.or_else(|| self.text()?.parse().ok())
    }

    /// Whether its value is `true`.
    pub fn is_true(&self) -> bool {
        self.value == &Value::Bool(true)
    }

    /// Whether it is a message of a type whose name ends with `kind`.
    pub fn is_a(&self, kind: &str) -> bool {
        let name = self.value.get("@type").and_then(Value::as_str);
        name.is_some_and(|name| name.rsplit('.').next() == Some(kind))
    }
}

fn camel(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |mut name, word| {
        let mut letters = word.chars();
        name.extend(letters.next().map(|letter| letter.to_ascii_uppercase()));
        name.push_str(letters.as_str());
        name
    })
}
