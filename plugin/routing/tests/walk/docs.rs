//! Owns the generated documentation: the table and the diagram of states, and the table of errors.
//!
//! `UPDATE_DOCS=1` writes the files; otherwise they are compared.

mod errors;
mod states;

use std::path::PathBuf;

/// Compares a file in `docs/` with its expected text, or writes it.
fn compare(name: &str, text: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let path = path.join(name);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        there == text,
        "docs/{name} is not what the code says; write it anew with UPDATE_DOCS=1 cargo test -p routing --test walk"
    );
}
