//! The image: an OCI layout in which gateways find `plugin.wasm`.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use flate2::read::GzDecoder;
use pd_router_e2e::paths;
use pd_router_e2e::process::unique_name;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Bytes of a block of a tar archive.
const BLOCK: usize = 512;

fn digest(content: &[u8]) -> String {
    let sum = Sha256::digest(content);
    let hex: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// A layout written for a test.
struct Layout(PathBuf);

impl Layout {
    fn written() -> Self {
        let folder = paths::scratch().join(unique_name("image"));
        let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let ran = Command::new(python)
            .arg(paths::workspace().join("scripts/image.py"))
            .arg(paths::plugin())
            .arg(&folder)
            .args(["1.2.3", "arm64"])
            .output()
            .expect("Python starts");
        let errors = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(ran.status.success(), "{errors}");
        Self(folder)
    }

    fn json(&self, file: &str) -> Value {
        let text = fs::read(self.0.join(file)).expect("the layout has the file");
        serde_json::from_slice(&text).expect("it is JSON")
    }

    /// The blob of this reference; fails if its size or digest differs.
    fn blob(&self, reference: &Value, media_type: &str) -> Vec<u8> {
        assert_eq!(reference["mediaType"], media_type);
        let name = reference["digest"].as_str().expect("a digest is a string");
        let hex = name.strip_prefix("sha256:").expect("digests are SHA-256");
        let content = fs::read(self.0.join("blobs/sha256").join(hex)).expect("the blob is there");
        assert_eq!(digest(&content), name);
        assert_eq!(reference["size"], content.len());
        content
    }

    fn json_blob(&self, reference: &Value, media_type: &str) -> Value {
        let content = self.blob(reference, media_type);
        serde_json::from_slice(&content).expect("the blob is JSON")
    }
}

/// The names and contents of a tar archive's files.
fn untarred(archive: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    let mut rest = archive;
    while let Some((header, content)) = rest.split_at_checked(BLOCK) {
        if header.iter().all(|&byte| byte == 0) {
            break;
        }
        let text = |range: std::ops::Range<usize>| {
            let field = String::from_utf8_lossy(&header[range]).into_owned();
            field.trim_end_matches('\0').trim().to_owned()
        };
        assert_eq!(header[156], b'0', "a plain file");
        let size = usize::from_str_radix(&text(124..136), 8).expect("a size is octal");
        files.push((text(0..100), content[..size].to_vec()));
        rest = &content[size.div_ceil(BLOCK) * BLOCK..];
    }
    files
}

/// Every file under the folder with its content, in order.
fn files_under(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("the folder can be listed") {
        let path = entry.expect("its entry too").path();
        if path.is_dir() {
            found.extend(files_under(&path));
        } else {
            let name = path.file_name().unwrap_or_default();
            let content = fs::read(&path).expect("the file can be read");
            found.push((name.to_string_lossy().into_owned(), content));
        }
    }
    found.sort();
    found
}

#[test]
fn the_layout_holds_the_plugin_and_says_what_it_is() {
    let layout = Layout::written();
    assert_eq!(
        layout.json("oci-layout"),
        json!({"imageLayoutVersion": "1.0.0"})
    );
    let index = layout.json("index.json");
    assert_eq!(index["schemaVersion"], 2);
    let entries = index["manifests"].as_array().expect("an index is a list");
    let [entry] = entries.as_slice() else {
        panic!("{} manifests", entries.len());
    };
    let tag = &entry["annotations"]["org.opencontainers.image.ref.name"];
    assert_eq!(tag, "1.2.3");
    let manifest = layout.json_blob(entry, MANIFEST);
    let layers = manifest["layers"].as_array().expect("layers are a list");
    let [layer] = layers.as_slice() else {
        panic!("{} layers", layers.len());
    };
    let mut archive = Vec::new();
    let packed = layer_of(&layout, layer);
    GzDecoder::new(packed.as_slice())
        .read_to_end(&mut archive)
        .expect("the layer is gzip");
    let config = layout.json_blob(&manifest["config"], CONFIG);
    assert_eq!(config["rootfs"]["diff_ids"], json!([digest(&archive)]));
    assert_eq!(config["architecture"], "arm64");
    assert_eq!(entry["platform"]["architecture"], "arm64");
    let labels = &config["config"]["Labels"];
    assert_eq!(*labels, manifest["annotations"]);
    for (label, value) in [
        ("title", "pd-router"),
        ("licenses", "Apache-2.0"),
        ("version", "1.2.3"),
    ] {
        assert_eq!(labels[format!("org.opencontainers.image.{label}")], value);
    }
    assert!(labels["org.opencontainers.image.description"].is_string());
    let plugin = fs::read(paths::plugin()).expect("the plugin can be read");
    assert!(untarred(&archive) == [("plugin.wasm".to_owned(), plugin)]);
}

fn layer_of(layout: &Layout, layer: &Value) -> Vec<u8> {
    layout.blob(layer, LAYER)
}

#[test]
fn the_same_plugin_is_the_same_image() {
    let [first, second] = [Layout::written(), Layout::written()];
    assert!(files_under(&first.0) == files_under(&second.0));
}
