//! Owns finding and reading the files under `envoy/`.

use std::fs;
use std::path::{Path, PathBuf};

use pd_router_e2e::paths::workspace;
use serde::Deserialize as _;
use serde_json::Value;

/// A document of a YAML file, and its origin.
pub struct Document {
    /// The file, as seen from the workspace.
    pub file: String,
    pub content: Value,
}

impl Document {
    /// `kind/name`, for people.
    pub fn title(&self) -> String {
        let text = |at: &str| self.content.pointer(at).and_then(Value::as_str);
        let kind = text("/kind").unwrap_or("?");
        let name = text("/metadata/name").unwrap_or("?");
        format!("{}: {kind}/{name}", self.file)
    }

    pub fn is(&self, kind: &str) -> bool {
        self.content.get("kind").and_then(Value::as_str) == Some(kind)
    }
}

/// A file of the workspace.
pub fn read(path: &str) -> String {
    let path = workspace().join(path);
    fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
}

/// Every document of a YAML file of the workspace.
pub fn documents(file: &str) -> Vec<Document> {
    let text = read(file);
    let parsed = serde_yaml_ng::Deserializer::from_str(&text).map(|document| {
        let content =
            Value::deserialize(document).unwrap_or_else(|error| panic!("{file}: {error}"));
        Document {
            file: file.to_owned(),
            content,
        }
    });
    parsed.collect()
}

/// The one document of a YAML file of the workspace.
pub fn document(file: &str) -> Value {
    let mut all = documents(file);
    assert_eq!(all.len(), 1, "{file} holds {} documents", all.len());
    all.remove(0).content
}

/// The folders under `envoy/`, as `envoy/NAME`, in order.
pub fn folders() -> Vec<String> {
    let inside = entries("envoy").into_iter();
    inside
        .filter(|path| workspace().join(path).is_dir())
        .collect()
}

/// Every YAML file under `envoy/`, in order.
pub fn yaml_files() -> Vec<String> {
    let mut found: Vec<String> = folders()
        .iter()
        .flat_map(|folder| entries(folder))
        .collect();
    found.extend(entries("envoy"));
    found.retain(|path| path.ends_with(".yaml"));
    found.sort();
    found
}

/// Every bootstrap of Envoy under `envoy/`, in order.
pub fn bootstraps() -> Vec<String> {
    let mut found = yaml_files();
    found.retain(|path| name_of(path).starts_with("bootstrap"));
    found
}

/// Every Kubernetes object under `envoy/`.
pub fn objects() -> Vec<Document> {
    let files = yaml_files().into_iter();
    let manifests = files
        .filter(|path| !name_of(path).starts_with("bootstrap") && name_of(path) != "alerts.yaml");
    manifests.flat_map(|path| documents(&path)).collect()
}

/// The object of this kind in the file; there must be one.
pub fn object(file: &str, kind: &str) -> Value {
    let mut found = documents(file);
    found.retain(|document| document.is(kind));
    assert_eq!(found.len(), 1, "{file}: {} of kind {kind}", found.len());
    found.remove(0).content
}

fn entries(folder: &str) -> Vec<String> {
    let path = workspace().join(folder);
    let listed = fs::read_dir(&path)
        .unwrap_or_else(|error| panic!("cannot list {}: {error}", path.display()));
    let mut names: Vec<String> = listed
        .map(|entry| entry.unwrap_or_else(|error| panic!("{folder}: {error}")))
        .map(|entry| format!("{folder}/{}", entry.file_name().to_string_lossy()))
        .collect();
    names.sort();
    names
}

fn name_of(path: &str) -> String {
    let name = PathBuf::from(path);
    let name = name.file_name().map(Path::new);
    name.map(|name| name.display().to_string())
        .unwrap_or_default()
}
